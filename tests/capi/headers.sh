#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# kvcache.h and each of its parts compile alone in every language that they promise, and so does a call from C.
#   headers.sh SOURCE-DIR
set -euo pipefail
[ $# = 1 ] || { echo "usage: headers.sh SOURCE-DIR" >&2; exit 2; }
cd "$1/include"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
checked=0
one() {  # one LANGUAGE COMMAND...: the headers, alone and together
  local language=$1; shift
  for header in kvcache/kvcache.h kvcache/c/*.h; do
    printf '#include "%s"\n#include "%s"\n' "$header" "$header" >"$work/unit.$language"
    printf 'int main(void) { kvc_status s = 0; return (int)s; }\n' >>"$work/unit.$language"
    grep -q 'typedef int32_t kvc_status' "$header" || sed -i 's/kvc_status s/int s/' "$work/unit.$language"
    "$@" -I. -c "$work/unit.$language" -o "$work/unit.o" || { echo "$header: refused by $*" >&2; exit 1; }
  done
  checked=$((checked + 1))
}
warn=(-Wall -Wextra -Werror -pedantic)
for cc in gcc clang; do
  command -v $cc >/dev/null || { echo "$cc is not installed" >&2; exit 1; }
  one c $cc -std=c99 "${warn[@]}"
  one c $cc -std=c11 "${warn[@]}" -Wstrict-prototypes
done
for cxx in g++ clang++; do
  one cpp $cxx -std=c++20 "${warn[@]}"
  one cpp $cxx -std=c++20 "${warn[@]}" -fno-exceptions -fno-rtti
done
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [ -n "$nvcc" ]; then
  one cu "$nvcc" -std=c++20 -Werror all-warnings
else
  echo "nvcc is not installed: the headers were not compiled as CUDA"
fi
echo "C API headers: $checked compilations of each"
