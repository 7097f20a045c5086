#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the CUDA part on a machine with a GPU: instructions against their twins, correctness, graph replay, speed. Needs
# bash, coreutils and a driver; the programs are prebuilt, or built first where nvcc is. Takes at most five minutes.
#
#   scripts/gpu_check.sh [--bin DIR] [--out DIR] [--full] [--only STEP,...] [--sanitizer PROGRAM] [--seconds N] [--limit N]
#   scripts/gpu_check.sh --build       builds the programs for sm_90 into build/gpu, to be carried to such a machine
#
#   --bin DIR         where the programs are (build/gpu)
#   --out DIR         where gpu_check.log, gpu.json, gpu.md and clocks.csv go ($OUT, else build/gpu-out)
#   --full            every combination of the bandwidth table; takes as long as it takes
#   --only STEP,...   some of: card, twins, correctness, replay, loop, memcheck, racecheck, bandwidth
#   --sanitizer PROGRAM   compute-sanitizer, where it is not on the PATH
#   --seconds N       what all steps may take together (285)
#   --limit N         no step may take longer than this
set -uo pipefail
here=$PWD
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
programs=(gpu_twins gpu_check gpu_replay cuda_engine_loop gpu_bandwidth)

usage() { sed -n '6,16s/^# \{0,3\}//p' "${BASH_SOURCE[0]}"; }
wrong() { echo "error: $1" >&2; usage >&2; exit 2; }
from_here() { case $1 in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; }

bin=$root/build/gpu out=${OUT:-$root/build/gpu-out} full=0 only='' sanitizer='' seconds=285 limit=100000 build=0
while [ $# -gt 0 ]; do
  case $1 in
    --full) full=1 ;;
    --build) build=1 ;;
    --bin | --out | --only | --sanitizer | --seconds | --limit)
      [ $# -ge 2 ] && [ -n "$2" ] || wrong "$1 needs a value"
      case $1 in
        --bin) bin=$(from_here "$2") ;;
        --out) out=$(from_here "$2") ;;
        --only) only=$2 ;;
        --sanitizer) sanitizer=$(from_here "$2") ;;
        --seconds) seconds=$2 ;;
        --limit) limit=$2 ;;
      esac
      shift
      ;;
    -h | --help) usage; exit ;;
    *) wrong "unknown option '$1'" ;;
  esac
  shift
done
[[ $seconds =~ ^[1-9][0-9]{0,4}$ ]] || wrong "--seconds is '$seconds', not 1 to 99999"
[[ $limit =~ ^[1-9][0-9]{0,5}$ ]] || wrong "--limit is '$limit', not 1 to 999999"
for name in ${only//,/ }; do
  case $name in
    card | twins | correctness | replay | loop | memcheck | racecheck | bandwidth) ;;
    *) wrong "--only: there is no step '$name'" ;;
  esac
done
[ $full = 0 ] || [ "$seconds" != 285 ] || seconds=3600

# Static but for the C library, whose version on the other machine may be newer, not older.
build_programs() {
  local tree=$root/build/gpu-tree name needed
  # A fifth of the size: the four programs that hold all kernels would be 80 MB otherwise.
  export NVCC_APPEND_FLAGS="--compress-mode=size ${NVCC_APPEND_FLAGS:-}"
  cmake -G Ninja -S "$root" -B "$tree" -DCMAKE_BUILD_TYPE=Release -DKVCACHE_WITH_CUDA=ON -DKVCACHE_REQUIRE_NVCC=ON \
    -DKVCACHE_CUDA_ARCHITECTURES=90 -DKVCACHE_WITH_HIGHWAY=OFF -DKVCACHE_BUILD_BENCH=OFF -DKVCACHE_BUILD_CLI=OFF \
    -DBUILD_SHARED_LIBS=OFF -DBoost_USE_STATIC_LIBS=ON "-DCMAKE_EXE_LINKER_FLAGS=-static-libstdc++ -static-libgcc" \
    >/dev/null || return 1
  cmake --build "$tree" -j "${KVCACHE_JOBS:-$(nproc)}" --target "${programs[@]}" || return 1
  mkdir -p "$bin"
  for name in "${programs[@]}"; do
    strip -o "$bin/$name" "$tree/bin/$name" || return 1
    needed=$(readelf -d "$bin/$name" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
      grep -vxE 'lib(c|m|dl|rt|pthread)\.so\.[0-9]+|ld-linux-x86-64\.so\.2' || true)
    [ -z "$needed" ] || { echo "error: $name needs libraries that the other machine may not have: $needed" >&2; return 1; }
  done
  du -ch "${programs[@]/#/$bin/}"
  [ "$(du -cm "${programs[@]/#/$bin/}" | sed -n '$s/[^0-9].*//p')" -le 64 ] || { echo "error: more than 64 MiB to carry" >&2; return 1; }
}
if [ $build = 1 ]; then build_programs; exit; fi

mkdir -p "$out" || exit 2
log=$out/gpu_check.log
step_log=$(mktemp)
trap 'rm -f "$step_log"' EXIT
: >"$log" || exit 2
if [ ! -d "$bin" ] && { command -v nvcc || [ -x /usr/local/cuda/bin/nvcc ]; } >/dev/null; then
  echo "no programs in $bin: building them"
  build_programs >"$log" 2>&1 || { tail -n 30 "$log" >&2; exit 1; }
fi

started=$(date +%s)
names=() results=() failed=0

# left: seconds that are left for all steps.
left() { echo $((started + seconds - $(date +%s))); }
wanted() { [ -z "$only" ] || [[ ",$only," == *",$1,"* ]]; }
note() { names+=("$1"); results+=("$2"); echo "  $1: $2"; }
fail() { note "$1" "FAILED: $2"; failed=$((failed + 1)); }

# step NAME SECONDS COMMAND...: runs a command under its limit; its output goes to the log, the last lines of it here.
step() {
  local name=$1 most=$2 begin code taken rest
  shift 2
  wanted "$name" || return 0
  rest=$(left)
  [ "$most" -le "$limit" ] || most=$limit
  [ "$most" -le "$rest" ] || most=$rest
  printf '\n[%3d s] %s (at most %d s)\n' $(($(date +%s) - started)) "$name" "$((most > 0 ? most : 0))"
  if [ "$most" -le 0 ]; then fail "$name" "not reached, the $seconds s were over"; return 0; fi
  begin=$(date +%s)
  timeout -k 5 "$most" "$@" >"$step_log" 2>&1
  code=$?
  taken=$(($(date +%s) - begin))
  { printf '\n==== %s: exit status %d after %d s\n' "$name" $code $taken && cat "$step_log"; } >>"$log"
  tail -n 12 "$step_log" | sed 's/^/    /'
  case $code in
    0) note "$name" "ok in $taken s" ;;
    124 | 137) fail "$name" "stopped after $taken s" ;;
    *) fail "$name" "exit status $code after $taken s" ;;
  esac
}
# program NAME SECONDS PROGRAM ARGUMENT...: a step that runs one of the prebuilt programs.
program() {
  local name=$1 most=$2 file=$bin/$3
  shift 3
  wanted "$name" || return 0
  if [ ! -x "$file" ]; then
    printf '\n[%3d s] %s\n' $(($(date +%s) - started)) "$name"
    fail "$name" "there is no $file"
    return 0
  fi
  step "$name" "$most" "$file" "$@"
}

query=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,clocks.sm,clocks.mem,power.limit,temperature.gpu
driver=''
if command -v nvidia-smi >/dev/null; then
  timeout 20 nvidia-smi --query-gpu=$query --format=csv 2>&1 | tee -a "$log"
  driver=$(timeout 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
elif [ -r /proc/driver/nvidia/version ]; then
  driver=$(sed -n '1s/.*Module *\([0-9.]*\).*/\1/p' /proc/driver/nvidia/version)
fi
[[ $driver =~ ^[0-9.]+$ ]] || driver=unknown
echo "driver $driver"

program card 30 gpu_bandwidth --card
program twins 60 gpu_twins
program replay 40 gpu_replay
program loop 30 cuda_engine_loop
program correctness 120 gpu_check

# The sanitizer is not everywhere, and not every machine lets it work: that is said, and is no fault of the library. It
# sees a part of the cases, because it makes them many times slower.
[ -n "$sanitizer" ] || sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
cases='splits change nothing*,several query rows*,heads may go to slots*,merge joins*,a kept slot*,padding rows*'
cases+=',absent packed and open*,rows of a chunk*,exempt slots are left out*'
sanitize() {
  local tool=$1
  wanted "$tool" || return 0
  if [ -z "$sanitizer" ] || [ ! -x "$sanitizer" ]; then
    printf '\n[%3d s] %s\n' $(($(date +%s) - started)) "$tool"
    note "$tool" "NOT RUN: compute-sanitizer is not on this machine (--sanitizer)"
    return 0
  fi
  step "$tool" 40 env KVCACHE_GPU_APART=1 "$sanitizer" --tool "$tool" --error-exitcode 9 "$bin/gpu_check" "$cases"
  if [[ ${results[-1]} = FAILED* ]] && grep -qi 'device not supported' "$step_log"; then
    results[-1]="NOT RUN: compute-sanitizer does not support this device"
    failed=$((failed - 1))
  fi
}
sanitize memcheck
sanitize racecheck

if wanted bandwidth; then
  sampler=''
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv -l 1 >"$out/clocks.csv" 2>&1 &
    sampler=$!
  fi
  options=(--driver "$driver" --json "$out/gpu.json" --markdown "$out/gpu.md")
  time=$(($(left) - 20))
  [ $full = 1 ] || [ $time -le 120 ] || time=120
  [ $time -ge 5 ] || time=5
  [ $full = 0 ] || options+=(--full)
  program bandwidth $((time + 20)) gpu_bandwidth "${options[@]}" --seconds "$time"
  if [ -n "$sampler" ]; then kill "$sampler" 2>/dev/null; fi
  for file in gpu.json gpu.md; do
    if [ -s "$out/$file" ]; then echo "  $out/$file"; fi
  done
fi

echo
echo "summary: $(date -u +%F), driver $driver, $(($(date +%s) - started)) s"
for i in "${!names[@]}"; do printf '  %-12s %s\n' "${names[i]}" "${results[i]}"; done
if [ ${#names[@]} = 0 ]; then echo "nothing was run"; exit 1; fi
if [ $failed -gt 0 ]; then echo "$failed of ${#names[@]} steps failed; see $log"; exit 1; fi
echo "no step failed; everything they said is in $log"
