#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What scripts/fidelity.sh makes of the lab's reports, with a lab that reports made-up figures at once: the page has every
# table, a figure that is off ends with 1, a lab that fails is quoted.
#   fidelity_page.sh SOURCE-DIR WORK-DIR
set -euo pipefail
[ $# = 2 ] || { echo "usage: fidelity_page.sh SOURCE-DIR WORK-DIR" >&2; exit 2; }
source=$1 work=$2
rm -rf "$work"
mkdir -p "$work"
fail() { echo "$*" >&2; exit 1; }
cat >"$work/kvcache_lab" <<'PYTHON'
#!/usr/bin/env python3
import json, os, sys
a = sys.argv[2:]
option = lambda name, default=None: a[a.index(name) + 1] if name in a else default
policies = [a[i + 1] for i, word in enumerate(a) if word == "--policy"]
task, length, start = option("--task"), int(option("--length")), option("--start")
fault = os.environ.get("FAULT", "")
if fault == "lab":
    print("error: the lab's own words", file=sys.stderr)
    sys.exit(3)
KNOWN = {"window:154": 0.59, "streaming_llm:sinks=4,window=150,positions=text": 0.0809, "h2o:heavy=77,recent=77": 0.0504,
         "streaming_llm:sinks=4,window=256,positions=text": 0.09, "window:260": 0.505, "tova:capacity=154": 0.066,
         "snapkv:capacity=154,window=32,kernel=1": 0.0516, "snapkv:capacity=154,window=32,kernel=7": 0.0768,
         "far_rms:capacity=154": 0.0334, "moved_queries:capacity=154": 0.028,
         "moved_queries:capacity=154,budget=global": 0.0156}
def row(policy, control, value, draws=1):
    interval = {"value": value, "low": value / 2, "high": min(1, value * 2)}
    beside = {"difference": interval, "verdict": "better" if "h2o" in policy else "no difference shown"}
    return {"policy": policy, "control": control, "draws": draws, "trials": 10 * draws, "correct": 3 * draws,
            "figure": interval, "share_of_bytes": 0.25, "against_window": beside, "against_random": beside}
rows = [row("", "full", 0.0 if task == "kl" else 1.0), row("", "none", 0.9 if task == "kl" else 0.1)]
for p in policies:
    value = KNOWN.get(p, 0.04 if task == "kl" else 0.9 if "capacity" in p else 0.7)
    value *= 1.4 if fault and p.startswith(fault) and start else 1
    rows.append(row(p, "", value))
    if "--no-controls" not in a:
        rows += [row(p, "window", 0.5), row(p, "random", 0.6, 3)]
out = option("--out")
os.makedirs(out, exist_ok=True)
json.dump({"groups": [{"task": task, "length": length, "measurable": length != 2048 or task != "repeat",
                       "gate": "made up", "rows": rows,
                       "settings": {"trials": 10, "simd": "none", "model": "m", "kv": "f32", "block": 16}}]},
          open(out + "/report.json", "w"))
with open(out + "/results.jsonl", "w") as f:
    for r in rows:
        for at in (start or "0").split(","):
            print(json.dumps({"about": {"policy": r["policy"]},
                              "score": {"trial": "start " + at, "kl": [r["figure"]["value"]] * 2}}), file=f)
PYTHON
chmod +x "$work/kvcache_lab"
export KVCACHE_MODEL=none
run() { "$source/scripts/fidelity.sh" --bin "$work" --out "$work/out" "$@" >"$work/log" 2>&1; }
stops() { local code=0; run "${@:3}" || code=$?; [ $code = "$1" ] && grep -qE -- "$2" "$work/log" || { cat "$work/log"; fail "code $code, '$2' wanted: ${*:3}"; }; }

run || { cat "$work/log"; fail "made-up figures that are as asked for are refused"; }
tables=$work/out/tables.md
grep -q '\[18/18\]' "$work/log" || fail "no progress is shown"
for heading in 'Against an independent' 'The smallest share' 'Running text' 'comes after' 'compressed with the text' 'A passage again'; do
  grep -q "^##.*$heading" "$tables" || fail "no part '$heading'"
done
[ "$(grep -c '^| moved_queries, global |' "$tables")" = $((1 + 4 * 4)) ] || fail "a table lacks a policy"
[ "$(grep -c '| 512 tokens | 1024 tokens | 2048 tokens | 4096 tokens |' "$tables")" = 16 ] || fail "not 16 tables of four lengths"
grep -q 'Not measurable with this model at 2048 tokens' "$tables" || fail "a closed gate is not told"
grep -q '^| h2o | 25.0 | 0.0400 (0.0200 to 0.0800) |' "$tables" || fail "no interval, or a mark too many"
grep -q '^| tova | 25.0 | 0.0400 (0.0200 to 0.0800)ʳʷ |' "$tables" || fail "no mark where a control is as good"
grep -q '| h2o | 6.25 % · 6.25 % · 6.25 % · 6.25 % | – · – · – · – |' "$tables" || fail "the smallest share is wrong"
grep -q 'without sinks 7.3 times worse' "$tables" || fail "no factor of the sinks"

for policy in h2o snapkv streaming_llm moved_queries; do FAULT=$policy stops 1 "not reached: $policy"; done
FAULT=streaming_llm stops 1 'without sinks .* at least 5'
FAULT=lab stops 1 "the lab's own words"
stops 2 "unknown option '--fast'" --fast
stops 2 "lengths is 'many'" --lengths many
stops 2 'needs the whole run' --quick --document
stops 1 'there is no .*/nowhere/kvcache_lab' --bin "$work/nowhere"

# The page: the tables are replaced, the rest stays.
page=$work/page.md
printf 'before\n<!-- tables: scripts/fidelity.sh --document -->\nold\n<!-- end of tables -->\nafter\n' >"$page"
document() { (cd "$source" && python3 scripts/fidelity.py --lab "$work/kvcache_lab" --model none --out "$work/out" --document "$page" >"$work/log" 2>&1); }
document || fail "the page is not written"
grep -q before "$page" && grep -q after "$page" && grep -q '### Running text' "$page" && ! grep -q '^old' "$page" || fail "the page lost or kept something"
echo nothing >"$page"
! document || fail "a page without a place for the tables is accepted"
grep -q 'no place for the tables' "$work/log" || fail "a page without a place is not named"
