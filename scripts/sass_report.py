#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Static SASS report for memory-bound CUDA kernels (attention decode): instructions per streamed byte.

For each kernel of a cubin / fatbin / .o / executable: registers, shared memory, spills; the main loop (innermost
natural loop holding both wide global loads and math); its warp-instructions per iteration by pipe; the bytes it
streams per warp; and, for the GPUs of the file's architecture, the share of issue slots and of each pipe that would
be busy if HBM were saturated.  Nothing is run; needs only nvdisasm and cuobjdump (PyPI: nvidia-cuda-nvdisasm,
nvidia-cuda-cuobjdump).  A share above 1 proves the kernel cannot saturate HBM; a share below 1 proves nothing alone.

  sass_report.py k.cubin --threads 128 --smem 34816 [--kernel REGEX] [--trip .L_x_5=8] [--blocks] [--json out.json]
  sass_report.py BUILD-DIR/cuda/*.o --decode --table cuda/roofline.txt [--update]

The second form is the gate: the decode kernels of this repository at the architectures of the table, each with its own
shared memory; fails if a main loop has more instructions or wavefronts per byte than the table says, if one passes the
limits below, or if too few bytes are under way.
"""
import argparse, glob, json, os, re, shutil, subprocess, sys, tempfile
from collections import Counter, defaultdict
from math import prod

from cuda_kernels import Kernel

# name: (SM target, SMs, GHz under load, HBM TB/s).  Clocks are assumptions: a lower clock raises every share.
GPUS = {"A100-80": ("80", 108, 1.41, 2.039), "H100@1.755": ("90", 132, 1.755, 3.35), "H100@1.98": ("90", 132, 1.98, 3.35),
        "H200@1.755": ("90", 132, 1.755, 4.8), "H200@1.98": ("90", 132, 1.98, 4.8), "B200": ("100", 148, 1.85, 8.0)}
SM = {"80": dict(smem=164, warps=64), "90": dict(smem=228, warps=64), "100": dict(smem=228, warps=64)}
# What the decode kernels with 128 channels are held to on sm_90, per byte of keys and values that they stream; codes are
# counted without their scales.
LIMITS = {("f16", 0): 0.024, ("f16", 1): 0.035, ("bf16", 0): 0.024, ("bf16", 1): 0.035, ("e4m3", 0): 0.060,
          ("int8", 0): 0.070, ("int4", 0): 0.13}
MOST_WAVEFRONTS, MOST_SHARE, LEAST_FLIGHT_KIB = 0.0166, 0.85, 25
ISSUE, LATENCY_NS = 4.0, 700.0   # issue slots per cycle per SM; assumed loaded HBM latency for the bytes-in-flight target
# Capacity, in warp-instructions per cycle per SM, of each shared resource (assumptions, see the report's notes).
POOLS = {  # pool: (pipes drawing on it, {arch: capacity})
    "fma": (("FP32", "FP16", "IMAD"), {"80": 2.0, "90": 4.0, "100": 4.0}),
    "imad": (("IMAD",), {"80": 2.0, "90": 2.0, "100": 2.0}),
    "alu": (("ALU", "CVTPK"), {"80": 2.0, "90": 2.0, "100": 2.0}),
    "xu": (("MUFU", "CVT"), {"80": 0.5, "90": 0.5, "100": 0.5}),
    "mma": (("MMA",), {"80": 0.5, "90": 0.62, "100": 0.5}),      # in units of m16n8k16 f16 (4096 FLOP), mma.sync
    "lsu": (("wavefront",), {"80": 1.0, "90": 1.0, "100": 1.0})}  # 128-byte shared/L1 wavefronts per cycle
PIPES = [  # first match wins; the pattern is matched at the start of the opcode
    ("LDG", r"LDG(?!STS|DEP)|LD\b|LD\."), ("LDGSTS", r"LDGSTS"), ("TMA", r"UBLKCP|UTMALDG"), ("LDS", r"LDS\b|LDS\.|LDSM"),
    ("STS", r"STS|STSM"), ("SPILL", r"LDL|STL"), ("STG", r"STG|ST\b|ST\.|RED|ATOM|REDG"),
    ("SYNC", r"BAR|DEPBAR|LDGDEPBAR|WARPSYNC|SYNCS|MEMBAR|FENCE|ARRIVES|ERRBAR|ACQBULK|PREEXIT|NANOSLEEP|UCGABAR|ELECT"),
    ("MMA", r"[HIQDO]MMA|HGMMA|IGMMA|QGMMA|UT\w*MMA|WARPGROUP"), ("MUFU", r"MUFU"), ("CVTPK", r"F2FP|I2FP|I2IP"),
    ("CVT", r"I2F|F2I|F2F|I2I|FRND|POPC|FLO|BREV"), ("FP16", r"HFMA2|HADD2|HMUL2|HSET|HMNMX2"),
    ("FP32", r"FFMA|FADD|FMUL|FSWZADD"), ("IMAD", r"IMAD|IDP|IMUL"), ("SHFL", r"SHFL|MOVM"),
    ("BRANCH", r"BRA|BRX|JMP|JMX|CALL|RET|EXIT|BSSY|BSYNC|BREAK|YIELD|NOP|KILL|BMOV"),
    ("CONST", r"LDC|ULDC|LDCU"), ("UNIFORM", r"U[A-Z0-9]+|R2UR|S2UR|VOTEU|REDUX"), ("ALU", r".")]
PIPES = [(n, re.compile(p)) for n, p in PIPES]
INSN = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
TARGET = re.compile(r"`\((\.L_[\w$]+)\)")


def tool(name):
    """NVDISASM / CUOBJDUMP from the environment, PATH, an installed PyPI package, or build/cuda-tools."""
    here = os.path.dirname(os.path.abspath(__file__))
    roots = [os.path.join(p, "nvidia") for p in sys.path + [os.path.join(here, "..", "build", "cuda-tools")]]
    found = [f for r in roots for f in sorted(glob.glob(os.path.join(r, "cu*", "bin", name)), reverse=True)]
    return os.environ.get(name.upper()) or shutil.which(name) or (found[0] if found else name)


def run(*cmd):
    return subprocess.run(cmd, check=True, capture_output=True, text=True).stdout


class Insn:
    def __init__(self, addr, guard, op, args):
        self.addr, self.guard, self.op, self.args = addr, guard, op, args
        self.pipe = "BRANCH" if guard == "!PT" else next(n for n, r in PIPES if r.match(op))   # @!PT: a padding no-op, issue slot only
        parts = op.split(".")
        self.bits = next((int(b) for b in ("256", "128", "64") if b in parts), 8 if parts[-1] in ("U8", "S8") or "U8" in parts else
                         16 if "U16" in parts or "S16" in parts else 32)
        self.bytes = self.bits * 4                                       # per warp: bits / 8 * 32 lanes
        self.wave = 0                                                    # 128-byte shared/L1 wavefronts, no conflict, no broadcast
        if self.pipe in ("LDS", "STS") and parts[0].endswith("SM"):
            self.wave = int(parts[-1]) if parts[-1] in "24" else 1
        elif self.pipe in ("LDS", "STS", "LDGSTS", "LDG"):
            self.wave = max(1, self.bytes // 128)
        elif self.pipe == "SHFL":
            self.wave = 1
        m = re.match(r"[HIQ]MMA\.(?:SP\.)?(\d+)", op)                    # 16816 -> 1 unit, 1688 -> 1/2
        self.mma = 0.5 if m and m.group(1) == "1688" else 1.0 if self.pipe == "MMA" else 0


def kernels(cubin):
    """name -> list of basic blocks [label, [Insn], successor indices]."""
    out, name, body = {}, None, []
    for line in run(tool("nvdisasm"), "-c", cubin).splitlines() + ["\t.section\t.end"]:
        if re.match(r"\s*\.section\s", line):
            if name and body:
                out[name] = blocks(body)
            m = re.search(r"\.text\.([\w$]+)", line)
            name, body = (m.group(1) if m else None), []
        elif name:
            m = re.match(r"^(\.L_[\w$]+):", line)
            if m:
                body.append(m.group(1))
            elif (m := INSN.match(line)):
                body.append(Insn(int(m.group(1), 16), m.group(2), m.group(3), m.group(4)))
    return out


def blocks(body):
    bs, at, new = [["entry", [], []]], {}, False
    for x in body:
        if isinstance(x, str):
            if bs[-1][1]:
                bs.append([x, [], []])
            at[x], new = len(bs) - 1, False
            continue
        if new:
            bs.append([f"@{x.addr:x}", [], []])
        bs[-1][1].append(x)
        new = bool(TARGET.search(x.args) and not x.op.startswith("BSSY")) or x.op.split(".")[0] in ("EXIT", "RET", "BRX", "JMX")
    for i, (_, ins, succ) in enumerate(bs):
        last, nxt = (ins[-1] if ins else None), ([i + 1] if i + 1 < len(bs) else [])
        m = TARGET.search(last.args) if last and not last.op.startswith("BSSY") else None
        base = last.op.split(".")[0] if last else ""
        jump = base in ("EXIT", "RET", "BRX", "JMX", "KILL") or (base == "BRA" and m and not last.args[:m.start()].strip())
        if m and m.group(1) in at:
            succ.append(at[m.group(1)])
        succ += [n for n in nxt if n not in succ] if not jump or last.guard else []
    return bs


def loops(bs):
    """Natural loops: header -> set of blocks (loops sharing a header are merged)."""
    n, preds = len(bs), defaultdict(list)
    for i, b in enumerate(bs):
        for s in b[2]:
            preds[s].append(i)
    order, seen, stack = [], {0}, [(0, iter(bs[0][2]))]
    while stack:                                                         # reverse postorder
        u, it = stack[-1]
        v = next((v for v in it if v not in seen), None)
        if v is None:
            order.append(u); stack.pop()
        else:
            seen.add(v); stack.append((v, iter(bs[v][2])))
    order.reverse()
    dom = {b: (1 << n) - 1 for b in order}; dom[0], changed = 1, True
    while changed:
        changed = False
        for b in order[1:]:
            d = (1 << n) - 1
            for p in preds[b]:
                d &= dom.get(p, -1)
            d |= 1 << b
            changed, dom[b] = changed or d != dom[b], d
    out = {}
    for u in order:
        for h in bs[u][2]:
            if h in dom and dom[u] >> h & 1:
                body, todo = out.setdefault(h, {h}), [u]
                while todo:
                    x = todo.pop()
                    if x not in body and x in dom:
                        body.add(x); todo += preds[x]
    return out, dom


def path(bs, h, body, inner, dom, weight, best):
    """Best acyclic header-to-latch path through a loop; inner loops are entered once, their blocks weighted by trips."""
    succ = {b: [s for s in bs[b][2] if s in body and s != h and not dom[b] >> s & 1] for b in body}
    for b in body:
        for s in bs[b][2]:
            if s != h and s in inner and dom[b] >> s & 1:                # inner back edge: leave through the inner loop's exits
                succ[b] += [e for x in inner[s] for e in bs[x][2] if e in body and e not in inner[s] and e != h]
    order, seen = [], set()
    def dfs(u):
        seen.add(u)
        for v in succ[u]:
            if v not in seen:
                dfs(v)
        order.append(u)
    sys.setrecursionlimit(100000); dfs(h); order.reverse()
    val, frm = {h: weight(h)}, {}
    for u in order:
        for v in succ[u]:
            if u in val:
                c = tuple(a + b for a, b in zip(val[u], weight(v)))
                if v not in val or best(c) > best(val[v]):
                    val[v], frm[v] = c, u
    ends = [b for b in body if h in bs[b][2] and b in val]
    b, p = max(ends, key=lambda e: best(val[e])), []
    while b is not None:
        p.append(b); b = frm.get(b)
    return p[::-1]


def analyse(bs, wide, trips, tma, products=False):
    """The innermost loops with KV loads and math: per-iteration counts on the steady path and on the longest path."""
    ls, dom = loops(bs)
    kv = lambda i: i.bytes if i.pipe == "LDGSTS" or (i.pipe == "LDG" and i.bits >= wide) else tma if i.pipe == "TMA" else 0
    has = lambda body, f: any(f(i) for b in body for i in bs[b][1])
    compute = lambda i: i.pipe in ("MMA", "FP32", "FP16") or i.op.startswith("IDP")
    cand = {h: b for h, b in ls.items() if has(b, kv) and has(b, compute)}
    cand = {h: b for h, b in cand.items() if not any(g != h and cand[g] < b for g in cand)}
    res = []
    for h, body in cand.items():
        inner = {g: b for g, b in ls.items() if g != h and b < body}
        mult = lambda b: prod(trips.get(bs[g][0], 1) for g in inner if b in inner[g])
        weight = lambda b: (mult(b) * sum(map(kv, bs[b][1])), mult(b) * len(bs[b][1]), mult(b) * sum(i.mma for i in bs[b][1]))
        one = {}
        for mode, best in (("steady", lambda v: (products * v[2], v[0], -v[1])), ("longest", lambda v: v[1])):
            p = path(bs, h, body, inner, dom, weight, best)
            c, wave, mma, nb = Counter(), 0, 0.0, 0
            for b in p:
                for i in bs[b][1]:
                    c[i.pipe] += mult(b); wave += mult(b) * i.wave; mma += mult(b) * i.mma; nb += mult(b) * kv(i)
            one[mode] = dict(insns=sum(c.values()), bytes=nb, pipes=dict(c), wave=wave, mma=mma, path=[bs[b][0] for b in p])
        ins = [i for b in one["steady"]["path"] for i in next(x for x in bs if x[0] == b)[1]]
        groups = sum(i.op == "LDGDEPBAR" for i in ins)
        waits = [int(m.group(1), 16) for i in ins if i.op.startswith("DEPBAR") and (m := re.search(r"SB0, (0x[0-9a-f]+)", i.args))]
        one.update(label=bs[h][0], blocks=len(body), inner={bs[g][0]: trips.get(bs[g][0], 1) for g in inner},
                   groups=groups, waits=waits, ops=dict(Counter(i.op for i in ins)))
        res.append(one)
    return sorted(res, key=lambda r: -r["steady"]["bytes"])


def report(path_, a):
    out = []
    with tempfile.TemporaryDirectory() as tmp:
        if open(path_, "rb").read(4) == b"\x7fELF" and path_.endswith(".cubin"):
            cubins = [os.path.abspath(path_)]
        else:
            subprocess.run([tool("cuobjdump"), "-xelf", "all", os.path.abspath(path_)], check=True, cwd=tmp, capture_output=True)
            cubins = [os.path.join(tmp, f) for f in sorted(os.listdir(tmp))]
        for cubin in cubins:
            text = run(tool("cuobjdump"), "-res-usage", cubin)
            use = {m.group(1): {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", m.group(2))}
                   for m in re.finditer(r"Function ([\w$]+):\s*\n\s*(.*)", text)}
            arch = re.search(r"\.target\s+sm_(\d+)", run(tool("nvdisasm"), "-c", cubin)).group(1)
            for name, bs in kernels(cubin).items():
                if name in use and re.search(a.kernel, name):
                    spill = sum(i.pipe == "SPILL" for b in bs for i in b[1])
                    k = dict(file=os.path.basename(path_), kernel=name, arch=arch, spill_insns=spill, code=sum(len(b[1]) for b in bs), **use[name])
                    k["loops"] = analyse(bs, a.wide, dict((t.split("=")[0], int(t.split("=")[1])) for t in a.trip), a.tma_bytes, a.prefill)
                    count_codes(k, bs, a)
                    derive(k, a); out.append(k)
                    if a.blocks:
                        for b in bs:
                            print(f"  {b[0]:12} {len(b[1]):4} -> {[bs[s][0] for s in b[2]]}")
    return out


def count_codes(k, bs, a):
    """The order of loops in the code; and in packed kernels what a tile holds instead of what its copies would move if
    all lanes took part, which those of scales do not."""
    place = {b[0]: i for i, b in enumerate(bs)}
    for lp in k["loops"]:
        lp["order"] = place[lp["label"]]
    kernel = Kernel(k["kernel"])
    if a.decode and kernel.tile_bytes and (lp := main_loop(k, kernel)):
        lp["steady"]["bytes"] = kernel.tile_bytes


def derive(k, a):
    arch, warps = k["arch"], a.threads // 32
    dynamic = Kernel(k["kernel"]).shared if a.decode or a.prefill else a.smem
    lim = SM.get(arch)
    if lim:
        regs = max(1, -(-k["REG"] * 32 // 256) * 256)                    # registers per warp, allocated in units of 256
        smem = -(-(dynamic + k["SHARED"] + (1024 if arch == "80" else 0)) // 128) * 128   # 1 KiB reserved per CTA; sm_90+ count it in SHARED
        k["ctas"] = min(lim["warps"] // warps, 65536 // (regs * warps), lim["smem"] * 1024 // max(1, smem), 32)
    for lp in k["loops"]:
        s, n = lp["steady"], max(1, lp["steady"]["bytes"])
        lp["ipb"], lp["ipb_long"] = s["insns"] / n, lp["longest"]["insns"] / max(1, lp["longest"]["bytes"])
        if lim and lp["groups"] and lp["waits"]:                         # cp.async groups still pending after the waits
            per = s["bytes"] / lp["groups"] * warps * k["ctas"]
            lp["flight"] = (min(lp["waits"]) * per, (max(lp["waits"]) + 1) * per)
        lp["gpu"] = {}
        for g, (ga, sms, ghz, tb) in GPUS.items():
            if ga == arch:
                bpc = tb * 1e3 / sms / ghz                               # HBM bytes per cycle per SM
                amount = dict(s["pipes"], wavefront=s["wave"], MMA=s["mma"])
                lp["gpu"][g] = dict(bytes_per_clk=bpc, need=tb * 1e3 / sms * LATENCY_NS, issue=lp["ipb"] * bpc / ISSUE, issue_long=lp["ipb_long"] * bpc / ISSUE,
                                    **{p: sum(amount.get(x, 0) for x in xs) / n * bpc / cap[arch] for p, (xs, cap) in POOLS.items()})


def main_loop(k, kernel):
    """The loop that streams keys and values: of a packed kernel the first one, open blocks come after."""
    found = [lp for lp in k["loops"] if lp["steady"]["bytes"] >= 1024]
    if not found:
        return None
    return min(found, key=lambda lp: lp["order"]) if kernel.kind == "packed" else found[0]


def decode_rows(a):
    """{(kernel, arch): row} of the plain decode kernels, and what breaks the limits."""
    rows, errors = {}, []
    a.kernel = r"(6decode|13decode_packed)I\w+ELb\dELb0E"
    for f in a.files:
        for k in report(f, a):
            if k["arch"] not in a.arch:
                continue
            kernel = Kernel(k["kernel"])
            where, lp = f"{kernel.name} sm_{k['arch']}", main_loop(k, kernel)
            if lp is None:
                errors.append(f"{where}: no loop with wide loads and math was found")
                continue
            wave = lp["steady"]["wave"] / lp["steady"]["bytes"]
            flight = min(lp["flight"]) / 1024 if "flight" in lp else 0.0
            share = max((v[p] for v in lp["gpu"].values() for p in (*POOLS, "issue")), default=0.0)
            rows[kernel.name, k["arch"]] = (round(lp["ipb"], 4), round(wave, 4), round(flight), round(share, 2))
            if k["arch"] != "90" or kernel.dim != 128:
                continue
            limit = LIMITS.get((kernel.format, kernel.wide))
            if limit and lp["ipb"] > limit:
                errors.append(f"{where}: {lp['ipb']:.4f} instructions per byte, at most {limit}")
            if kernel.kind == "exact" and wave > MOST_WAVEFRONTS:
                errors.append(f"{where}: {wave:.4f} wavefronts per byte, at most {MOST_WAVEFRONTS}")
            if share > MOST_SHARE:
                errors.append(f"{where}: a pipe is busy {share:.2f} of the time, at most {MOST_SHARE}")
            if flight < LEAST_FLIGHT_KIB:
                errors.append(f"{where}: {flight:.0f} KiB under way per multiprocessor, at least {LEAST_FLIGHT_KIB}")
    return rows, errors


def print_prefill(a):
    """Per tile of 64 keys and warp, where nothing is masked: instructions, how many of them multiply, and at how many
    instructions and wavefronts per product. `issue`, `lsu`: share of issue slots and of shared memory's time were the tensor
    cores always busy."""
    print(f"{'kernel':<20} {'arch':>4} {'insn':>5} {'mma':>4} {'insn/mma':>8} {'mma share':>9} {'waves/mma':>9} {'issue':>5} {'lsu':>5}")
    a.kernel = r"7prefillI\w+ELb0E"
    for f in a.files:
        for k in report(f, a):
            loops_ = [lp for lp in k["loops"] if lp["steady"]["mma"] >= 64]
            if not loops_:
                sys.exit(f"{f}: no loop with products was found")
            s = loops_[0]["steady"]
            each, wave = s["insns"] / s["mma"], s["wave"] / s["mma"]
            rate = POOLS["mma"][1].get(k["arch"])
            busy = f"{each * rate / ISSUE:>5.2f} {wave * rate / POOLS['lsu'][1][k['arch']]:>5.2f}" if rate else ""
            print(f"{Kernel(k['kernel']).name:<20} {k['arch']:>4} {s['insns']:>5} {s['mma']:>4.0f} {each:>8.2f} {1 / each:>9.2f} {wave:>9.2f} {busy}")


HEAD = """# SPDX-License-Identifier: Apache-2.0
# Written by scripts/sass_report.py --decode --update. Computed from the machine code, not measured: nothing here was run
# on a GPU. Per byte of keys and values: warp instructions of the main loop, shared-memory wavefronts; KiB under way per
# multiprocessor; the largest share of a pipe's or the issue slots' time at saturated memory (H200 for sm_90). Packed formats: per
# byte of codes, without scales.
"""


def gate(a):
    rows, errors = decode_rows(a)
    if not rows:
        errors.append("no decode kernel was found")
    if a.update and not errors:
        with open(a.table, "w") as f:
            f.write(HEAD + f"# {'kernel':<26} {'arch':>4} {'insn/byte':>9} {'waves/byte':>10} {'KiB':>5} {'share':>5}\n")
            for (name, arch), r in sorted(rows.items()):
                f.write(f"{name:<28} {arch:>4} {r[0]:>9.4f} {r[1]:>10.4f} {r[2]:>5} {r[3]:>5.2f}\n")
    table = {}
    for line in open(a.table):
        m = re.match(r"(decode .*?) +(\d+) +([\d.]+) +([\d.]+) +(\d+) +([\d.]+)$", line)
        if m:
            table[m.group(1), m.group(2)] = tuple(float(x) for x in m.groups()[2:])
    for key, r in sorted(rows.items()):
        name = f"{key[0]} sm_{key[1]}"
        if key not in table:
            errors.append(f"{name}: not in {a.table}")
        elif r[0] > table[key][0] * 1.02 or r[1] > table[key][1] * 1.02 or r[2] < table[key][2]:
            errors.append(f"{name}: {r}; the table says {table[key]}")
    for error in errors:
        print(error, file=sys.stderr)
    if errors:
        sys.exit(1)
    print(f"roofline: {len(rows)} main loops as in {os.path.basename(a.table)}")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("files", nargs="+"); ap.add_argument("--kernel", default="."); ap.add_argument("--json")
    ap.add_argument("--threads", type=int, default=128, help="threads per CTA at launch"); ap.add_argument("--smem", type=int, default=0, help="dynamic shared bytes")
    ap.add_argument("--wide", type=int, default=64, help="LDG of at least this many bits per lane counts as streamed data")
    ap.add_argument("--tma-bytes", type=int, default=0, help="bytes per bulk copy (not in the SASS); producer/consumer loops are not joined")
    ap.add_argument("--trip", action="append", default=[], metavar="LABEL=N", help="trip count of an inner loop (default 1)")
    ap.add_argument("--blocks", action="store_true", help="also print the basic blocks")
    ap.add_argument("--decode", action="store_true", help="the gate: this repository's decode kernels against --table")
    ap.add_argument("--prefill", action="store_true", help="what the tiles of this repository's prefill kernels cost")
    ap.add_argument("--table", help="table to compare with"); ap.add_argument("--update", action="store_true", help="write the table")
    ap.add_argument("--arch", nargs="+", default=["90"], help="architectures of the gate"); a = ap.parse_args()
    if a.decode:
        gate(a)
        return
    if a.prefill:
        print_prefill(a)
        return
    allk = []
    for f in a.files:
        for k in report(f, a):
            allk.append(k)
            short = re.sub(r"^_ZN?(?:\d+flashinfer)?\d+", "", k["kernel"])[:40]
            print(f"\n{k['file']}  sm_{k['arch']}  {short}\n  regs {k['REG']}  static smem {k['SHARED']}  stack {k['STACK']}  spill insns {k['spill_insns']}"
                  f"  code {k['code']} insns  threads {a.threads}  dyn smem {a.smem}  CTAs/SM {k.get('ctas', '?')}")
            for lp in k["loops"]:
                s, lg = lp["steady"], lp["longest"]
                print(f"  loop {lp['label']} ({lp['blocks']} blocks, inner {lp['inner'] if 0 < len(lp['inner']) < 5 else len(lp['inner'])}): {s['insns']} insns, {s['bytes']} KV bytes per warp-iteration"
                      f" -> {lp['ipb']:.4f} insn/byte (longest path {lg['insns']} / {lg['bytes']} -> {lp['ipb_long']:.4f})")
                print("    " + "  ".join(f"{p} {s['pipes'][p]}" for p, _ in PIPES if s["pipes"].get(p)) + f"  | wavefronts {s['wave']}  cp.async groups {lp['groups']} waits {lp['waits']}")
                for g, v in lp["gpu"].items():
                    fl = "in flight/SM {:.0f}-{:.0f} KiB".format(*(x / 1024 for x in lp["flight"])) if "flight" in lp else "in flight: n/a"
                    print(f"    {g:11} {v['bytes_per_clk']:5.1f} B/clk/SM  issue {v['issue']:.2f} (long {v['issue_long']:.2f})  "
                          + "  ".join(f"{p} {v[p]:.2f}" for p in POOLS) + f"  {fl}, need {v['need'] / 1024:.0f}")
            if not k["loops"]:
                print("  no loop with both wide loads and math")
    if a.json:
        json.dump(allk, open(a.json, "w"), indent=1)


if __name__ == "__main__":
    main()
