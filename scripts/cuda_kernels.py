# SPDX-License-Identifier: Apache-2.0
"""The kernels of cuda/ by their mangled names: a readable name, and the dynamic shared memory of a block. Used by
cuda_resources.py and sass_report.py; the sums are those of the headers named here."""
import re

EXACT = re.compile(r"6decodeILNS1_9half_kindE(\d)ELi(\d+)ELb(\d)ELb(\d)E")
PACKED = re.compile(r"13decode_packedILNS1_11packed_codeE(\d)ELS3_(\d)ELi(\d+)ELb(\d)ELb(\d)E")
PREFILL = re.compile(r"7prefillILNS1_9half_kindE(\d)ELi(\d+)ELb(\d)E")
PLAIN = re.compile(r"gpu\d+([a-z_]+)E")
# append_shared_bytes in cuda/append_params.hpp; seal_shared_bytes in cuda/code_params.hpp for the largest cell: 128
# slots of 256 channels, a scale per 8 of them.
PLAIN_SHARED = {"append_rows": 4608, "append_codes": 4608, "seal_cells": 128 * (2 * 256 + 16) + 4 * (128 * 32 + 32)}
CODES = {(0, 0): "e4m3", (1, 1): "int8", (2, 2): "int4", (1, 2): "k8v4"}  # packed_code in cuda/packed_params.hpp
WARPS, STAGES = 4, 3


def staged_row(dim):
    return dim * 2 if dim % 64 == 0 else dim * 2 + 16


def exact_shared(dim):
    """decode_shared_bytes in cuda/params.hpp."""
    return WARPS * STAGES * (16 if dim > 128 else 32) * staged_row(dim)


def prefill_shared(dim):
    """prefill_shared_bytes in cuda/params.hpp."""
    rows, stages = (64, 2) if dim > 128 else (128, 3)
    return (rows + stages * 64) * staged_row(dim) + WARPS * 64


def bits_of(code):
    return 4 if code == 2 else 8


def packed_tokens(k):
    return 2 * 128 // bits_of(k)


def packed_shared(k, v, dim, wide):
    """packed_shared_bytes in cuda/packed_params.hpp."""
    tokens, groups = packed_tokens(k), -(-dim // 32)
    chunks = groups if v == 2 else dim // 16
    pitch = chunks if chunks & (chunks - 1) == 0 else chunks | 1
    of_k = dim * 32 + (2 * tokens if k == 0 else tokens // 32 * 4 * dim)
    of_v = tokens * pitch * 16 + tokens * groups * 4
    stage = -(-max(of_k, of_v, 16 * staged_row(dim)) // 128) * 128
    return WARPS * (2 if dim > 128 else STAGES) * stage + (16 if wide else 8) * staged_row(dim)


class Kernel:
    """What a mangled name says. `kind`: exact, packed, prefill or plain. `tile_bytes`: of codes in a tile of a packed one."""

    def __init__(self, mangled):
        self.tile_bytes = 0
        self.dim = self.wide = self.extras = None
        if m := EXACT.search(mangled):
            form, self.dim, self.wide, self.extras = (int(x) for x in m.groups())
            self.kind, self.format, self.shared = "exact", "bf16" if form else "f16", exact_shared(self.dim)
        elif m := PREFILL.search(mangled):
            form, self.dim, self.extras = (int(x) for x in m.groups())
            self.kind, self.format, self.shared = "prefill", "bf16" if form else "f16", prefill_shared(self.dim)
            self.name = f"prefill {self.format} {self.dim}{' extras' if self.extras else ''}"
            return
        elif m := PACKED.search(mangled):
            k, v, self.dim, self.wide, self.extras = (int(x) for x in m.groups())
            self.kind, self.format, self.shared = "packed", CODES[k, v], packed_shared(k, v, self.dim, self.wide)
            self.tile_bytes = packed_tokens(k) * self.dim * (bits_of(k) + bits_of(v)) // 8
        else:
            m = PLAIN.search(mangled)
            self.kind, self.name = "plain", m.group(1) if m else mangled
            self.shared = PLAIN_SHARED.get(self.name, 0)
            return
        width = "wide" if self.wide else "narrow"
        self.name = f"decode {self.format} {self.dim} {width}{' extras' if self.extras else ''}"
