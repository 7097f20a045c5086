#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what packed formats cost and turns it into the second part of docs/fidelity.md.

Two protocols. Stream: a text in three chunks of 1,024 tokens, each from an empty cache, the format in force from the
first token; divergence from an f16 cache at positions 512 to 1,022. One shot: 768 tokens computed exactly, all but the
newest 32 packed, 256 scored. Exits with 1 when a figure is above its bound.
"""
import json
import os
import subprocess
import sys
import time
from datetime import date

import fidelity
from fidelity import by_window, machine, mean, own_rows, policy_options, table

BEGIN = "<!-- tables: scripts/fidelity.sh --formats --document -->"
END = "<!-- end of the tables of formats -->"
TEXT = "tests/data/kv_text.txt"
CHUNKS = ["start 0", "start 1024", "start 2048"]
CHOSEN = CHUNKS[1]  # the recipes were chosen on this one

# What may be said of a budget of bits: bits per value, divergence with no residual and with 32 tokens.
BUDGETS = [
    ("kv8", "K8 V8", 8.5, 0.00005, 0.00003, "q8_0 / q8_0, 8.5 bits: 0.0037"),
    ("kv6", "K8 V4", 6.55, 0.0008, 0.0004, "q8_0 / q4_0, 6.5 bits: 0.0083"),
    ("kv5", "K5 V4", 5.05, None, None, ""),
    ("int4:group=32,hadamard=both,exempt=1", "K4 V4, groups of 32", 5.05, 0.0022, 0.0015,
     "q4_1 / q4_1, 5.0 bits: 0.0329"),
    ("kv4", "K4 V4", 4.55, 0.003, 0.0017, "iq4_nl / iq4_nl, 4.5 bits: 0.0338"),
    ("k4v3:group=0/64,hadamard=both,exempt=1", "K4 V3", 4.05, 0.006, 0.003, ""),
    ("kv3", "K3 V3", 3.55, 0.018, 0.010, ""),
    ("k3v2:group=0/64,hadamard=both,exempt=1,clip=none/middle", "K3 V2", 3.05, 0.04, 0.022, ""),
    ("kv2", "K2 V2", 2.55, 0.11, 0.065, ""),
    ("fp8", "e4m3, a scale per token and head", None, None, None, ""),
    ("e5m2:exempt=1", "e5m2, a scale per token and head", None, None, None, ""),
]
AXES = ["tensor", "head", "token", "channel"]
ONESHOT = [
    ("int4:group=32,residual=32", "K4 per channel, V4 per token, groups of 32, nothing else", 0.0027, 0.0017),
    ("int8:group=32,residual=32", "K8 per channel, V8 per token, groups of 32, nothing else", None, None),
    ("kv8:residual=32", "kv8", None, None),
    ("kv4:residual=32", "kv4", None, None),
    ("kv3:residual=32", "kv3", None, None),
    ("kv2:residual=32", "kv2", None, None),
]
RETRIEVAL = ["kv8", "kv4", "kv3", "kv2"]
TRIALS = [(1024, 10), (2048, 5), (4096, 3)]


def with_residual(text, tokens):
    return f"{text}{',' if ':' in text else ':'}residual={tokens}"


def cell(lab, text, quick):
    """What `kvcache_lab cell` says of a format in force from the first token; kept, so that a stopped run goes on."""
    path = os.path.join(lab.out, "cell." + text.translate(str.maketrans(":=,/", "----")) + ".json")
    lab.step += 1
    if not os.path.exists(path):
        passed = int(time.time() - lab.started)
        print(f"[{lab.step}/{lab.steps}] {passed // 60:02d}:{passed % 60:02d}  {text}", file=sys.stderr, flush=True)
        command = [lab.program, "cell", "--json", "--model", lab.model, "--text-file", TEXT, "--task", "kl", "--chunks",
                   "1" if quick else "3", "--mode", "stream", "--kv", "f16", "--block", "64", "--policy", text]
        if lab.threads:
            command += ["--threads", str(lab.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"error: {' '.join(command)}\n{done.stderr}{done.stdout}")
        with open(path, "w", encoding="utf-8") as f:
            f.write(done.stdout)
    with open(path, encoding="utf-8") as f:
        found = json.load(f)
    found["each"] = {score["trial"]: mean(score["kl"]) for score in found.pop("scores")}
    return found


def kl(x):
    return f"{x:.6f}" if x < 0.0001 else f"{x:.5f}" if x < 0.001 else f"{x:.4f}"


def bound(text, name, tokens, value, limit, misses):
    if limit is None:
        return kl(value)
    if value > limit:
        misses.append(f"{name}, {text}, residual {tokens}: {kl(value)}, above {limit}")
    return f"{kl(value)} (≤ {limit:g})"


def budgets(lab, quick, misses):
    lines, halves = [], []
    for text, name, bits, r0, r32, peer in BUDGETS[4:5] if quick else BUDGETS:
        a, b = cell(lab, text, quick), cell(lab, with_residual(text, 32), quick)
        held = a["bits_per_value"]
        if bits is not None and held > bits:
            misses.append(f"{text}: {held:.3f} bits, above {bits}")
        lines.append([f"`{text}`", name, f"{held:.3f}", f"{a['bits_with_open']:.2f} / {b['bits_with_open']:.2f}",
                      bound(text, "stream", 0, a["kl_mean"], r0, misses),
                      bound(text, "stream", 32, b["kl_mean"], r32, misses),
                      f"{kl(a['kl_p99'])} / {kl(b['kl_p99'])}", f"{100 * a['top1']:.1f} / {100 * b['top1']:.1f}",
                      f"{a['nll']:.4f} / {b['nll']:.4f}", peer])
        if quick:
            continue
        rest = [a["each"][c] for c in CHUNKS if c != CHOSEN]
        halves.append([f"`{text}`", kl(a["each"][CHOSEN]), *(kl(x) for x in rest),
                       f"{mean(rest) / a['each'][CHOSEN]:.2f}"])
    head = ["format", "", "bits a value", "with open blocks, R 0 / R 32", "divergence, R 0", "R 32",
            "99th percentile, R 0 / R 32", "same first token, %", "NLL", "llama.cpp there"]
    return [table(head, lines), "",
            "Chosen on the second chunk, confirmed on the others (R 0):", "",
            table(["format", "chunk 2", "chunk 1", "chunk 3", "confirmed / chosen"], halves), ""]


def axes(lab, quick):
    """K and V with the same axis, and the two ways to mix, at 8, 4 and 2 bits."""
    lines = []
    for b in [4] if quick else [8, 4, 2]:
        both = AXES[2:3] if quick else AXES
        texts = [*(f"int{b}:k={a},v={a}" for a in both), f"int{b}:k=channel,v=token", f"int{b}:k=token,v=channel"]
        found = [cell(lab, text, quick) for text in texts]
        lines.append([f"{b} bits", *(f"{kl(c['kl_mean'])} ({c['bits_per_value']:.2f})" for c in found)])
    both = AXES[2:3] if quick else AXES
    return [table(["min/max, one scale for", *(f"both per {a}" for a in both), "K channel, V token",
                   "K token, V channel"], lines), ""]


def oneshot(lab, quick, misses):
    chosen = ONESHOT[:1] if quick else ONESHOT
    report = lab.run("oneshot", ["--task", "kl", "--length", "768", "--score", "256", "--start", "0,820",
                                 "--no-controls", "--kv", "f16", "--block", "32",
                                 *policy_options([c[0] for c in chosen])])
    each = by_window(lab, "oneshot")
    lines = []
    for (text, name, first, second), row in zip(chosen, own_rows(report["groups"][0])):
        a, b = (each[row["policy"]][f"start {w}"] for w in (0, 820))
        lines.append([f"`{text}`", name, bound(text, "one shot, window 1", 32, a, first, misses),
                      bound(text, "one shot, window 2", 32, b, second, misses)])
    return [table(["format, blocks of 32", "", "window 1", "window 2"], lines), ""]


def retrieval(lab, a, misses):
    lengths = [256] if a.quick else a.lengths
    formats = RETRIEVAL[1:2] if a.quick else RETRIEVAL
    lines = {text: [f"`{text}`"] for text in ["full cache", *formats]}
    for length in lengths:
        trials = 1 if a.quick else next(n for longest, n in TRIALS if length <= longest)
        report = lab.run(f"passkey.{length}", ["--task", "passkey", "--question", "after", "--length", str(length),
                                               "--trials", str(trials), "--mode", "stream", "--no-controls", "--kv",
                                               "f16", "--block", "64", *policy_options(formats)])
        group = report["groups"][0]
        full = group["rows"][0]
        lines["full cache"].append(f"{full['correct']}/{full['trials']}")
        for text, row in zip(formats, own_rows(group)):
            lines[text].append(f"{row['correct']}/{row['trials']} ({100 * row['share_of_bytes']:.0f} %)")
            if text == "kv4" and row["correct"] < full["correct"]:
                misses.append(f"pass key, kv4, {length} tokens: {row['correct']} of {full['correct']}")
    return [table(["format", *(f"{n} tokens" for n in lengths)], list(lines.values())), ""]


def measure(a, lab):
    misses = []
    lab.steps = (2 + 3 if a.quick else 2 * len(BUDGETS) + 18) + 1 + (1 if a.quick else len(a.lengths))
    out = [f"Measured {date.today().isoformat()} on {machine()}, model `{os.path.basename(a.model)}`, blocks of 64 "
           "tokens.\n",
           "## Budgets of bits, format in force from the first token", "",
           "Mean divergence from an f16 cache in nats a token, 1,533 positions; R: newest tokens that stay exact. Bits "
           "a value: codes, scales, minima and exempt rows at 1,024 tokens; beside it the bits with open blocks, at "
           "the end of a chunk. llama.cpp: its own figures on this text, with 8-bit queries.", "",
           *budgets(lab, a.quick, misses),
           "## Which values share a scale", "",
           "The same protocol, R 0, nothing rotated, clipped or exempt; bits a value in brackets.", "",
           *axes(lab, a.quick),
           "## One shot", "",
           "768 tokens computed exactly, then all but the newest 32 packed; the next 256 scored.", "",
           *oneshot(lab, a.quick, misses),
           "## A pass key", "",
           "Keys found where the question comes after the text, the format in force from the first token; share of the "
           "bytes of an f16 cache that were held, open blocks included.", "",
           *retrieval(lab, a, misses)]
    return "\n".join(out).rstrip(), misses


if __name__ == "__main__":
    fidelity.main(__doc__, measure, BEGIN, END)
