#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fails if a file lacks its licence line (first line, or second after a shebang).   check_spdx.sh [ROOT]
set -euo pipefail
root=$(cd "${1:-$(dirname "$0")/..}" && pwd)
cd "$root"

# No room for a comment: JSON, the licence itself, and data (covered by NOTICE).
list() {
  find . \( -name .git -o -path ./build -o -path ./.cache -o -name __pycache__ -o -path ./tests/data -o -path ./tests/fuzz/corpus \) -prune -o -type f \
    ! -name '*.json' ! -name '*.jsonl' ! -name '*.pyc' ! -path ./LICENSE ! -path './examples/*/workloads/*.txt' -print0 | sort -z
}
mapfile -d '' files < <(list)
[ ${#files[@]} -gt 0 ] || { echo "no files under $root" >&2; exit 1; }
bad=0
for f in "${files[@]}"; do
  if ! head -n 2 "$f" | grep -q 'SPDX-License-Identifier: Apache-2.0'; then
    echo "$f: no 'SPDX-License-Identifier: Apache-2.0' in its first two lines" >&2
    bad=1
  fi
done
[ $bad = 0 ] || exit 1
echo "spdx: ${#files[@]} files"
