#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fails if a shared library exports anything but kvc_* and names inside kvcache::.   check_symbols.sh LIBRARY
set -euo pipefail
[ $# = 1 ] && [ -f "$1" ] || { echo "usage: check_symbols.sh LIBRARY" >&2; exit 2; }
# The version node and weak symbols of inlined standard templates are judged too: whoever exports them can be
# interposed by, or interpose on, the program's own.
all=$(nm -D --defined-only --demangle "$1" | sed -E 's/^[0-9a-f]* +[A-Za-z] //')
[ -n "$all" ] || { echo "$1 exports nothing at all" >&2; exit 1; }
foreign=$(grep -vE '^(kvc_[a-z0-9_]+|(vtable for |typeinfo for |typeinfo name for |guard variable for )?kvcache::.*)$' <<<"$all" || true)
if [ -n "$foreign" ]; then
  echo "$1 exports names that are not kvcache's:" >&2
  head -n 20 <<<"$foreign" >&2
  exit 1
fi
echo "symbols: $(wc -l <<<"$all") exported, all kvc_* or kvcache::"
