#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the lab's fixed matrix and turns what it found into the tables of docs/fidelity.md.

Every step is one `kvcache_lab run` with a folder of its own; the lab finds finished trials again, so a run that
was stopped goes on. Exits with 1 when a figure is not within its bound of the independent reference.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date

BEGIN = "<!-- tables: scripts/fidelity.sh --document -->"
END = "<!-- end of tables -->"
TEXTS = ["tests/data/text.txt", "tests/data/kv_text.txt"]
SHARES = [(50, 2), (25, 4), (12.5, 8), (6.25, 16)]

# Five windows of 768 + 256 tokens. The first text has 1,849 tokens, so 1849, 3149 and 4449 are 0, 1300 and 2600 of the
# second one.
WINDOWS = [0, 820, 1849, 3149, 4449]
PROMPT, SCORE = 768, 256

# An independent implementation of the same protocol in float64: policy text, divergence in windows 1 and 2, mean over
# all five, and what is asked of this library: (bound on the ratio of the two means, bound on the mean of five).
REFERENCE = [
    ("window:154", (0.80488, 0.37414), None, None, None),
    ("streaming_llm:sinks=4,window=150,positions=text", (0.10347, 0.05831), 0.0669, 1.3, None),
    ("h2o:heavy=77,recent=77", (0.05113, 0.04966), 0.0452, 1.3, None),
    ("snapkv:capacity=154,window=32,kernel=1", (0.05380, 0.04943), 0.0436, 1.3, None),
    ("snapkv:capacity=154,window=32,kernel=7", (0.08908, 0.06454), None, 1.3, None),
    ("tova:capacity=154", (0.07058, 0.06182), None, 1.3, None),
    ("scissorhands:capacity=154", None, None, None, None),
    ("far_rms:capacity=154", (0.0369, 0.0300), 0.0296, None, 0.035),
    ("far_rms:capacity=154,budget=head", (0.0313, 0.0270), 0.0256, None, None),
    ("far_rms:capacity=154,budget=global,floor=1/2", (0.0256, 0.0249), 0.0223, None, None),
    ("moved_queries:capacity=154", (0.0381, 0.0179), 0.0243, None, 0.030),
    ("moved_queries:capacity=154,budget=head,floor=1/2", (0.0298, 0.0135), 0.0196, None, None),
    ("moved_queries:capacity=154,budget=global", (0.0197, 0.0115), 0.0147, None, 0.020),
]
STREAM = [
    ("streaming_llm:sinks=4,window=256,positions=text", (0.10816, 0.07234), 1.3),
    ("window:260", (0.65588, 0.35469), None),
]


def policies(keep):
    """[(label, policy text)] at `keep` tokens of every head, as whole blocks of 16."""
    recent = min(32, keep // 4)
    votes = min(32, keep // 2)
    return [
        ("streaming_llm", f"streaming_llm:sinks=4,window={keep - 31}"),
        ("streaming_llm, text positions", f"streaming_llm:sinks=4,window={keep - 4},positions=text"),
        ("window", f"window:{keep}"),
        ("h2o", f"h2o:heavy={keep // 2},recent={keep // 2}"),
        ("snapkv, kernel 1", f"snapkv:capacity={keep},window={votes},kernel=1"),
        ("snapkv, kernel 7", f"snapkv:capacity={keep},window={votes},kernel=7"),
        ("tova", f"tova:capacity={keep}"),
        ("scissorhands", f"scissorhands:capacity={keep}"),
        ("far_rms", f"far_rms:capacity={keep},recent={recent}"),
        ("moved_queries", f"moved_queries:capacity={keep},recent={recent}"),
        ("far_rms, global", f"far_rms:capacity={keep - 8},recent={recent},budget=global"),
        ("moved_queries, global", f"moved_queries:capacity={keep - 8},recent={recent},budget=global"),
    ]


class Task:
    def __init__(self, key, title, name, trials, options, good):
        self.key, self.title, self.name, self.options = key, title, name, options
        self.trials = trials  # [(longest context, trials)]: long ones take longer
        self.good = good  # (description, row -> bool)

    def trials_at(self, length):
        return next((n for longest, n in self.trials if length <= longest), self.trials[-1][1])


def at_least(share):
    return lambda row: row["figure"]["value"] >= share


MANY = [(1024, 10), (2048, 5), (4096, 3)]
SOME = [(1024, 5), (2048, 3), (4096, 2)]
TASKS = [
    Task("kl", "Running text: divergence from the full cache, nats a token", "kl", SOME, ["--score", "128"],
         ("divergence at most 0.05", lambda row: row["figure"]["value"] <= 0.05)),
    Task("passkey_after", "Pass key, the question comes after the compression: keys found", "passkey", MANY,
         ["--question", "after"], ("8 keys of 10", at_least(0.8))),
    Task("passkey_inside", "Pass key, the question is compressed with the text: keys found", "passkey", MANY,
         ["--question", "inside"], ("8 keys of 10", at_least(0.8))),
    Task("repeat", "A passage again: share of its tokens that are the most likely ones", "repeat", SOME,
         ["--score", "64"], ("8 tokens of 10", at_least(0.8))),
]


class Lab:
    def __init__(self, program, model, out, threads):
        self.program, self.model, self.out, self.threads = program, model, out, threads
        self.started, self.step, self.steps = time.time(), 0, 0

    def run(self, folder, arguments):
        """Report of `kvcache_lab run` with these arguments; its results stay in out/folder."""
        self.step += 1
        passed = int(time.time() - self.started)
        print(f"[{self.step}/{self.steps}] {passed // 60:02d}:{passed % 60:02d}  {folder}", file=sys.stderr, flush=True)
        path = os.path.join(self.out, folder)
        command = [self.program, "run", "--json", "--model", self.model, "--text-file", ",".join(TEXTS), "--out", path,
                   *arguments]
        if self.threads:
            command += ["--threads", str(self.threads)]
        with open(os.path.join(self.out, "stdout"), "w+b") as stdout:
            lab = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
            last, messages = time.time(), []
            for line in lab.stderr:
                messages = [*messages[-9:], line]
                if time.time() - last >= 15:
                    last = time.time()
                    print("       " + line.rstrip(), file=sys.stderr, flush=True)
            if lab.wait() != 0:
                stdout.seek(0)
                sys.exit(f"error: {' '.join(command)}\n{''.join(messages)}{stdout.read().decode()}")
        with open(os.path.join(path, "report.json"), encoding="utf-8") as f:
            return json.load(f)


def policy_options(texts):
    return [word for text in texts for word in ("--policy", text)]


def own_rows(group):
    return [row for row in group["rows"] if not row["control"]]


def control(group, row, name):
    return next((r for r in group["rows"] if r["control"] == name and r["policy"] == row["policy"]), None)


# --- the matrix ---


def run_matrix(lab, lengths, shares, tasks, trials_of):
    """{(task key, length): (group, [(share, label, row)])}"""
    found = {}
    for length in lengths:
        texts, labels = [], []
        for share, divisor in shares:
            for label, text in policies(length // divisor):
                texts.append(text)
                labels.append((share, label))
        for task in tasks:
            report = lab.run(f"{task.key}.{length}", ["--task", task.name, "--length", str(length), "--trials",
                                                      str(trials_of(task, length)), *task.options,
                                                      *policy_options(texts)])
            group = report["groups"][0]
            rows = own_rows(group)
            assert len(rows) == len(labels), f"{task.key} {length}: {len(rows)} rows for {len(labels)} policies"
            found[task.key, length] = group, [(s, label, row) for (s, label), row in zip(labels, rows)]
    return found


def shown(task, row):
    f = row["figure"]
    if task.name == "passkey":
        text = f"{row['correct']}/{row['trials']} ({100 * f['low']:.0f} to {100 * f['high']:.0f} %)"
    else:
        digits = 2 if task.name == "repeat" else 4 if f["value"] < 0.1 else 3
        low, high = (f"{f[k]:.{digits}f}" if f[k] is not None else "?" for k in ("low", "high"))
        text = f"{f['value']:.{digits}f} ({low} to {high})"
    marks = ""
    if row.get("against_random", {}).get("verdict", "better") != "better":
        marks += "ʳ"
    if row.get("against_window", {}).get("verdict", "better") != "better" and not row["policy"].startswith("window"):
        marks += "ʷ"
    return text + marks


def bytes_range(rows):
    low, high = min(r["share_of_bytes"] for r in rows), max(r["share_of_bytes"] for r in rows)
    return f"{100 * low:.1f}" if high - low < 0.0005 else f"{100 * low:.1f} to {100 * high:.1f}"


def table(head, lines):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head),
                      *("| " + " | ".join(line) + " |" for line in lines)])


def task_tables(task, lengths, shares, found):
    groups = [found[task.key, n][0] for n in lengths]
    out = [f"### {task.title}", ""]
    for n, group in zip(lengths, groups):
        if not group["measurable"]:
            out.append(f"**Not measurable with this model at {n} tokens:** {group['gate']}.\n")
    trials = ", ".join(str(g["settings"]["trials"]) for g in groups)
    full = ", ".join(shown(task, g["rows"][0]) for g in groups)
    none = ", ".join(shown(task, g["rows"][1]) for g in groups)
    out += [f"Trials: {trials}. Full cache: {full}. No context: {none}.", ""]
    for share, _ in shares:
        lines, labels = [], [label for label, _ in policies(64)]
        for label in labels:
            rows = [next(r for s, name, r in found[task.key, n][1] if (s, name) == (share, label)) for n in lengths]
            lines.append([label, bytes_range(rows), *(shown(task, r) for r in rows)])
        uniform = [next(r for s, name, r in found[task.key, n][1] if (s, name) == (share, "h2o")) for n in lengths]
        lots = [control(g, r, "random") for g, r in zip(groups, uniform)]
        lines.append([f"*random, {lots[0]['draws']} lots*", bytes_range(lots), *(shown(task, r) for r in lots)])
        out += [table([f"**{share} % of the bytes**", "bytes held, %", *(f"{n} tokens" for n in lengths)], lines), ""]
    return out


def smallest_share(task, length, label, shares, found):
    """The least share at which the policy still does the task, all larger ones included."""
    best = None
    for share, _ in shares:
        row = next(r for s, name, r in found[task.key, length][1] if (s, name) == (share, label))
        if not task.good[1](row):
            break
        best = share
    return "–" if best is None else f"{best:g} %"


def summary_table(lengths, shares, tasks, found):
    head = ["policy", *(f"{t.key.replace('_', ', ')}: {t.good[0]}" for t in tasks)]
    lines = []
    for label, _ in policies(64):
        lines.append([label, *(" · ".join(smallest_share(t, n, label, shares, found)
                                          if found[t.key, n][0]["measurable"] else "?" for n in lengths)
                               for t in tasks)])
    return table(head, lines)


# --- the independent reference ---


def reference_rows(lab, reference, windows):
    report = lab.run("reference", ["--task", "kl", "--length", str(PROMPT), "--score", str(SCORE), "--start",
                                   ",".join(map(str, windows)), "--no-controls",
                                   *policy_options([r[0] for r in reference])])
    return own_rows(report["groups"][0])


def stream_rows(lab):
    report = lab.run("stream", ["--task", "kl", "--length", str(PROMPT), "--score", str(SCORE), "--start", "0,820",
                                "--mode", "stream", "--no-controls", *policy_options([r[0] for r in STREAM])])
    return own_rows(report["groups"][0])


def by_window(lab, folder):
    """{policy: [mean divergence of each trial]} from the results file of a finished step."""
    out = {}
    with open(os.path.join(lab.out, folder, "results.jsonl"), encoding="utf-8") as f:
        for line in f:
            one = json.loads(line)
            kl = one["score"]["kl"]
            if kl:
                out.setdefault(one["about"]["policy"], {})[one["score"]["trial"]] = sum(kl) / len(kl)
    return out


def mean(values):
    return sum(values) / len(values)


def compare_with_reference(lab, reference, windows, misses):
    rows = reference_rows(lab, reference, windows)
    each = by_window(lab, "reference")
    lines = []
    for (text, there, five, bound, target), row in zip(reference, rows):
        here = [each[row["policy"]][f"start {w}"] for w in windows]
        cells = [f"`{text}`", *(f"{x:.4f}" for x in here)]
        pair = here[:len(there)] if there else []
        ratio = mean(pair) / mean(there[:len(pair)]) if pair else None
        cells += [" / ".join(f"{x:.4f}" for x in there) if there else "", f"{ratio:.2f}" if ratio else ""]
        cells += [f"{mean(here):.4f}", f"{five:.4f}" if five else ""]
        wanted = []
        if bound:
            wanted.append(f"ratio ≤ {bound}")
            if not 1 / bound <= ratio <= bound:
                misses.append(f"{text}: {ratio:.3f} times the reference, not within {bound}")
        if target and len(windows) == len(WINDOWS):
            wanted.append(f"mean ≤ {target}")
            if mean(here) > target:
                misses.append(f"{text}: mean of five windows {mean(here):.4f}, above {target}")
        cells.append(", ".join(wanted))
        lines.append(cells)
    head = ["policy", *(f"window {i + 1}" for i in range(len(windows))), "reference, windows 1 / 2", "ratio",
            "mean", "reference", "asked for"]
    return table(head, lines), [mean([each[r["policy"]][f"start {w}"] for w in windows]) for r in rows]


def compare_streams(lab, misses):
    rows = stream_rows(lab)
    each = by_window(lab, "stream")
    lines, means = [], []
    for (text, there, bound), row in zip(STREAM, rows):
        here = [each[row["policy"]][f"start {w}"] for w in WINDOWS[:2]]
        ratio = mean(here) / mean(there)
        means.append(mean(here))
        if bound and not 1 / bound <= ratio <= bound:
            misses.append(f"{text}, stream: {ratio:.3f} times the reference, not within {bound}")
        lines.append([f"`{text}`", *(f"{x:.4f}" for x in here), " / ".join(f"{x:.4f}" for x in there), f"{ratio:.2f}"])
    return table(["policy, in force from the first token", "window 1", "window 2", "reference", "ratio"], lines), means


def sinks_sentence(name, with_sinks, without, misses):
    times = without / with_sinks
    if times < 5:
        misses.append(f"{name}: without sinks {times:.1f} times worse, at least 5 asked for")
    return f"{name}: without sinks {times:.1f} times worse (asked for: at least 5)."


# --- the page ---


def machine():
    name = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            fields = dict(line.split(":", 1) for line in f.read().splitlines() if ":" in line)
        name = {k.strip(): v.strip() for k, v in fields.items()}.get("model name", name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def write_page(path, tables, begin=BEGIN, end=END):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"error: {path} has no place for the tables")
    before, rest = text.split(begin)
    with open(path, "w", encoding="utf-8") as f:
        f.write(f"{before}{begin}\n{tables}\n{end}{rest.split(end)[1]}")


def measure(a, lab):
    misses, out = [], []
    quick = a.quick
    lengths = [256] if quick else a.lengths
    shares = SHARES[1:2] if quick else SHARES
    reference = [r for r in REFERENCE if not quick or r[0].split(":")[0] in ("window", "streaming_llm", "h2o")]
    windows = WINDOWS[:1] if quick else WINDOWS
    lab.steps = 1 + len(lengths) * len(TASKS) + (0 if quick else 1)

    def trials_of(task, length):
        return 1 if quick else task.trials_at(length)

    against, means = compare_with_reference(lab, reference, windows, misses)
    streams = None if quick else compare_streams(lab, misses)
    if quick:
        for task in TASKS:
            task.options = [o if o not in ("64", "128") else "32" for o in task.options]
    found = run_matrix(lab, lengths, shares, TASKS, trials_of)
    settings = found[TASKS[0].key, lengths[0]][0]["settings"]
    out.append(f"Measured {date.today().isoformat()} on {machine()} ({settings['simd']}), model `{settings['model']}`, "
               f"{settings['kv']} cache in blocks of {settings['block']}, seed 0.\n")
    out += ["## Against an independent implementation", "",
            f"{PROMPT} tokens computed with the full cache, the policy applied once, {SCORE} scored; 154 of {PROMPT} tokens "
            "kept (20 %). Mean divergence from the full cache, in nats.", "", against, ""]
    sinks = [i for i, r in enumerate(reference) if r[0].startswith("streaming")][0]
    out.append(sinks_sentence("One shot, 154 tokens", means[sinks], means[0], misses) + "\n")
    if streams:
        out += [streams[0], "", sinks_sentence("Stream, 260 tokens", streams[1][0], streams[1][1], misses), ""]
    out += ["## The smallest share that still does", "",
            "Of 50, 25, 12.5 and 6.25 % of the bytes the smallest at which the policy, and with every larger share, "
            "still reaches what the column says; – : not even at the largest. In each cell: at "
            f"{' · '.join(map(str, lengths))} tokens.", "",
            summary_table(lengths, shares, TASKS, found), "", "## All figures", "",
            "95 % intervals in brackets. ʳ: not shown to be better than the random control of equal bytes, ʷ: than the "
            "window of equal bytes (paired, same trials).", ""]
    for task in TASKS:
        out += task_tables(task, lengths, shares, found)
    return "\n".join(out).rstrip(), misses


def main(description, measured, begin, end):
    """Parses the options, lets `measured(options, lab)` make (tables, what was not reached), writes the tables."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--lab", required=True, help="kvcache_lab")
    p.add_argument("--model", required=True)
    p.add_argument("--out", required=True, help="folder for results; a stopped run goes on there")
    p.add_argument("--document", help="page whose tables are replaced")
    p.add_argument("--lengths", type=lambda s: [int(x) for x in s.split(",")], default=[512, 1024, 2048, 4096])
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--quick", action="store_true", help="shows that all of it works; one trial of everything")
    a = p.parse_args()
    os.makedirs(a.out, exist_ok=True)
    if a.quick:
        with tempfile.TemporaryDirectory(dir=a.out) as fresh:  # finds nothing again
            tables, misses = measured(a, Lab(a.lab, a.model, fresh, a.threads))
    else:
        tables, misses = measured(a, Lab(a.lab, a.model, a.out, a.threads))
    path = os.path.join(a.out, "tables.md")
    with open(path, "w", encoding="utf-8") as f:
        f.write(tables + "\n")
    print(f"wrote {path}")
    if a.document:
        write_page(a.document, tables, begin, end)
        print(f"wrote {a.document}")
    for miss in misses:
        print(f"  not reached: {miss}")
    sys.exit(1 if misses else 0)


if __name__ == "__main__":
    main(__doc__, measure, BEGIN, END)
