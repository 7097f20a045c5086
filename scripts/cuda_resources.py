#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the compiled kernels need: registers, shared memory and blocks per multiprocessor, compared with the
committed table. Reads what ptxas said during the build; needs no GPU and no further tool.

cuda_resources.py BUILD-DIR [--table cuda/resources.txt] [--update]

Fails if a kernel spills, uses local memory, asks for more shared memory than its device has, or differs from the
table. With another version of ptxas than the table's, registers may differ, blocks per multiprocessor may not fall.
"""
import argparse
import pathlib
import re
import sys

from cuda_kernels import Kernel

HERE = pathlib.Path(__file__).resolve().parent.parent
# Shared memory of a multiprocessor and the most that one block may have, KiB (CUDA C++ Programming Guide, table of
# technical specifications per compute capability); 1 KiB per block is the system's.
SHARED = {"80": (164, 163), "86": (100, 99), "89": (100, 99), "90": (228, 227), "100": (228, 227), "120": (100, 99)}
WARPS = {"80": 64, "86": 48, "89": 48, "90": 64, "100": 64, "120": 48}
THREADS = 128


def blocks_each(arch, registers, shared):
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = 65536 // per_warp // (THREADS // 32)
    by_shared = SHARED[arch][0] * 1024 // (shared + 1024)
    return min(by_registers, by_shared, WARPS[arch] // (THREADS // 32), 32 if arch in ("80", "90", "100") else 24)


def read_logs(build):
    """{(kernel, arch): (registers, shared, blocks)} and complaints."""
    rows, errors = {}, []
    logs = sorted((build / "cuda").glob("*.cu.o.log"))
    if not logs:
        sys.exit(f"{build}/cuda holds no log of ptxas: was kvcache_cuda built?")
    for log in logs:
        kernel = arch = None
        for line in log.read_text().splitlines():
            m = re.search(r"Compiling entry function '([^']+)' for 'sm_(\d+)", line)
            if m:
                kernel, arch = m.groups()
                continue
            if kernel is None:
                continue
            k = Kernel(kernel)
            name, shared = k.name, k.shared
            m = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
            if m and any(int(x) for x in m.groups()):
                errors.append(f"{name} sm_{arch}: local memory ({line.strip()})")
            m = re.search(r"Used (\d+) registers", line)
            if m:
                registers = int(m.group(1))
                if shared > SHARED[arch][1] * 1024:
                    errors.append(f"{name} sm_{arch}: {shared} bytes of shared memory, the device has {SHARED[arch][1]} KiB")
                rows[name, arch] = (registers, shared, blocks_each(arch, registers, shared))
                kernel = None
    return rows, errors


def version_of(build):
    m = re.search(r"^KVCACHE_NVCC_VERSION:\w+=(\S+)", (build / "CMakeCache.txt").read_text(), re.M)
    return m.group(1) if m else "unknown"


def write_table(path, rows, version):
    text = ["# SPDX-License-Identifier: Apache-2.0",
            "# Written by scripts/cuda_matrix.sh --update. Blocks of 128 threads. Computed, not run on a GPU.",
            f"# nvcc {version}", f"# {'kernel':<32} {'arch':>4} {'registers':>9} {'shared':>7} {'blocks/SM':>9}"]
    for (name, arch), (registers, shared, blocks) in sorted(rows.items(), key=lambda r: (r[0][0], int(r[0][1]))):
        text.append(f"{name:<34} {arch:>4} {registers:>9} {shared:>7} {blocks:>9}")
    path.write_text("\n".join(text) + "\n")


def read_table(path):
    text = path.read_text()
    rows = {}
    for line in text.splitlines():
        m = re.match(r"([a-z].*?) +(\d+) +(\d+) +(\d+) +(\d+)$", line)
        if m:
            rows[m.group(1), m.group(2)] = tuple(int(x) for x in m.groups()[2:])
    return rows, re.search(r"^# nvcc (\S+)", text, re.M).group(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path, default=HERE / "cuda" / "resources.txt")
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    rows, errors = read_logs(args.build)
    version = version_of(args.build)
    if errors:
        sys.exit("\n".join(errors))
    if args.update:
        write_table(args.table, rows, version)
    table, table_version = read_table(args.table)
    for key, (registers, shared, blocks) in sorted(rows.items()):
        name = f"{key[0]} sm_{key[1]}"
        if key not in table:
            errors.append(f"{name}: not in {args.table.name}; run scripts/cuda_matrix.sh --update")
            continue
        was = table[key]
        if version == table_version and was != (registers, shared, blocks):
            errors.append(f"{name}: {registers} registers, {shared} bytes, {blocks} blocks; the table says {was}")
        elif blocks < was[2] or shared != was[1]:
            errors.append(f"{name}: {blocks} blocks with {shared} bytes; the table says {was[2]} with {was[1]}")
    for error in errors:
        print(error, file=sys.stderr)
    if errors:
        sys.exit(1)
    print(f"resources: {len(rows)} kernels on sm_{', sm_'.join(sorted({a for _, a in rows}, key=int))}, no spill, no local memory")


if __name__ == "__main__":
    main()
