#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/gpu_check.sh with programs that only pretend: what it says of one that passes, fails, hangs or is missing, and
# its own exit status.   script_test.sh SOURCE-DIR
set -uo pipefail
source=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bin=$work/bin
mkdir -p "$bin" "$work/path"

# fake NAME BODY: a program.
fake() { printf '#!/bin/sh\n%s\n' "$2" >"$1"; chmod +x "$1"; }
reset() {
  rm -f "$bin"/* "$work/path"/*
  for name in gpu_twins gpu_check gpu_replay cuda_engine_loop; do fake "$bin/$name" 'echo "all right"'; done
  # Writes what it is told to write, so that the script's names are seen to arrive.
  fake "$bin/gpu_bandwidth" 'all=$*
while [ $# -gt 0 ]; do case $1 in --json | --markdown) echo "$all" >"$2"; shift ;; esac; shift; done'
}
# expect STATUS TEXT...: runs the script with `options`; its status, and patterns that its output has, or not ("! ").
expect() {
  local status=$1 text code pattern
  shift
  rm -rf "$work/out"
  # Neither a real driver's nor a real sanitizer's programs.
  text=$(PATH=$work/path:/usr/bin:/bin timeout 100 "$source/scripts/gpu_check.sh" --bin "$bin" --out "$work/out" \
    "${options[@]}" 2>&1)
  code=$?
  for pattern in "$@"; do
    case $pattern in
      '! '*) grep -qE -- "${pattern#! }" <<<"$text" || continue ;;
      *) ! grep -qE -- "$pattern" <<<"$text" || continue ;;
    esac
    echo "with '${options[*]}' the output is not as expected: $pattern"; echo "$text"; exit 1
  done
  [ "$code" = "$status" ] || { echo "with '${options[*]}' the status is $code, not $status"; echo "$text"; exit 1; }
}

reset
options=()
if [ -x /usr/local/cuda/bin/compute-sanitizer ]; then options=(--only card,twins,correctness,replay,loop,bandwidth); fi
expect 0 '^  twins +ok in' '^  correctness +ok in' '^  replay +ok in' '^  loop +ok in' '^  bandwidth +ok in' \
  '^no step failed' 'all right' '! FAILED'
[ -s "$work/out/gpu.json" ] && [ -s "$work/out/gpu.md" ] && grep -q '^==== twins: exit status 0' "$work/out/gpu_check.log" ||
  { echo "files are missing"; exit 1; }

options=(--only memcheck --sanitizer "$work/none")
expect 0 '^  memcheck +NOT RUN: compute-sanitizer is not on this machine'

# A sanitizer that passes, that finds something, that refuses the device.
fake "$work/path/san" 'echo "$* apart=$KVCACHE_GPU_APART"'
options=(--only memcheck,racecheck --sanitizer "$work/path/san")
expect 0 '--tool memcheck --error-exitcode 9 .*/gpu_check .* apart=1$' '^  racecheck +ok'
fake "$work/path/san" 'echo "ERROR SUMMARY: 2 errors"; exit 9'
expect 1 '^  memcheck +FAILED: exit status 9' '^2 of 2 steps failed'
fake "$work/path/san" 'echo "Error: Device not supported"; exit 1'
expect 0 '^  memcheck +NOT RUN: compute-sanitizer does not support this device'

# One fails: the others are run all the same.
reset
fake "$bin/gpu_twins" 'echo "mma DIFFER"; exit 1'
options=(--only twins,replay)
expect 1 '^  twins +FAILED: exit status 1' '^  replay +ok in' 'mma DIFFER' '^1 of 2 steps failed'
fake "$bin/gpu_twins" 'kill -SEGV $$'
expect 1 '^  twins +FAILED: exit status 139' '^  replay +ok in'

# One hangs.
reset
fake "$bin/gpu_replay" 'sleep 60'
options=(--only twins,replay,loop --limit 3)
expect 1 '^  replay +FAILED: stopped after [1-9] s' '^  twins +ok' '^  loop +ok'

# All time is gone before the last step.
fake "$bin/gpu_twins" 'sleep 20'
options=(--only twins,replay --seconds 4)
expect 1 '^  twins +FAILED: stopped after' '^  replay +FAILED: not reached, the 4 s were over'

# One is missing.
reset
rm "$bin/gpu_check"
options=(--only twins,correctness)
expect 1 "^  correctness +FAILED: there is no .*/gpu_check" '^  twins +ok'

# The driver's version is taken from nvidia-smi, and handed on.
reset
fake "$work/path/nvidia-smi" 'case "$*" in *noheader*) echo 580.1.2 ;; *-l*) exec sleep 30 ;; *) echo "name, driver"; echo "H200, 580.1.2" ;; esac'
options=(--only bandwidth)
expect 0 '^driver 580.1.2$' '^summary: .*driver 580.1.2'
grep -q -- '--driver 580.1.2 .*--seconds 120$' "$work/out/gpu.json" || { cat "$work/out/gpu.json"; exit 1; }
[ -e "$work/out/clocks.csv" ] || { echo "the clocks were not sampled"; exit 1; }

options=(--only nothing)
expect 2 "there is no step 'nothing'"
options=(--bogus)
expect 2 "unknown option '--bogus'"
options=(--seconds x)
expect 2 "--seconds is 'x'"
echo "gpu_check.sh: as expected"
