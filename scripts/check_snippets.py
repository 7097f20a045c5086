#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails if code shown in a document is not, line for line, a region of a file that is compiled and run.

In the document:   <!-- snippet: examples/consumer/main.cpp#open -->   directly before a ``` block
In the source:     // [open]  ...  // [open]                           (the text between the two marks)

check_snippets.py [--root DIR] [--fix]      --fix rewrites the blocks from the sources
"""
import argparse
import pathlib
import re
import sys
import textwrap

BLOCK = re.compile(r"(<!-- snippet: (\S+)#(\S+) -->\n```\w*\n)(.*?)(^```$)", re.S | re.M)
MARK = re.compile(r"<!-- snippet:")


def region(path, name):
    mark = re.compile(r"^\s*(?://|#)\s*\[" + re.escape(name) + r"\]\s*$")
    lines = path.read_text(encoding="utf-8").splitlines()
    at = [i for i, line in enumerate(lines) if mark.match(line)]
    if len(at) != 2:
        raise ValueError(f"{path}: region [{name}] needs exactly two marks, found {len(at)}")
    return textwrap.dedent("\n".join(lines[at[0] + 1:at[1]]) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default=pathlib.Path(__file__).resolve().parent.parent, type=pathlib.Path)
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    documents = sorted(args.root.glob("*.md")) + sorted((args.root / "docs").rglob("*.md"))
    errors, blocks = [], 0
    for document in documents:
        text = document.read_text(encoding="utf-8")
        found = list(BLOCK.finditer(text))
        if len(found) != len(MARK.findall(text)):
            errors.append(f"{document}: a snippet comment is not followed by a ``` block")
        fixed = text
        for m in found:
            blocks += 1
            try:
                want = region(args.root / m.group(2), m.group(3))
            except (OSError, ValueError) as error:
                errors.append(f"{document}: {error}")
                continue
            if m.group(4) != want:
                if args.fix:
                    fixed = fixed.replace(m.group(0), m.group(1) + want + m.group(5))
                else:
                    errors.append(f"{document}: block differs from {m.group(2)}#{m.group(3)} (--fix)")
        if fixed != text:
            document.write_text(fixed, encoding="utf-8")
    for error in errors:
        print(error, file=sys.stderr)
    if errors:
        sys.exit(1)
    if not blocks:
        sys.exit("no document shows a tested snippet")
    print(f"snippets: {blocks} in {len(documents)} documents")


if __name__ == "__main__":
    main()
