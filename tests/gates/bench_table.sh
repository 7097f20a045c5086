#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The table that scripts/bench.sh prints says what the programs reported: on made-up results, and on one real program.
#   bench_table.sh SOURCE-DIR BIN-DIR WORK-DIR
set -euo pipefail
[ $# = 3 ] || { echo "usage: bench_table.sh SOURCE-DIR BIN-DIR WORK-DIR" >&2; exit 2; }
source=$1 bin=$2 work=$3
rm -rf "$work"
mkdir -p "$work/results"
fail() { echo "$*" >&2; exit 1; }
report=("$source/scripts/bench_report.py")

pass() {  # pass NUMBER NS: row a has a bound on its time, row b on its ratio, row c none
  cat >"$work/results/x.$1.json" <<JSON
{"benchmarks": [
 {"name": "a/one/manual_time", "label": "ns/block", "ns_per_item": $2, "target_ns": 20},
 {"name": "b/manual_time", "label": "ns/call", "ns_per_item": 30, "limit_ns": 10, "ratio": 3.0, "target_ratio": 2.5},
 {"name": "c/manual_time", "label": "ns/call", "ns_per_item": 5}]}
JSON
}
pass 1 10; pass 2 90; pass 10 12
printf 'before\n<!-- table: scripts/bench.sh --document -->\nold\n<!-- end of table -->\nafter\n' >"$work/page.md"
cp "$work/page.md" "$work/short.md"
printf '<!-- bounds: scripts/bench.sh --document -->\nold\n<!-- end of bounds -->\nlast\n' >>"$work/page.md"
"${report[@]}" --json "$work/rows.json" --document "$work/page.md" "$work/results" x >"$work/out"
python3 - "$work/rows.json" <<'PYTHON'
import json, sys
rows = {r["row"]: r for r in json.load(open(sys.argv[1]))}
fields = {"suite", "row", "value", "unit", "limit_value", "ratio", "target", "target_on", "low", "high", "ok"}
assert all(set(r) == fields for r in rows.values()), rows
a, b, c = rows["a/one"], rows["b"], rows["c"]
assert (a["value"], a["low"], a["high"], a["target"], a["ok"]) == (12, 10, 90, 20, True), a
assert (b["limit_value"], b["ratio"], b["target"], b["target_on"], b["ok"]) == (10, 3.0, 2.5, "ratio", False), b
assert (c["target"], c["ok"], c["suite"], c["unit"]) == (None, None, "x", "ns/call"), c
PYTHON
grep -q 'not reached: b' "$work/out" || fail "the missed target is not named"
grep -q 'before' "$work/page.md" && grep -q 'after' "$work/page.md" && grep -q '| a/one ' "$work/page.md" ||
  fail "the document lost something"
! grep -q old "$work/page.md" || fail "an old table is still there"
grep -q last "$work/page.md" || fail "the document lost its end"
[ "$(grep -c '^| [abc]' "$work/page.md")" = 3 ] || fail "a row without the figures for it is among the bounds"

stops() { local regex=$1; shift; ! "$@" >"$work/log" 2>&1 || fail "passed: $*"; grep -qE "$regex" "$work/log" || { cat "$work/log"; fail "no '$regex'"; }; }
echo '{"benchmarks": [{"name": "d/manual_time", "error_occurred": true, "error_message": "blocks lost"}]}' >"$work/results/y.1.json"
stops 'y: d: blocks lost' "${report[@]}" "$work/results" y
stops 'has no place for the table between <!-- bounds' "${report[@]}" --document "$work/short.md" "$work/results" x
grep -q old "$work/short.md" || fail "half of a document was written"
cat >"$work/results/w.1.json" <<JSON
{"benchmarks": [{"name": "d/manual_time", "ns_per_item": 15, "limit_ns": 10, "ratio": 1.5, "target_ratio": 1.25,
 "cached_ns": 4, "shuffled_ns": 13, "ahead_ns": 12, "mixed_ns": 14}]}
JSON
"${report[@]}" --document "$work/page.md" "$work/results" w >/dev/null
grep -qE '^\| d +\| 0.40 +\| 1.20 +\| 1.40 +\| 1.50 +\| ≤ 1.25 +\|$' "$work/page.md" || fail "the bounds are not those of the row"
echo '{"benchmarks": []}' >"$work/results/z.1.json"
stops 'z_bench has no rows' "${report[@]}" "$work/results" z
printf 'junk' >"$work/results/j.1.json"
stops "j_bench did not print results but 'junk'" "${report[@]}" "$work/results" j
stops "unknown option '--fast'" "$source/scripts/bench.sh" --fast
stops "passes is '0'" "$source/scripts/bench.sh" --passes 0
stops 'there is no .*/nothing_bench' "$source/scripts/bench.sh" --bin "$bin" --only nothing
stops 'only names no program' "$source/scripts/bench.sh" --bin "$bin" --only ,
stops 'nowhere/x.json. cannot be written' "$source/scripts/bench.sh" --bin "$bin" --only cache --json "$work/nowhere/x.json"
stops 'needs the whole run' "$source/scripts/bench.sh" --document --quick

"$source/scripts/bench.sh" --quick --bin "$bin" --only cache --json "$work/cache.json" >"$work/out" 2>"$work/progress"
grep -q 'pass 1 of 1: cache' "$work/progress" || fail "no progress is shown"
grep -q '"row": "W10/decode_step_256"' "$work/cache.json" || fail "a row is missing"
