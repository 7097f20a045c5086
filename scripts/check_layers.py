#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the include graph of include/kvcache against the layers of the design and fails on a forbidden edge.

check_layers.py [--root DIR] [--draw]

Layers, lower first:  core < {blocks, prefix, evict, retain, quant, tier} < {attend, cuda} < cache < front door,
where the front door is the files directly in include/kvcache.
A file may include its own folder and lower layers, never upwards and never sideways. `interop` may include
everything below the front door. `kvcache.h` and its parts in `c/` stand alone: they are C, include nothing else of ours, and
their structs are the wire format between the halves, so everything above core may include them. Also checked: headers no public header may need, headers bound to one folder,
cycles between files, and includes that name no file.
"""
import argparse
import pathlib
import re
import sys

C_API, C_PARTS = "kvcache.h", "c"
LAYER = {"core": 0, "blocks": 1, "prefix": 1, "evict": 1, "retain": 1, "quant": 1, "tier": 1,
         C_API: 0.5, "attend": 2, "cuda": 2, "interop": 3, "cache": 3, "": 4}
HEAVY = {"iostream", "string", "functional", "regex", "ranges", "thread"}
ONLY_IN = [(re.compile(r"^(Eigen/|unsupported/Eigen/|dlpack/)"), "interop"),
           (re.compile(r"^(cuda|cuda_\w+|driver_types|cooperative_groups|cub/|thrust/|nvtx3/)"), "cuda"),
           # The compiled part's private dependency: consumers inherit nothing.
           (re.compile(r"^hwy/"), "(no folder)")]
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def folder_of(path):
    if path.parts[0] in (C_API, C_PARTS):
        return C_API
    return path.parts[0] if len(path.parts) > 1 else ""


def includes_of(text):
    """Yields (line, quote, name); comments are blanked so that an example in one does not count."""
    text = COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)
    for m in INCLUDE.finditer(text):
        yield text.count("\n", 0, m.start()) + 1, m.group(1), m.group(2)


def check_edge(source, target, where, errors):
    a, b = folder_of(source), folder_of(target)
    if a == b:
        return
    if a == C_API:
        errors.append(f"{where}: {C_API} stands alone, it cannot include {target}")
        return
    if LAYER[b] > LAYER[a]:
        errors.append(f"{where}: upward include of {target} ({a or 'front door'} is below {b or 'front door'})")
    elif LAYER[b] == LAYER[a]:
        errors.append(f"{where}: sideways include of {target} ({a} and {b} share a layer; use core)")


def find_cycle(graph):
    state = {}

    def visit(node, path):
        state[node] = 1
        for nxt in graph.get(node, ()):
            if state.get(nxt) == 1:
                return path[path.index(nxt):] + [nxt] if nxt in path else [node, nxt]
            if nxt not in state:
                found = visit(nxt, path + [nxt])
                if found:
                    return found
        state[node] = 2
        return None

    for node in sorted(graph):
        if node not in state:
            found = visit(node, [node])
            if found:
                return found
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default=pathlib.Path(__file__).resolve().parent.parent, type=pathlib.Path)
    parser.add_argument("--draw", action="store_true", help="print the folder graph in DOT")
    args = parser.parse_args()
    base = args.root / "include" / "kvcache"
    files = sorted(p for p in base.rglob("*") if p.suffix in (".hpp", ".h", ".cuh"))
    if not files:
        sys.exit(f"no headers under {base}")

    errors, graph, folders = [], {}, set()
    for path in files:
        source = path.relative_to(base)
        here = folder_of(source)
        if here not in LAYER:
            errors.append(f"{source}: folder '{here}' has no layer; name one in scripts/check_layers.py")
            continue
        graph[source] = []
        for line, quote, name in includes_of(path.read_text(encoding="utf-8")):
            where = f"include/kvcache/{source}:{line}"
            if quote == '"' or name.startswith("kvcache/"):
                if not name.startswith("kvcache/"):
                    errors.append(f"{where}: write \"{name}\" from the root, \"kvcache/...\"; relative includes hide the layer")
                    continue
                target = pathlib.PurePosixPath(name).relative_to("kvcache")
                if not (base / target).is_file():
                    errors.append(f"{where}: includes {name}, which does not exist")
                    continue
                target = pathlib.Path(target)
                graph[source].append(target)
                folders.add((here or "front", folder_of(target) or "front"))
                check_edge(source, target, where, errors)
                continue
            if name in HEAVY:
                errors.append(f"{where}: public headers do without <{name}>")
            for pattern, only in ONLY_IN:
                if pattern.match(name) and here != only:
                    errors.append(f"{where}: <{name}> belongs in {only} only")
    cycle = find_cycle(graph)
    if cycle:
        errors.append("include cycle: " + " -> ".join(str(p) for p in cycle))
    if args.draw:
        print("digraph layers {")
        for a, b in sorted(folders):
            if a != b:
                print(f'  "{a}" -> "{b}";')
        print("}")
    for error in errors:
        print(error, file=sys.stderr)
    if errors:
        sys.exit(1)
    print(f"layers: {len(files)} headers, {sum(map(len, graph.values()))} edges")


if __name__ == "__main__":
    main()
