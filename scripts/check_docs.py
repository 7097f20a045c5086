#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails if a public name in include/kvcache has no doc comment, if Doxygen does not understand one, or if a document
links to a file or heading that does not exist.

check_docs.py [--root DIR] [--doxygen PROGRAM]

Public is what Doxygen extracts with docs/Doxyfile: no private members, nothing in a namespace `detail`. Enumerators may
be described by their enum. What Doxygen does not warn about (concepts, empty classes, enums without a name) is looked for
in its XML.
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent.parent


TYPES = ("class", "struct", "union")


def run_doxygen(program, root, output, settings):
    """Runs Doxygen with docs/Doxyfile and more settings; returns its messages."""
    text = (HERE / "docs" / "Doxyfile").read_text(encoding="utf-8")
    settings = {"OUTPUT_DIRECTORY": output, "INPUT": root / "include" / "kvcache", "STRIP_FROM_PATH": root,
                "INPUT_FILTER": f"sed -E -f {HERE / 'docs' / 'doxygen.sed'}", "GENERATE_HTML": "NO", **settings}
    text += "\n".join(f'{name} = "{value}"' for name, value in settings.items()) + "\n"
    done = subprocess.run([program, "-"], input=text, cwd=root, capture_output=True, text=True)
    messages = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode != 0 and not messages:
        messages = [f"{program} ended with {done.returncode}"]
    return [line.removeprefix(f"{root}/") for line in messages]


def described(element):
    return any(re.search(r"\S", "".join(element.find(kind).itertext()))
               for kind in ("briefdescription", "detaileddescription") if element.find(kind) is not None)


def silent_names(folder):
    """Yields (where, what, whether it has a comment) for every concept, enum and public class."""
    for path in sorted(folder.glob("*.xml")):
        if path.name == "index.xml":
            continue
        for compound in xml.etree.ElementTree.parse(path).getroot().iter("compounddef"):
            kind = compound.get("kind")
            wanted = [compound] if kind == "concept" or kind in TYPES and compound.get("prot") == "public" else []
            wanted += [member for member in compound.iter("memberdef")
                       if member.get("kind") == "enum" and member.get("prot") == "public"]
            for element in wanted:
                place = element.find("location")
                name = element.findtext("compoundname") or element.findtext("name") or "(no name)"
                yield (f"{place.get('file')}:{place.get('line')}", f"{element.get('kind')} {name}", described(element))


def prose(path):
    """A document with its code blocks emptied; line numbers stay."""
    blank = lambda m: "\n" * m.group().count("\n")
    return re.sub(r"^```.*?^```", blank, path.read_text(encoding="utf-8"), flags=re.S | re.M)


def headings(path):
    """Anchors of a document's headings, as GitHub makes them."""
    for title in re.findall(r"^#+ +(.+?) *$", prose(path), re.M):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def broken_links(root):
    for path in sorted(root.glob("*.md")) + sorted((root / "docs").rglob("*.md")):
        text = prose(path)
        for m in re.finditer(r"\[[^\]]*\]\(([^)\s]+)\)", text):
            target, _, anchor = m.group(1).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (path.parent / target).resolve() if target else path
            where = f"{path.relative_to(root)}:{text.count(chr(10), 0, m.start()) + 1}"
            if not file.exists():
                yield f"{where}: links to {target}, which does not exist"
            elif anchor and file.suffix == ".md" and anchor not in headings(file):
                yield f"{where}: links to {target}#{anchor}, a heading that does not exist"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default=HERE, type=pathlib.Path)
    parser.add_argument("--doxygen", default="doxygen")
    args = parser.parse_args()
    root = args.root.resolve()
    if shutil.which(args.doxygen) is None:
        sys.exit(f"{args.doxygen} is not installed")
    headers = [p for p in (root / "include" / "kvcache").rglob("*") if p.suffix in (".hpp", ".h", ".cuh")]
    if not headers:
        sys.exit(f"no headers under {root / 'include' / 'kvcache'}")

    with tempfile.TemporaryDirectory() as work:
        errors = run_doxygen(args.doxygen, root, f"{work}/warnings", {"GENERATE_XML": "YES"})
        run_doxygen(args.doxygen, root, f"{work}/all", {"GENERATE_XML": "YES", "EXTRACT_ALL": "YES"})
        quiet = list(silent_names(pathlib.Path(work, "all", "xml")))
        files = len(list(pathlib.Path(work, "warnings", "xml").glob("*_8h*.xml")))
    if not quiet:
        errors.append("the XML of Doxygen holds no enum and no concept: it was not read")
    if files != len(headers):
        errors.append(f"Doxygen read {files} of {len(headers)} headers")
    errors += sorted({f"{where}: {what} is not documented." for where, what, good in quiet if not good})
    errors += broken_links(root)
    for error in errors[:200]:
        print(error, file=sys.stderr)
    if errors:
        sys.exit(f"docs: {len(errors)} complaints")
    print(f"docs: every public name of {len(headers)} headers has a comment")


if __name__ == "__main__":
    main()
