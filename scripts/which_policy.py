#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures every eviction policy, ttl and route on the published traces with `kvcache replay` and prints the tables of
docs/which_policy.md.

which_policy.py COMMAND [--traces DIR] [--only TRACE] [--write PAGE | --check PAGE]

--write puts the tables between the page's marks; --check fails if a table differs from the page. Each call of the command
that is made is printed on stderr.
"""
import argparse
import json
import pathlib
import shlex
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent.parent

# File, and options of reading it.
TRACES = {
    "mooncake_conversation": ("mooncake_conversation.jsonl.zst", []),
    "mooncake_synthetic": ("mooncake_synthetic.jsonl.zst", []),
    "weka_cc_512": ("weka_cc_512.jsonl.zst", []),
    "weka_cc_64_small": ("weka_cc_64_small.jsonl.zst", []),
    "weka_raw": ("weka_raw/*.json.zst", ["--session-gap", "60"]),
    "lmcache_agent_miniswe_64": ("lmcache_agent_miniswe_64.jsonl.zst", []),
    "lmcache_agent_magagent_64": ("lmcache_agent_magagent_64.jsonl.zst", []),
    "lmcache_agent_taubench_64": ("lmcache_agent_taubench_64.jsonl.zst", []),
    "tair_kvcm_event_publisher": ("tair_kvcm_event_publisher.log.zst", []),
}
ONLINE = ["lru", "fifo", "lfu", "slru", "gdsf", "s3_fifo", "two_q"]
OPTIMA = ["belady", "belady_bypass"]
TTLS = [60, 600, 3600]
ROUTES = ["random", "round_robin", "prefix_affinity", "affinity_load"]
WORKERS = 4
CAPACITIES = 4  # of those that the command chooses


class Trace:
    def __init__(self, command, folder, name):
        pattern, self.options = TRACES[name]
        self.command, self.name = command, name
        self.files = sorted(str(p) for p in folder.glob(pattern))
        if not self.files:
            sys.exit(f"no {pattern} in {folder}")

    def replay(self, *options):
        call = [self.command, "replay", *self.files, *self.options, *options, "--json"]
        print(shlex.join(call), file=sys.stderr, flush=True)
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        return json.loads(done.stdout)


def percent(part, whole):
    return f"{100 * part / whole:.2f}" if whole else "0.00"


def policy_rows(trace):
    """Rows of the policies at the largest capacities that the command chooses, and the facts of the trace."""
    d = trace.replay("--policy", ",".join(ONLINE + OPTIMA))
    total = d["trace"]["tokens"]
    found = {(r["policy"], r["capacity_blocks"]): r["hit_tokens"] for r in d["results"]}
    capacities = sorted({c for _, c in found if c is not None})[-CAPACITIES:]
    ceiling = percent(d["summary"]["ceiling"]["hit_tokens"], total)
    rows, first = [], f"{trace.name} ({ceiling})"
    for c in capacities:
        online = [found[p, c] for p in ONLINE]
        cells = [f"**{percent(x, total)}**" if x == max(online) else percent(x, total) for x in online]
        rows.append([first, f"{c:,}", *cells, *(percent(found[p, c], total) for p in OPTIMA)])
        first = ""
    return rows, d, {c: {p: 100 * found[p, c] / max(total, 1) for p in ONLINE + OPTIMA} for c in capacities}


def fact_row(trace, d):
    t, s, knee = d["trace"], d["summary"], d["knee"]
    ceiling = s["ceiling"]
    return [trace.name, f"{t['requests']:,}", f"{t['tokens']:,}", f"{t['unique_blocks']:,}", str(t["block_tokens"]),
            percent(ceiling["hit_tokens"], t["tokens"]), percent(s["share_less_than_block"], s["requests"]),
            f"{knee['capacity_blocks']:,}", percent(knee["hit_blocks"], ceiling["hit_blocks"])]


def gain_row(trace, shares):
    """The best gain over lru, the worst loss against it, and the largest distance of the best from the optimum."""
    gains = [(s[p] - s["lru"], p, c) for c, s in shares.items() for p in ONLINE if p != "lru"]
    gaps = [(s["belady"] - max(s[p] for p in ONLINE), c) for c, s in shares.items()]
    if not gains:
        return None
    best, worst, gap = max(gains, key=lambda g: g[0]), min(gains, key=lambda g: g[0]), max(gaps, key=lambda g: g[0])
    return [trace.name, f"{best[0]:+.2f}", f"{best[1]} at {best[2]:,}", f"{worst[0]:+.2f}", f"{worst[1]} at {worst[2]:,}",
            f"{gap[0]:.2f}", f"{gap[1]:,}"]


def ttl_row(trace):
    d = trace.replay("--policy", "ttl", "--ttl", ",".join(map(str, TTLS)), "--capacity", "inf", "--no-optimum", "--curve")
    total = d["trace"]["tokens"]
    cells = [trace.name, percent(d["summary"]["ceiling"]["hit_tokens"], total)]
    for r in d["results"]:
        room = round(r["mean_resident_blocks"])
        lru = max((p["hit_tokens"] for p in d["curve"] if p["capacity_blocks"] <= room), default=0)
        cells += [percent(r["hit_tokens"], total), f"{room:,}", percent(lru, total)]
    return cells


def route_rows(trace, capacities):
    if not capacities:
        return []
    d = trace.replay("--capacity", ",".join(f"{c}b" for c in capacities), "--workers", str(WORKERS), "--route",
                     ",".join(ROUTES), "--seed", "1", "--no-optimum")
    total, rows, first = d["trace"]["tokens"], [], trace.name
    for c in capacities:
        here = {r["route"]: r for r in d["results"] if r["capacity_blocks"] == c}
        alone = here["random"]["hit_tokens"] + here["random"]["lost_to_routing"]["tokens"]
        best = max(r["hit_tokens"] for r in here.values())
        cells = [f"**{percent(here[r]['hit_tokens'], total)}**" if here[r]["hit_tokens"] == best else
                 percent(here[r]["hit_tokens"], total) for r in ROUTES]
        rows.append([first, f"{c:,}", percent(alone, total), *cells])
        first = ""
    return rows


def table(head, rows):
    line = "| " + " | ".join(head) + " |\n|---|" + "---:|" * (len(head) - 1) + "\n"
    return line + "".join("| " + " | ".join(row) + " |\n" for row in rows)


def measure(command, folder, only):
    facts, policies, gains, ttls, routes = [], [], [], [], []
    for name in [only] if only else TRACES:
        trace = Trace(command, folder, name)
        rows, d, shares = policy_rows(trace)
        facts.append(fact_row(trace, d))
        policies += rows
        gains += [row for row in [gain_row(trace, shares)] if row]
        ttls.append(ttl_row(trace))
        routes += route_rows(trace, [c for c in shares if c >= 64][-2:])
    ttl_head = [x for t in TTLS for x in (f"{t} s", "mean blocks", "lru there")]
    return {
        "facts": table(["trace", "requests", "tokens", "different blocks", "tokens a block", "ceiling %",
                        "share no block %", "bends at, blocks", "% of the ceiling there"], facts),
        "policies": table(["trace (ceiling)", "blocks", *ONLINE, "belady", "bypass"], policies),
        "gains": table(["trace", "most over lru", "by", "most below lru", "by", "optimum over the best", "at"], gains),
        "ttl": table(["trace", "ceiling", *ttl_head], ttls),
        "routes": table(["trace", "blocks", "one worker", *ROUTES], routes),
    }


def bounds(text, name):
    begin, end = f"<!-- measured: {name} -->\n", "<!-- end -->\n"
    first = text.index(begin) + len(begin)
    return first, text.index(end, first)


def check(page, tables):
    """Every row that was measured must stand in the page's table. A row that continues a trace has no name: it must follow."""
    text, wrong = page.read_text(encoding="utf-8"), []
    for name, measured in tables.items():
        first, last = bounds(text, name)
        body = "".join(measured.splitlines(keepends=True)[2:])
        if body not in text[first:last]:
            wrong.append(f"{page}: table '{name}' does not have\n{body}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command")
    parser.add_argument("--traces", type=pathlib.Path, default=HERE / "tests" / "data" / "traces")
    parser.add_argument("--only", choices=list(TRACES))
    parser.add_argument("--write", type=pathlib.Path)
    parser.add_argument("--check", type=pathlib.Path)
    args = parser.parse_args()
    tables = measure(args.command, args.traces, args.only)
    if args.check:
        wrong = check(args.check, tables)
        print("\n".join(wrong) or f"{args.check}: as measured")
        return 1 if wrong else 0
    if args.write:
        text = args.write.read_text(encoding="utf-8")
        for name, measured in tables.items():
            first, last = bounds(text, name)
            text = text[:first] + measured + text[last:]
        args.write.write_text(text, encoding="utf-8")
    else:
        print("\n".join(tables.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
