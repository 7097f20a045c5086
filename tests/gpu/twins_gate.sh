#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every function of cuda/ptx.cuh is compared with its twin; and a new one that is not, or a case that is left out of the
# list, is noticed.   twins_gate.sh SOURCE-DIR
set -euo pipefail
source=$1
check=$source/tests/gpu/check_twins.py
"$check"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$source/cuda/ptx.cuh" "$source/tests/gpu/twin_cases.cuh" "$work"

# fails WHAT: the check of the copies fails and names it.
fails() {
  if text=$("$check" "$work/ptx.cuh" "$work/twin_cases.cuh" 2>&1); then echo "not noticed: $1" >&2; exit 1; fi
  grep -q "$1" <<<"$text" || { echo "$text" >&2; exit 1; }
}
sed -i 's|^#else  // the twins|KVCACHE_DEVICE float planted_one(float a) {\n  return a;\n}\n&|' "$work/ptx.cuh"
fails planted_one
cp "$source/cuda/ptx.cuh" "$work"
sed -i 's|^struct movmatrix_case|struct planted_case {};\n&|; s|^struct planted_case {};|struct planted_case {\n};|' "$work/twin_cases.cuh"
fails planted_case
echo "a function and a case without a place are noticed"
