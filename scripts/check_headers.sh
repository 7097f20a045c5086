#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles every public header alone, warnings as errors: C++20 as it is and without exceptions and RTTI; a .h also
# as C99.   check_headers.sh C++-COMPILER C-COMPILER [ROOT]
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: check_headers.sh C++-COMPILER C-COMPILER [ROOT]" >&2; exit 2; }
cxx=$1 cc=$2
root=$(cd "${3:-$(dirname "$0")/..}" && pwd)
cd "$root/include"

# cuda/ headers are for the CUDA toolkit's include path; what is host-callable there is compiled like the rest.
mapfile -t headers < <(find kvcache -type f \( -name '*.hpp' -o -name '*.h' \) | sort)
[ ${#headers[@]} -gt 0 ] || { echo "no headers under $root/include" >&2; exit 1; }

# A whole compilation: g++ gives some warnings only then. Eigen is what interop/ names; its own warnings are not ours.
eigen=$(pkg-config --cflags-only-I eigen3 2>/dev/null | tr -d " " || true)
warn=(-Wall -Wextra -Werror -pedantic -I. ${eigen:+-isystem "${eigen#-I}"} -c -o /dev/null)
one() {  # one HEADER: the header first in an otherwise empty file, included twice
  local text="#include \"$1\""
  printf '%s\n%s\n' "$text" "$text" | "$cxx" -std=c++20 "${warn[@]}" -x c++ - || { echo "$1: $cxx c++20" >&2; return 1; }
  printf '%s\n' "$text" | "$cxx" -std=c++20 -fno-exceptions -fno-rtti "${warn[@]}" -x c++ - \
    || { echo "$1: $cxx c++20 -fno-exceptions -fno-rtti" >&2; return 1; }
  case $1 in *.h)
    printf '%s\nint main(void) { return 0; }\n' "$text" | "$cc" -std=c99 "${warn[@]}" -x c - \
      || { echo "$1: $cc c99" >&2; return 1; } ;;
  esac
}
bad=0
pids=()
for h in "${headers[@]}"; do
  one "$h" & pids+=($!)
  if [ ${#pids[@]} -ge 2 ]; then wait "${pids[0]}" || bad=1; pids=("${pids[@]:1}"); fi
done
for p in "${pids[@]}"; do wait "$p" || bad=1; done
[ $bad = 0 ] || exit 1
echo "headers alone: ${#headers[@]} with $cxx"
