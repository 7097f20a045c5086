#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails if a function of cuda/ptx.cuh is compared with its twin by no case of tests/gpu/twin_cases.cuh, or a case is
not in its list.

check_twins.py [PTX.CUH CASES.CUH]

A function counts as compared if the cases call it, at least as often as it has overloads; one that another function of
the header calls is not thereby compared.
"""
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FUNCTION = re.compile(r"^KVCACHE_DEVICE\s+(?:[\w:]+[\s&*]+)+?(\w+)\s*\(", re.M)


def without_comments(text):
    return re.sub(r"//[^\n]*", "", text)


def device_part(text):
    """What nvcc sees, twice defined functions once: from the first condition on, up to the twins."""
    start = text.index("#if !defined(KVCACHE_SIMT)")
    return text[start:text.index("#else  // the twins")]


def main():
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    ptx, cases = map(pathlib.Path, sys.argv[1:]) if len(sys.argv) == 3 else (ROOT / "cuda/ptx.cuh",
                                                                           ROOT / "tests/gpu/twin_cases.cuh")
    functions = collections.Counter(FUNCTION.findall(without_comments(device_part(ptx.read_text()))))
    text = without_comments(cases.read_text())
    if len(functions) < 20:
        sys.exit(f"{ptx}: only {len(functions)} functions were found; has its layout changed?")
    errors = []
    for name, overloads in functions.items():
        calls = len(re.findall(rf"(?<![\w:.]){name}\s*(?:<[^;()]*>)?\s*\(", text))
        if calls < overloads:
            errors.append(f"{name}: {overloads} in {ptx.name}, called {calls} times by {cases.name}")
    listed = text[text.index("void run_all("):]
    for case in re.findall(r"^struct (\w+) \{", text, re.M):
        if not re.search(rf"\b{case}\b", listed):
            errors.append(f"{case}: not in run_all of {cases.name}")
    for error in errors:
        print(error, file=sys.stderr)
    if errors:
        sys.exit(1)
    print(f"twins: {len(functions)} functions of {ptx.name} are compared")


if __name__ == "__main__":
    main()
