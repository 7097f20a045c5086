#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times what a user's first #include <kvcache/cache.hpp> adds to compiling an empty file, with every compiler found.

Prints results in the form of a Google Benchmark program. A round compiles both files; user and system time count, so
that other work on the machine does not; the median of the rounds' differences is reported.
"""
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def cpu_seconds(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main():
    rounds = 1 if os.environ.get("KVCACHE_BENCH_QUICK") == "1" else 5
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = {"empty": "int main() {}\n", "first": "#include <kvcache/cache.hpp>\nint main() {}\n"}
        for name, text in files.items():
            with open(os.path.join(folder, name + ".cpp"), "w", encoding="utf-8") as f:
                f.write(text)
        for compiler in ("g++", "clang++"):
            if shutil.which(compiler) is None:
                continue
            extra = []
            for _ in range(rounds):
                seconds = {}
                for name in files:
                    seconds[name] = cpu_seconds([compiler, "-std=c++20", "-O2", "-I", os.path.join(ROOT, "include"), "-c",
                                                 os.path.join(folder, name + ".cpp"), "-o", os.path.join(folder, "o")])
                extra.append(seconds["first"] - seconds["empty"])
            rows.append({"name": f"compile/first_include/{compiler}", "label": "ms over an empty file",
                         "ns_per_item": 1000 * statistics.median(extra), "target_ns": 600})
    if not rows:
        sys.exit("error: there is no g++ or clang++")
    json.dump({"benchmarks": rows}, sys.stdout)


main()
