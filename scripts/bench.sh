#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the machine's limits, then every benchmark, seven times over and interleaved, and prints one table of
# medians. Builds build/release if it is not there.
#
#   scripts/bench.sh [--quick] [--json FILE] [--document] [--only NAME,...] [--passes N] [--bin FOLDER]
#
#   --quick       one pass on small working sets: shows that all rows work, not how fast they are
#   --json FILE   array of {suite,row,value,unit,limit_value,ratio,target,target_on,low,high,ok}
#   --document    also replaces the table in docs/performance.md
#   --only        some of the programs, without "_bench": limits,cache,evict,prefix,attend,engine,compile
#   --bin FOLDER  where the programs are; nothing is built then
here=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# from_here PATH: what the caller meant, before this script changed into its root.
from_here() { case $1 in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; }
usage() { sed -n '6,13s/^# \{0,3\}//p' "${BASH_SOURCE[0]}"; }
wrong() { echo "error: $1" >&2; usage >&2; exit 2; }
quick=0 json='' document=0 only='' passes=7 bin=''
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=1 passes=1 ;;
    --document) document=1 ;;
    --json | --only | --passes | --bin)
      [ $# -ge 2 ] && [ -n "$2" ] || wrong "$1 needs a value"
      case $1 in
        --json) json=$(from_here "$2") ;;
        --only) only=$2 ;;
        --passes) passes=$2 ;;
        --bin) bin=$(from_here "$2") ;;
      esac
      shift
      ;;
    -h | --help) usage; exit ;;
    *) wrong "unknown option '$1'" ;;
  esac
  shift
done
[[ $passes =~ ^[1-9][0-9]?$ ]] || wrong "--passes is '$passes', not 1 to 99"
[ -z "$json" ] || { [ -d "$(dirname "$json")" ] && [ ! -d "$json" ]; } || die "--json: '$json' cannot be written"
if [ "$document" = 1 ] && [ "$quick$only" != 0 ]; then die "--document needs the whole run, without --quick or --only"; fi

if [ -z "$bin" ]; then
  need_packages "${run_packages[@]}" libbenchmark-dev
  fetch_model
  if [ -f build/release/CMakeCache.txt ]; then
    cmake --preset release -DKVCACHE_BUILD_BENCH=ON >/dev/null
  else
    cmake --preset release -DKVCACHE_BUILD_TESTS=OFF -DKVCACHE_BUILD_BENCH=ON >/dev/null
  fi
  cmake --build build/release -j "$jobs" --target benchmarks
  bin=build/release/bin
fi
export KVCACHE_MODEL=${KVCACHE_MODEL:-$model}

programs=()
if [ -n "$only" ]; then
  for name in ${only//,/ }; do
    [ "$name" = compile ] || [ -x "$bin/${name}_bench" ] || die "--only: there is no $bin/${name}_bench"
    programs+=("$name")
  done
  [ ${#programs[@]} -gt 0 ] || die "--only names no program"
else
  [ -x "$bin/limits_bench" ] || die "--bin: there is no $bin/limits_bench"
  programs=(limits)  # first: what kind of machine this is
  for file in "$bin"/*_bench; do
    name=$(basename "$file" _bench)
    [ "$name" = limits ] || programs+=("$name")
  done
  programs+=(compile)
fi

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
min_time=0.05
if [ "$quick" = 1 ]; then
  export KVCACHE_BENCH_QUICK=1
  min_time=0.01
fi
steps_total=$((passes * ${#programs[@]}))
for ((pass = 1; pass <= passes; ++pass)); do
  for name in "${programs[@]}"; do
    step "pass $pass of $passes: $name" >&2
    if [ "$name" = compile ]; then
      command=(python3 scripts/bench_compile.py)
    else
      command=("$bin/${name}_bench" "--benchmark_min_time=$min_time" --benchmark_format=json)
    fi
    "${command[@]}" >"$results/$name.$pass.json" 2>"$results/log" ||
      { cat "$results/log" >&2; die "$name failed"; }
  done
done

options=()
[ -z "$json" ] || options+=(--json "$json")
[ "$document" = 0 ] || options+=(--document docs/performance.md)
[ "$quick" = 0 ] || options+=(--quick)
python3 scripts/bench_report.py "${options[@]}" "$results" "${programs[@]}"
