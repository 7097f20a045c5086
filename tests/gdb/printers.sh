#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles program.cpp, prints its state with share/gdb/kvcache.py in a stopped process and from a core file, and
# compares both with expected.txt.   printers.sh SOURCE-DIR WORK-DIR COMPILER     (KVCACHE_GDB: another gdb)
set -euo pipefail
[ $# = 3 ] || { echo "usage: printers.sh SOURCE-DIR WORK-DIR COMPILER" >&2; exit 2; }
source=$1 work=$2 compiler=$3
gdb=${KVCACHE_GDB:-gdb}
command -v "$gdb" >/dev/null || { echo "$gdb is not installed" >&2; exit 1; }
command -v "$compiler" >/dev/null || { echo "$compiler is not installed" >&2; exit 1; }
rm -rf "$work"; mkdir -p "$work"
"$compiler" -std=c++20 -g -O0 -Wall -Wextra -Werror -I"$source/include" "$source/tests/gdb/program.cpp" -o "$work/program"
"$work/program" || { echo "the program itself fails" >&2; exit 1; }

debug() {  # debug OUTPUT ARGUMENT...: from the first `==` line on; hashes and the path of the session are left out
  local output=$1; shift
  timeout 120 "$gdb" -q -nx -batch -iex 'set auto-load off' -ex 'set width 0' -ex 'set style enabled off' \
    -ex 'set disable-randomization off' -ex "source $source/share/gdb/kvcache.py" "$@" >"$work/log" 2>&1 || true
  sed -n '/^==/,$p' "$work/log" | sed -E '/Error in sourced command file/d; s/0x[0-9a-f]{10,}/0x.../' >"$output"
  [ -s "$output" ] || { cat "$work/log" >&2; echo "gdb did not come to the end" >&2; exit 1; }
}
debug "$work/live.txt" -ex 'break here' -ex run -x "$source/tests/gdb/session.gdb" -ex "generate-core-file $work/core" \
  "$work/program"
sed -i '/^warning: /d; /^Saved corefile/d' "$work/live.txt"
debug "$work/core.txt" -x "$source/tests/gdb/session.gdb" "$work/program" "$work/core"
rm -f "$work/core"
tail -n +2 "$source/tests/gdb/expected.txt" >"$work/expected.txt"
for how in live core; do
  diff -u "$work/expected.txt" "$work/$how.txt" || { echo "the output ($how) differs from expected.txt" >&2; exit 1; }
done
echo "gdb: $(grep -c '' "$work/live.txt") lines as expected, from a process and from a core file"
