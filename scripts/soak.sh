#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every fuzz target for a long time, with AddressSanitizer and UndefinedBehaviorSanitizer.   soak.sh [HOURS]
# HOURS (default 8, fractions allowed) is the whole time; KVCACHE_JOBS=N targets run at once. What was found before is
# kept in build/soak/<corpus> and is where the next run starts. An input that breaks something is left in
# build/soak/<corpus>-crash-...; the exit code is then 1. To see it again: build/asan/bin/<program> FILE
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
hours=${1:-8}
[[ $hours =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "HOURS is '$hours', a positive number is needed"

# Corpora and the programs they are for.
targets=(trace_fuzz:mooncake trace_fuzz:weka trace_fuzz:logs trace_fuzz:kv_events trace_fuzz:packed
  text_fuzz:text model_fuzz:model)
for folder in tests/fuzz/corpus/*/; do
  name=$(basename "$folder")
  [[ " ${targets[*]} " == *":$name "* ]] || die "soak.sh does not know the corpus $name"
done
seconds=$(awk -v h="$hours" -v n=${#targets[@]} -v j="$jobs" 'BEGIN { s = int(h * 3600 * j / n); print (s > 0 ? s : 1) }')
steps_total=2

step "build: AddressSanitizer and UndefinedBehaviorSanitizer"
cmake --preset asan >/dev/null
grep -q '^KVCACHE_FUZZ:BOOL=ON' build/asan/CMakeCache.txt || die "this clang has no libFuzzer (Debian: libclang-rt-14-dev)"
cmake --build build/asan -j "$jobs" --target trace_fuzz text_fuzz model_fuzz

step "${#targets[@]} targets, $seconds seconds each, $jobs at once"
mkdir -p build/soak
# soak PROGRAM CORPUS: a line when it is done; 1 if something broke.
soak() {
  mkdir -p "build/soak/$2"
  if UBSAN_OPTIONS=print_stacktrace=1 "build/asan/bin/$1" -max_total_time="$seconds" -max_len=16384 -timeout=30 \
    -rss_limit_mb=4096 -print_final_stats=1 -dict=tests/fuzz/fuzz.dict -artifact_prefix="build/soak/$2-" \
    "build/soak/$2" "tests/fuzz/corpus/$2" >"build/soak/$2.log" 2>&1; then
    echo "$2: $(sed -n 's/^stat::number_of_executed_units: *//p' "build/soak/$2.log") inputs, nothing broke"
  else
    echo "$2: broke, see build/soak/$2.log" >&2
    tail -n 30 "build/soak/$2.log" >&2
    return 1
  fi
}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
code=0
for t in "${targets[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || code=1; done
  soak "${t%%:*}" "${t##*:}" &
done
while [ "$(jobs -p | wc -l)" -gt 0 ]; do wait -n || code=1; done
exit $code
