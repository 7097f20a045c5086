#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of several build trees as one ctest run and prints ctest's own summary line last.
#   run_ctest.sh COLLECT-DIR BUILD-DIR...     (CTEST_ARGS: more arguments for ctest)
# Fails if a test fails, if a tree has no test, and if ctest left a test out ("Not Run", "Skipped", "Disabled").
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: run_ctest.sh COLLECT-DIR BUILD-DIR..." >&2; exit 2; }
collect=$1; shift
mkdir -p "$collect"
collect=$(cd "$collect" && pwd)
: >"$collect/CTestTestfile.cmake"
for dir in "$@"; do
  dir=$(cd "$dir" && pwd)
  count=$(cd "$dir" && ctest -N 2>/dev/null | sed -n 's/^Total Tests: //p')
  [ "${count:-0}" -gt 0 ] || { echo "$dir registers no test" >&2; exit 1; }
  echo "$count tests in $dir"
  printf 'subdirs("%s")\n' "$dir" >>"$collect/CTestTestfile.cmake"
done

jobs=${KVCACHE_JOBS:-$(nproc)}
log=$collect/ctest.log
code=0
# shellcheck disable=SC2086
(cd "$collect" && ctest --output-on-failure --no-label-summary --no-tests=error -j "$jobs" ${CTEST_ARGS:-}) 2>&1 \
  | tee "$log" || code=$?

summary=$(grep -E '^[0-9]+% tests passed, [0-9]+ tests? failed out of [0-9]+' "$log" | tail -n 1 || true)
[ -n "$summary" ] || { echo "ctest gave no summary" >&2; exit 1; }
if grep -qE '\*\*\*(Not Run|Skipped)|Not Run \(Disabled\)|The following tests did not run' "$log"; then
  echo "ctest left tests out; that counts as a failure" >&2
  code=1
fi
echo
echo "slowest:"
sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([^ ]+) \.*[^.]* +([0-9.]+) sec.*/\2 s  \1/p' "$log" | sort -rn | sed -n 1,12p
echo
echo "$summary"
exit $code
