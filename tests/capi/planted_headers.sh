#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# headers.sh stops a header that one of its languages refuses.   planted_headers.sh SOURCE-DIR
set -euo pipefail
[ $# = 1 ] || { echo "usage: planted_headers.sh SOURCE-DIR" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stops() {  # stops HEADER LINE COMPILER: the line, added to the header, is refused first by that compiler
  rm -rf "$work/include"
  cp -a "$1/include" "$work/"
  printf '%s\n' "$3" >>"$work/include/kvcache/c/$2"
  if bash "$1/tests/capi/headers.sh" "$work" >"$work/log" 2>&1; then cat "$work/log"; echo "passed: $3"; exit 1; fi
  grep -qE "refused by $4 " "$work/log" || { cat "$work/log"; echo "stopped, but not by $4: $3"; exit 1; }
}
stops "$1" status.h 'bool planted;' gcc
stops "$1" wire.h 'inline int planted(void) { int class = 1; return class; }' 'g\+\+'
echo "planted capi_headers: stopped"
