#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns the results of the benchmark programs into one table, one JSON file, and the tables in a document.

A row's value, limit and ratio are medians over the passes; low and high are the smallest and largest value.
`ok` compares the median with the target. A quick run judges nothing: its figures mean nothing.
"""
import argparse
import json
import os
import platform
import statistics
import sys
from datetime import date

BEGIN = "<!-- table: scripts/bench.sh --document -->"
END = "<!-- end of table -->"
BOUNDS_BEGIN = "<!-- bounds: scripts/bench.sh --document -->"
BOUNDS_END = "<!-- end of bounds -->"


def collect(folder, programs):
    """{(suite, row): [counters of each pass]} in the order of the first pass; exits when a row failed."""
    rows = {}
    for suite in programs:
        files = sorted((f for f in os.listdir(folder) if f.startswith(suite + ".") and f.endswith(".json")),
                       key=lambda f: int(f.split(".")[1]))
        for name in files:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as f:
                text = f.read()
            try:
                benchmarks = json.loads(text)["benchmarks"]
            except (ValueError, KeyError, TypeError):
                sys.exit(f"error: {suite}_bench did not print results but {text[:60]!r}")
            if not benchmarks:
                sys.exit(f"error: {suite}_bench has no rows")
            for b in benchmarks:
                row = b["name"].removesuffix("/manual_time").split("/iterations:")[0]
                if b.get("error_occurred"):
                    sys.exit(f"error: {suite}: {row}: {b.get('error_message', 'failed')}")
                if "ns_per_item" not in b:
                    sys.exit(f"error: {suite}: {row} reports no ns_per_item")
                rows.setdefault((suite, row), []).append(b)
    return rows


def summarise(rows, quick):
    out = []
    for (suite, row), passes in rows.items():
        def median(counter):
            values = [p[counter] for p in passes if counter in p]
            return statistics.median(values) if values else None

        target_on = "value" if "target_ns" in passes[0] else "ratio" if "target_ratio" in passes[0] else None
        value, ratio = median("ns_per_item"), median("ratio")
        target = median("target_ns") if target_on == "value" else median("target_ratio")
        measured = value if target_on == "value" else ratio
        ok = None if quick or target is None else measured is not None and measured <= target
        values = [p["ns_per_item"] for p in passes]
        out.append({"suite": suite, "row": row, "value": value, "unit": passes[0].get("label", "ns"),
                    "limit_value": median("limit_ns"), "ratio": ratio, "target": target, "target_on": target_on,
                    "low": min(values), "high": max(values), "ok": ok})
    return out


def number(x):
    if x is None:
        return ""
    if x >= 1e6:
        return f"{x / 1e6:.4g} M"
    if x >= 1e4:
        return f"{x / 1e3:.4g} k"
    return f"{x:.3g}" if x < 100 else f"{x:.0f}"


def aligned(head, lines):
    width = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]

    def text(cells):
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, width)) + " |"

    return "\n".join([text(head), "|" + "|".join("-" * (w + 2) for w in width) + "|", *map(text, lines)])


def table(rows):
    head = ["row", "measured", "low to high", "unit", "limit", "times the limit", "target", "reached"]
    lines = []
    for r in rows:
        target = ""
        if r["target"] is not None:
            target = f"≤ {number(r['target'])}" + ("" if r["target_on"] == "value" else " ×")
        lines.append([r["row"], number(r["value"]), f"{number(r['low'])} to {number(r['high'])}", r["unit"],
                      number(r["limit_value"]), "" if r["ratio"] is None else f"{r['ratio']:.2f}", target,
                      {None: "", True: "yes", False: "**no**"}[r["ok"]]])
    return aligned(head, lines)


def bounds(collected):
    """What bounds decode: times the limit, of loops that do less than attention. Rows with a target only."""
    head = ["row", "computing alone", "blocks read alone", "read and multiplied", "attention", "target"]
    lines = []
    for (_, row), passes in collected.items():
        if any(c not in p for p in passes for c in ("ahead_ns", "mixed_ns", "cached_ns", "target_ratio")):
            continue
        least = {"computing": ["cached_ns"], "read": ["shuffled_ns", "ahead_ns"], "mixed": ["mixed_ns"],
                 "measured": ["ns_per_item"]}
        ratio = {k: statistics.median(min(p[c] for c in names) / p["limit_ns"] for p in passes)
                 for k, names in least.items()}
        target = statistics.median(p["target_ratio"] for p in passes)
        lines.append([row, *(f"{r:.2f}" for r in ratio.values()), f"≤ {target:.2f}"])
    return aligned(head, lines)


def machine():
    """Processor and number of cores, as the system names them."""
    name = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            info = f.read()
        fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
        fields = {k.strip(): v.strip() for k, v in fields.items()}
        name = f"{fields.get('model name', name)}, family {fields.get('cpu family')}, model {fields.get('model')}"
        name += ", AVX-512" if "avx512f" in fields.get("flags", "") else ", AVX2" if "avx2" in fields.get("flags", "") else ""
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def between(path, text, begin, end, new):
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"error: {path} has no place for the table between {begin} and {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{new}\n{end}{rest.split(end)[1]}"


def document(path, rows, collected):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    passes = max(len(v) for v in collected.values())
    note = f"Measured {date.today().isoformat()} on {machine()}; medians of {passes} passes."
    text = between(path, text, BEGIN, END, f"{note}\n\n{table(rows)}")
    text = between(path, text, BOUNDS_BEGIN, BOUNDS_END, bounds(collected))
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--json", help="file to write the rows to")
    p.add_argument("--document", help="Markdown file whose table is replaced")
    p.add_argument("--quick", action="store_true", help="judge nothing")
    p.add_argument("folder", help="results: PROGRAM.PASS.json")
    p.add_argument("programs", nargs="+")
    a = p.parse_args()
    collected = collect(a.folder, a.programs)
    rows = summarise(collected, a.quick)
    print(table(rows))
    judged = [r for r in rows if r["ok"] is not None]
    if a.quick:
        print(f"\n{len(rows)} rows work; a quick run measures nothing")
    else:
        missed = [r["row"] for r in judged if not r["ok"]]
        print(f"\n{len(rows)} rows, {len(judged) - len(missed)} of {len(judged)} targets reached on {machine()}")
        for row in missed:
            print(f"  not reached: {row}")
    if a.json:
        with open(a.json, "w", encoding="utf-8") as f:
            json.dump(rows, f, indent=1, ensure_ascii=False)
            f.write("\n")
    if a.document:
        document(a.document, rows, collected)


main()
