#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails if a source file is compiled by no target, or an example program is run by no test: both rot unseen.

check_sources.py BUILD-DIR [--root DIR]
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys

FOLDERS = ("src", "cuda", "tests", "examples", "bench", "tools")
# Projects of their own, built by the packaging tests, by the planted faults and by the test of the gdb printers.
APART = ("tests/packaging/", "tests/gates/", "tests/gdb/", "examples/consumer/")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--root", default=pathlib.Path(__file__).resolve().parent.parent, type=pathlib.Path)
    args = parser.parse_args()
    root = args.root.resolve()

    compiled, test_compilations = set(), []
    for entry in json.loads((args.build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["directory"], entry["file"]).resolve()
        compiled.add(path)
        if path.is_relative_to(root / "tests"):
            test_compilations.append(entry["command"])
    apart = APART
    cache = args.build / "CMakeCache.txt"
    if not (cache.exists() and re.search(r"^KVCACHE_NVCC:\w+=/", cache.read_text(), re.M)):
        # They link the library that only nvcc can build, or include CUDA's headers.
        apart += ("tests/cuda/", "tests/gpu/", "examples/cuda_engine_loop/")
    errors, seen = [], 0
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix not in (".cpp", ".c", ".cc") or name.startswith(apart):
                continue
            seen += 1
            if path.resolve() not in compiled:
                errors.append(f"{name}: no target compiles it")
    if not seen:
        errors.append(f"no source files under {root}")

    listing = subprocess.run(["ctest", "--show-only=json-v1"], cwd=args.build, check=True, capture_output=True)
    # A test runs a program if its command names it, or if the program's path was compiled into the test.
    commands = test_compilations + [" ".join(test.get("command", []))
                                    for test in json.loads(listing.stdout)["tests"]]
    programs = [line for line in (args.build / "example_programs.txt").read_text().splitlines() if line]
    for program in programs:
        if not any(program in command for command in commands):
            errors.append(f"{program}: an example program that no test runs (kvcache_run_example)")

    for error in errors:
        print(error, file=sys.stderr)
    if errors:
        sys.exit(1)
    print(f"sources: {seen} files compiled, {len(programs)} example programs run")


if __name__ == "__main__":
    main()
