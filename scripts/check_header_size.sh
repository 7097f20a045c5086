#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fails if a public header is longer than a person reads in one go (400 lines).   check_header_size.sh [ROOT]
set -euo pipefail
root=$(cd "${1:-$(dirname "$0")/..}" && pwd)
limit=400
bad=0 count=0 longest=0
while IFS= read -r -d '' f; do
  lines=$(wc -l <"$f")
  count=$((count + 1))
  if [ "$lines" -gt $longest ]; then longest=$lines; fi
  if [ "$lines" -gt $limit ]; then echo "${f#"$root"/}: $lines lines, at most $limit" >&2; bad=1; fi
done < <(find "$root/include" -type f \( -name '*.hpp' -o -name '*.h' -o -name '*.cuh' \) -print0)
[ $count -gt 0 ] || { echo "no headers under $root/include" >&2; exit 1; }
[ $bad = 0 ] || exit 1
echo "header size: $count headers, longest $longest lines"
