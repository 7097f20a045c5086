#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures what every retention policy costs at 50, 25, 12.5 and 6.25 % of the bytes, in four tasks at four lengths, and
# compares with an independent implementation. About half an hour on two cores. A run that was stopped goes on.
# With --formats: what every packed format costs, about a quarter of an hour.
#
#   scripts/fidelity.sh [--formats] [--quick] [--document] [--lengths N,...] [--out FOLDER] [--bin FOLDER] [--threads N]
#
#   --formats        packed formats instead of policies: the second part of the page
#   --quick          one trial of everything at one length: shows that all of it works
#   --document       also replaces the tables in docs/fidelity.md
#   --lengths N,...  default 512,1024,2048,4096
#   --out FOLDER     results; default build/fidelity, build/fidelity_formats
#   --bin FOLDER     where kvcache_lab is; nothing is built then
here=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

from_here() { case $1 in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; }
usage() { sed -n '7,14s/^# \{0,3\}//p' "${BASH_SOURCE[0]}"; }
wrong() { echo "error: $1" >&2; usage >&2; exit 2; }
bin='' out='' options=() what=fidelity quick=0 document=0 lengths=''
while [ $# -gt 0 ]; do
  case $1 in
    --formats) what=fidelity_formats ;;
    --quick) quick=1 options+=(--quick) ;;
    --document) document=1 options+=(--document docs/fidelity.md) ;;
    --lengths | --out | --bin | --threads)
      [ $# -ge 2 ] && [ -n "$2" ] || wrong "$1 needs a value"
      case $1 in
        --lengths) lengths=$2 options+=(--lengths "$2") ;;
        --out) out=$(from_here "$2") ;;
        --bin) bin=$(from_here "$2") ;;
        --threads) options+=(--threads "$2") ;;
      esac
      shift
      ;;
    -h | --help) usage; exit ;;
    *) wrong "unknown option '$1'" ;;
  esac
  shift
done
[[ $lengths =~ ^([1-9][0-9]*(,[1-9][0-9]*)*)?$ ]] || wrong "--lengths is '$lengths', not numbers separated by commas"
[ "$document$quick" != 11 ] || wrong "--document needs the whole run, without --quick"

if [ -z "$bin" ]; then
  need_packages "${run_packages[@]}"
  if [ ! -f build/release/CMakeCache.txt ]; then cmake --preset release -DKVCACHE_BUILD_TESTS=OFF >/dev/null; fi
  cmake --build build/release -j "$jobs" --target kvcache_lab
  bin=build/release/bin
fi
[ -x "$bin/kvcache_lab" ] || die "--bin: there is no $bin/kvcache_lab"
if [ -z "${KVCACHE_MODEL:-}" ]; then fetch_model; fi
exec python3 "scripts/$what.py" --lab "$bin/kvcache_lab" --model "${KVCACHE_MODEL:-$model}" --out "${out:-build/$what}" \
  "${options[@]}"
