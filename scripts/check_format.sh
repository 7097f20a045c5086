#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fails if a C or C++ file is not laid out as .clang-format says.   check_format.sh [ROOT]   (--fix rewrites)
set -euo pipefail
fix=no
if [ "${1:-}" = --fix ]; then fix=yes; shift; fi
root=$(cd "${1:-$(dirname "$0")/..}" && pwd)
cd "$root"

# Version 14 is the floor compiler's own; other versions break lines elsewhere.
tool=$(command -v clang-format-14 || command -v clang-format) || { echo "clang-format 14 is not installed" >&2; exit 1; }
"$tool" --version | grep -q 'version 14\.' || { echo "clang-format 14 is needed, found: $("$tool" --version)" >&2; exit 1; }

mapfile -d '' files < <(find . \( -name .git -o -path ./build \) -prune -o -type f \
  \( -name '*.hpp' -o -name '*.cpp' -o -name '*.h' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' \) -print0 | sort -z)
[ ${#files[@]} -gt 0 ] || { echo "no source files under $root" >&2; exit 1; }
if [ $fix = yes ]; then
  "$tool" --style=file -i "${files[@]}"
else
  if ! found=$("$tool" --style=file --dry-run --Werror "${files[@]}" 2>&1); then
    grep -F 'error:' <<<"$found" | head -n 20 >&2
    echo "format: $(grep -oE '^[^:]+' <<<"$(grep -F 'error:' <<<"$found")" | sort -u | wc -l) files differ (check_format.sh --fix)" >&2
    exit 1
  fi
  echo "format: ${#files[@]} files"
fi
