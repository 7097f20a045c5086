#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants one bug at a time in the CUDA kernels and their host code and asks whether tests/simt notices.

simt_mutants.py BUILD-DIR [--sample N] [--skip N] [--only WORD] [--list]

BUILD-DIR is a build tree in which the simt tests are built. Only the files that a bug changes are compiled again. Without
--sample every bug is planted, and the run fails if fewer than 95 % are caught, or one is that is listed as equivalent.
With --sample N every (number of bugs / N)-th is, and each must be caught.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
D, S, W, M, A, O, H, P = "decode.cuh", "tile_stream.cuh", "warp_tile.cuh", "merge.cuh", "append.cuh", "rope.cuh", "attend.cpp", "append.cpp"
R, RH = "run.cuh", "run.cpp"
X, QF, QS, QT, QD, QH = "softmax_tile.cuh", "packed_fragments.cuh", "packed_stream.cuh", "packed_tile.cuh", "decode_packed.cuh", "packed_host.hpp"
CO, FI, SE, U, UH = "codes.cuh", "fit.cuh", "seal.cuh", "unpack.cuh", "unpack.cpp"
# What has to be compiled again when a file changes, and which test programs know about it.
UNITS = {X: ["decode_f16"], QF: ["decode_int8", "decode_int4"], QS: ["decode_int8", "decode_int4", "decode_e4m3"], QT: ["decode_int8", "decode_int4"], QD: ["decode_int8", "decode_int4"], QH: ["attend"], CO: ["seal_on_machine", "backend"], FI: ["seal_on_machine", "backend"], SE: ["seal_on_machine"], U: ["seal_on_machine"], UH: ["unpack"], R: ["run_on_machine"], RH: ["run"], D: ["decode_f16"], S: ["decode_f16"], W: ["decode_f16"], M: ["backend"], A: ["backend"], O: ["backend", "run_on_machine"], H: ["attend"], P: ["append"],
         "host.hpp": ["attend", "append"], "element.cuh": ["decode_f16", "backend"]}
TESTS = {QF: ["packed"], QS: ["packed"], QT: ["packed"], QD: ["packed"], QH: ["packed"], CO: ["unpack", "append_codes", "seal"], FI: ["fit", "seal"], SE: ["seal"], U: ["unpack"], UH: ["unpack"], R: ["run"], RH: ["run", "seal"], M: ["attend", "append"], A: ["append", "append_codes"],
         O: ["append", "run"], P: ["append", "check", "append_codes"], H: ["attend", "check"], "host.hpp": ["append", "attend", "check"],
         "element.cuh": ["append", "attend"]}

PF, PS, PT = "prefill.cuh", "prefill_stream.cuh", "prefill_tile.cuh"
UNITS |= {PF: ["prefill_f16"], PS: ["prefill_f16"], PT: ["prefill_f16"]}
TESTS |= {D: ["attend", "prefill"], PF: ["prefill"], PS: ["prefill"], PT: ["prefill"], M: [*TESTS[M], "prefill"], H: [*TESTS[H], "prefill"]}

# file, what it breaks, the text, what stands there instead; a fifth entry says why tests cannot notice.
MUTANTS = [
    # Waits and barriers.
    (D, "no wait before the scores", "    cp_async_wait<Stages - 1>();\n    warp_barrier();\n    t.multiply_keys", "    warp_barrier();\n    t.multiply_keys"),
    (D, "wait before the scores too weak", "    cp_async_wait<Stages - 1>();\n    warp_barrier();\n    t.multiply_keys", "    cp_async_wait<3>();\n    warp_barrier();\n    t.multiply_keys"),
    (D, "no wait before the values", "    cp_async_wait<Stages - 1>();\n    warp_barrier();\n    t.multiply_values", "    warp_barrier();\n    t.multiply_values"),
    (D, "wait before the values too weak", "    cp_async_wait<Stages - 1>();\n    warp_barrier();\n    t.multiply_values", "    cp_async_wait<3>();\n    warp_barrier();\n    t.multiply_values"),
    (D, "no barrier between wait and scores", "    cp_async_wait<Stages - 1>();\n    warp_barrier();\n    t.multiply_keys", "    cp_async_wait<Stages - 1>();\n    t.multiply_keys",
     "ldmatrix and mma already make the warp meet; the barrier is what CUDA's memory model asks for"),
    (D, "no barrier between wait and values", "    cp_async_wait<Stages - 1>();\n    warp_barrier();\n    t.multiply_values", "    cp_async_wait<Stages - 1>();\n    t.multiply_values",
     "as above: movmatrix meets first in the narrow kernels, ldmatrix in the wide ones"),
    (D, "copies left behind", "  cp_async_wait<0>();\n}", "}"),
    (D, "no barrier after the queries", "    block_barrier();\n    t.start(queries, lane);", "    t.start(queries, lane);"),
    (D, "no barrier before the queries' stage is reused", "  block_barrier();  // the stage is free\n", ""),
    (D, "no barrier before stages are reused", "  block_barrier();  // all stages are free\n", ""),
    (D, "no barrier before states are joined", "  block_barrier();\n  for (int32_t i = static_cast<int32_t>(thread_index()); i < Tile::rows", "  for (int32_t i = static_cast<int32_t>(thread_index()); i < Tile::rows"),
    (D, "a barrier that half the threads reach", "  block_barrier();  // all stages", "  if (warp < 2) block_barrier();  // all stages"),
    (M, "no barrier before lse2 is overwritten", "  block_barrier();  // out", "  // out"),
    # Stages.
    (D, "stale stage for K", "      stage_a = stage_c;\n", "      stage_a = stage_a;\n"),
    (D, "values from the stage of keys", "t.multiply_values(stage_b)", "t.multiply_values(stage_c)"),
    (D, "V of the wrong tile", "stream.copy(Stages == 3 ? stream.v : stream.k, next, stage_a);", "stream.copy(Stages == 3 ? stream.v : stream.k, at_first, stage_a);"),
    (D, "K copied where V belongs", "  stream.copy(stream.v, at_first, stage_b);", "  stream.copy(stream.k, at_first, stage_b);"),
    (D, "warps share stages", "arena + warp * (Stages", "arena + warp / 2 * (Stages"),
    (D, "stages too close", "stage_b = stage0 + Stage, stage_c", "stage_b = stage0 + Stage / 2, stage_c"),
    # Lengths, tables, tiles.
    (D, "length not cut to the table", "  if (a.length > room) a.length = static_cast<int32_t>(room);\n", ""),
    (D, "length not cut to the plan", "most(least(len, p.max_kv), 0)", "most(len, 0)"),
    (D, "negative length", "most(least(len, p.max_kv), 0)", "least(len, p.max_kv)",
     "a negative length has no tile either; the clamp is there for the reader"),
    (D, "length of another head", "a.sequence * p.kv_len_stride + a.head * p.kv_len_head_stride", "a.sequence * p.kv_len_stride"),
    (D, "last tile dropped", "a.last = (a.length + tokens - 1) / tokens;", "a.last = a.length / tokens;"),
    (S, "one token too many", "token < length ? table", "token <= length ? table"),
    (S, "one token too few", "token < length ? table", "token + 1 < length ? table"),
    (S, "table read past the split", "return tile < last && token < length ?", "return token < length + 512 ?"),
    (S, "ids of the pool's end taken", "static_cast<uint32_t>(id) < static_cast<uint32_t>(blocks)", "static_cast<uint32_t>(id) <= static_cast<uint32_t>(blocks) * 1000u"),
    (S, "absent blocks attended as block 0", "t.present = warp_ballot(good) & all_present;", "t.present = all_present; (void)warp_ballot(good);"),
    (S, "no zero-fill of tokens that are not there", "cp_async16(at, source, (t.present >> (row + lane / chunks) & 1u) != 0);", "cp_async16(at, source, true);"),
    (S, "no zero-fill in small blocks", "p, (t.present >> row & 1u) != 0);", "p, true);"),
    (S, "zero-fill of the wrong row", "(t.present >> (row + lane / chunks) & 1u)", "(t.present >> row & 1u)"),
    (D, "split reads its neighbour's first tile", "  a.last = least(a.first + each, a.last);", "  a.last = least(a.first + each + 1, a.last);"),
    (D, "split borders overlap when fixed", "    if (to < a.last) a.last = static_cast<int32_t>(to);\n", "    if (to < a.last) a.last = static_cast<int32_t>(to) + 1;\n"),
    # Masks.
    (D, "causal off by one", "if (p.causal != 0 && behind < 0)", "if (p.causal != 0 && behind <= 0)"),
    (D, "causal sees the next key", "if (p.causal != 0 && behind < 0)", "if (p.causal != 0 && behind < -1)"),
    (D, "window off by one", "behind >= p.window) seen", "behind > p.window) seen"),
    (D, "window forgets the query's token", "behind >= p.window) seen", "behind >= p.window - 1) seen"),
    (D, "window starts a tile late", "a.first = static_cast<int32_t>(lowest / tokens);", "a.first = static_cast<int32_t>(lowest / tokens) + 1;"),
    (D, "whole tiles counted from the last row", "least(a.hot_last, most(low + 1, 0) / tokens)", "least(a.hot_last, most(high + 1, 0) / tokens)"),
    (D, "whole tiles of a window from the first row", "static_cast<int64_t>(high) - p.window;", "static_cast<int64_t>(low) - p.window;"),
    (D, "position of the wrong row", "least(packed / p.group, a.rows - 1)", "least(packed % p.group, a.rows - 1)"),
    (D, "key positions of head 0", " + a.head * p.k_pos_head_stride + slot", " + slot"),
    (D, "mask of the other half", "Tile::token_of(n, i, lane);", "Tile::token_of(n, i ^ 2, lane);"),
    # Softmax.
    (X, "sum not rescaled", "      sum[r] *= scale;\n", ""),
    (X, "output not rescaled", "if (state_of(i) == r) out[n][i] *= scale;", "if (state_of(i) != r) out[n][i] *= 1.0f;"),
    (X, "reference falls", "const float lower = wanted < minus_top[r] ? wanted : minus_top[r];", "const float lower = wanted;"),
    (X, "maximum over half the lanes", "for (uint32_t x = first_lane_bit; x <= last_lane_bit; x *= 2) {", "for (uint32_t x = first_lane_bit; x < last_lane_bit; x *= 2) {"),
    (X, "sum over half the lanes", "for (uint32_t x = first_lane_bit; x <= last_lane_bit; x *= 2) v +=", "for (uint32_t x = first_lane_bit; x < last_lane_bit; x *= 2) v +="),
    (X, "reference never lifted", "> float(LiftAbove))", "> 1e30f)"),
    (X, "exponents not computed again", "      lift(factor);\n      exponents(e, factor);", "      lift(factor);"),
    (X, "cap without its factor", "return cap_log2 * (y < 0 ? -t : t);", "return cap_log2 * t;"),
    # Layout.
    (W, "swizzle dropped", "const uint32_t at = Dim % 64 == 0 ? chunk ^ (row & 7u) : chunk;", "const uint32_t at = Dim % 64 == 0 ? chunk ^ (row & 3u) : chunk;"),
    (S, "swizzle dropped on the copy", "(to ^ ((row & 7u) << 4))", "(to ^ ((row & 3u) << 4))"),
    (W, "V fragment rows swapped", "ldmatrix4_transposed(v, at + h * 16", "ldmatrix4_transposed(v, at + (halves - 1 - h) * 16"),
    (W, "V not transposed", "ldmatrix4_transposed(v,", "ldmatrix4(v,"),
    (W, "weights not transposed", "movmatrix(pack2<Kind>(score[h][0], score[h][1]))", "pack2<Kind>(score[h][0], score[h][1])"),
    (D, "query head of the wrong group", "const int32_t q_head = a.head * p.group + packed % p.group;\n      const char* row", "const int32_t q_head = a.head + packed % p.group;\n      const char* row"),
    (D, "query row and head swapped", "a.first_row + packed / p.group, q_head);", "a.first_row + packed % p.group, q_head);"),
    (S, "32-bit offset of a block", "static_cast<uint64_t>(t.run_block[h]) * block_stride", "static_cast<uint64_t>(t.run_block[h] * block_stride)"),
    (S, "block stride cut to 32 bits", "block * from.block_stride +", "block * static_cast<uint32_t>(from.block_stride) +"),
    (S, "token stride taken from the shape", "const auto token_stride = static_cast<uint32_t>(from.token_stride);", "const auto token_stride = static_cast<uint32_t>(Dim * 2);"),
    (S, "place in the block forgotten", "static_cast<uint64_t>(inside(t, h * 16)) * token_stride", "0"),
    (S, "head stride of K for V", "v = view(p.v, head);", "v = view({p.v.data, p.v.block_stride, p.k.head_stride / 2, p.v.token_stride}, head);"),
    # Results.
    (D, "wrong base of the log-sum-exp", "fast_log2(sum) - lowest", "fast_log2(sum) * 0.693147f - lowest"),
    (D, "sink counted twice", "const joined j = join(lse, sink);", "const joined j = join(join(lse, sink).top, sink);"),
    (D, "sink dropped", "  const joined j = join(lse, sink);", "  const joined j = join(lse, minus_infinity());"),
    (D, "sink in the wrong base", "p.sink_logit[q_head] * 1.44269504088896341f", "p.sink_logit[q_head]"),
    (D, "output stride from the shape", "store_value(row_of(p.out, row, q_head)", "store_value(p.out.data + (row * p.kv_heads * p.group + q_head) * Dim * 4"),
    (D, "partial state of the wrong split", " * p.splits + a.split;", " * p.splits + (p.splits - 1 - a.split) / 2 * 2;"),
    (D, "score written for the wrong key", "                  slot] = s;", "                  slot / 2] = s;"),
    (M, "sink counted per part", "      sum += weight;\n", "      sum += weight + (sink > minus_infinity() ? fast_exp2(sink - top) : 0.0f);\n"),
    (M, "sink dropped", "float top = sink;", "float top = minus_infinity();"),
    (M, "empty part read", "    if (part.lse2 == minus_infinity()) continue;  // its values may be anything\n", ""),
    (M, "all parts empty", "const bool none = top == minus_infinity();", "const bool none = false;"),
    (M, "rows past the sequence written", "    if (to >= end) return;\n", ""),
    (M, "wrong base", "fast_log2(sum) + top", "fast_log2(sum) * 0.693147f + top"),
    # Append and rotation.
    (A, "slot -1 written", "if (slot < 0 || to.data == nullptr) return;", "if (to.data == nullptr) return;"),
    (A, "slots past the pool written", "slot >= 0 && slot < to.slots ? slot", "slot >= 0 ? slot"),
    (A, "slot of head 0 for all", "to.slot[row * p.slot_stride + head * p.slot_head_stride]", "to.slot[row * p.slot_stride]"),
    (A, "32-bit slot", "const int64_t block = slot >> shift, inside =", "const int64_t block = static_cast<int32_t>(slot) >> shift, inside ="),
    (A, "Hadamard rotation without its barrier", "    warp_barrier();\n    for (int32_t pair = x.lane; pair", "    for (int32_t pair = x.lane; pair"),
    (A, "Hadamard rotation with differences turned round", "add_rn(a, -b)", "add_rn(b, -a)"),
    (A, "Hadamard rotation scaled between lanes", "  warp_barrier();\n  for (int32_t d = x.lane; d < x.dim; d += 32) x.set", "  for (int32_t d = x.lane; d < x.dim; d += 32) x.set"),
    (P, "open slots counted in sealed blocks", "a.open_slot, kv.open_blocks,", "a.open_slot, kv.blocks,"),
    (P, "Hadamard rotation of V asked of K", "if ((kv.hadamard & KVC_HADAMARD_V) != 0)", "if ((kv.hadamard & KVC_HADAMARD_K) != 0)"),
    (O, "pairs swapped", "const int32_t partner = half ?", "const int32_t partner = !half ?"),
    (O, "turned backwards", "if (second) return add_rn(mul_rn(other, a.s), mul_rn(own, a.c));", "if (second) return add_rn(-mul_rn(other, a.s), mul_rn(own, a.c));"),
    (O, "table read past its end", "position < r.table_positions", "position <= r.table_positions + 4096"),
    (O, "angle rounded down", "(turn + 0x80000000u) >> 32", "turn >> 40 << 8"),
    (A, "channels past the rotated ones lost", "  const int32_t rest = p.dim - 2 * pairs;", "  const int32_t rest = 0;"),
    # Command list.
    (R, "tokens of another command", "p.command[b / static_cast<uint32_t>(p.n_layers)];\n  const plane_view& from", "p.command[0];\n  const plane_view& from"),
    (R, "values of every head from head 0", "char* target = cell_of(to, c.dst, head);", "char* target = cell_of(to, c.dst, 0);"),
    (R, "cleared blocks copied", "if (p.zero == 0) w =", "w ="),
    (R, "no barrier between reading and writing", "    block_barrier();\n    KVCACHE_UNROLL\n    for (int32_t k = 0; k < at_once; ++k) {\n      const int32_t i = first + k * threads_of_block + static_cast<int32_t>(thread_index());\n      if (!there[k]) continue;\n      const int32_t t", "    KVCACHE_UNROLL\n    for (int32_t k = 0; k < at_once; ++k) {\n      const int32_t i = first + k * threads_of_block + static_cast<int32_t>(thread_index());\n      if (!there[k]) continue;\n      const int32_t t"),
    (R, "keep-list of head 0", " + head * p.kept_head_stride", ""),
    (R, "keep-list of the first layer", " + number * p.kept_layer_stride", ""),
    (R, "kept slots not bounded", "slot >= 0 && slot >> p.block_shift < p.n_src", "slot >= 0"),
    (R, "targets read as sources", "p.id[p.n_src + (t >> p.block_shift)]", "p.id[t >> p.block_shift]"),
    (R, "whole block turned", "i < c.tokens * pairs", "i < (c.tokens + 1) * pairs"),
    (RH, "stages out of order", "return c.stage > stage;", "return c.stage < stage;"),
    (RH, "keep-lists counted from the group's first layer", "keep.slots + l * keep.layer_stride", "keep.slots"),
    (RH, "open blocks mistaken for sealed", "to_open = open;\n  return {", "to_open = false;\n  return {"),
    (RH, "first layers only", "    p.n_commands = 0;\n    for", "    if (l > 100) break;\n    p.n_commands = 0;\n    for"),
    (RH, "self-overwriting gather taken", "std::find(g.src + i + 1, g.src + n_src, g.dst[i]) != g.src + n_src", "false"),
    # Codes: sealing, copying, unpacking, rows stored as codes.
    (SE, "codes: no wait after staging", "cp_async_wait<0>();", "cp_async_wait<1>();"),
    (SE, "codes: no barrier after staging", "  cp_async_wait<0>();\n  block_barrier();\n", "  cp_async_wait<0>();\n"),
    (SE, "codes: no barrier between levels and codes", "  block_barrier();\n  write_levels", "  write_levels"),
    (SE, "codes: no barrier between limits and their use", "  block_barrier();\n  for (uint32_t h = 0;", "  for (uint32_t h = 0;"),
    (SE, "codes: no barrier between errors and the choice", "    block_barrier();\n    int32_t chosen", "    int32_t chosen"),
    (SE, "codes: last group lost", "if (lane == 0 && 2 * pair + half < n) s.set", "if (lane == 0 && 2 * pair + half < n - 1) s.set"),
    (SE, "codes: exempt slots skipped in every group", "least(most(s.exempt - first, 0), size)", "least(s.exempt, size)"),
    (SE, "codes: groups in the order of the other side", "channels == f.keys", "channels != f.keys"),
    (SE, "codes: last group of a slot too long", "const int32_t size = least(f.group, (channels ? f.tokens : f.dim) - first);", "const int32_t size = f.group;"),
    (SE, "codes: scale of a tensor from one head", "tensor ? 0 : t.head, tensor ? p.kv_heads : t.head + 1", "t.head, t.head + 1"),
    (SE, "codes: exempt slots in the limits of a head", "for (int32_t i = s.exempt * s.form.dim + thread;", "for (int32_t i = thread;"),
    (SE, "codes: exempt slots get codes", "      if (token < s.exempt) return 0u;\n", ""),
    (SE, "codes: scale of a neighbour", "g = grid_of(f, s.levels_at(index));", "g = grid_of(f, s.levels_at(index ^ 1));"),
    (SE, "codes: levels of the first value kept", "channel); index != held) {", "channel); held < 0) {"),
    (SE, "codes: rows at the shape's stride", "store_word(to + row * row_stride + w * 4", "store_word(to + row * words * 4 + w * 4"),
    (SE, "codes: slots of an exact side past the command's", "to.row_stride, c.tokens, dim);", "to.row_stride, p.block, dim);"),
    (SE, "codes: minima not copied", "  copy_rows(plane.zero + source, 0, plane.zero + target, 0, 1, f.scales() * 2);\n", ""),
    (SE, "codes: scales copied from head 0", "const int64_t source = scale_offset(plane, c.src, t.head)", "const int64_t source = scale_offset(plane, c.src, 0)"),
    (SE, "codes: only the first layer sealed", "t.layer = b % layers;", "t.layer = 0;"),
    (FI, "codes: minimum rounded up", "(widen<half_kind::f16>(near) > v ? 1 : 0)", "(widen<half_kind::f16>(near) < v ? 1 : 0)"),
    (FI, "codes: scale not raised to reach the largest", "  while (falls_short(zero, out.scale, most, r.largest)) out.scale = half_at(half_order(out.scale) + 1);\n", ""),
    (FI, "codes: symmetric scale not raised", "  while (falls_short(0.0f, out.scale, most, reach)) out.scale = half_at(half_order(out.scale) + 1);\n", "",
     "needed only where a quotient underflows, which no f16 or bf16 is small enough for"),
    (FI, "codes: errors folded in another order", "for (uint32_t x = group_lanes / 2; x > 0; x /= 2) sum", "for (uint32_t x = 1; x < group_lanes; x *= 2) sum"),
    (FI, "codes: search takes the last of equals", "if (!(error < least_error)) continue;", "if (error > least_error) continue;"),
    (FI, "codes: two ends tried in another order", "const int32_t low = rest + (sum > 3 ? sum - 3 : 0);", "const int32_t low = (sum < 3 ? sum : 3) - rest;"),
    (FI, "codes: a search over a constant group", "return whole.scale == 0 ? whole : best;", "return best;",
     "a group of one value has no range to shrink: every candidate is the whole one"),
    (FI, "codes: small floats scaled below their least", "scale > 0x1p-14f ? scale : 0x1p-14f", "scale"),
    (CO, "codes: NaN packed as the largest", "  if (x != x) return 0.0f;\n", ""),
    (CO, "codes: small floats rounded up at ties", "(1u << (drop - 1u)) - 1u + ((moved >> drop) & 1u)", "(1u << (drop - 1u))"),
    (CO, "codes: parts of a word swapped", "8 * byte + field * part.width;", "8 * byte + (8 / part.width - 1 - field) * part.width;"),
    (CO, "codes: rows filled up with what lies behind", "if (i < columns) word |=", "word |="),
    (CO, "codes: symmetric codes rounded twice", "round_to_code(fused(x, g.inverse, mul_rn(0.5f, most)), most)", "round_to_code(add_rn(mul_rn(x, g.inverse), mul_rn(0.5f, most)), most)"),
    (CO, "codes: minimum subtracted after scaling", "mul_rn(add_rn(x, -g.zero), g.inverse)", "fused(x, g.inverse, -mul_rn(g.zero, g.inverse))"),
    (CO, "codes: block offset cut to 32 bits", "p.data + block * p.block_stride", "p.data + static_cast<int32_t>(block * p.block_stride)"),
    (CO, "codes: scale offset cut to 32 bits", "return block * p.scale_block_stride +", "return static_cast<int32_t>(block * p.scale_block_stride) +"),
    (CO, "codes: parts of a code joined at the wrong bit", "low += width;", "low += width / 2;"),
    (U, "codes: id at the pool's end read", "id >= p.blocks", "id > p.blocks"),
    (U, "codes: minimum of the scale", "load<uint16_t>(plane.zero + at)", "load<uint16_t>(plane.scale + at)"),
    (UH, "codes: stride of values for keys", "p.to_k_stride = k_stride;", "p.to_k_stride = v_stride;"),
    (A, "codes: levels read before they are there", "  }\n  warp_barrier();\n}\n\n/// The row as codes", "  }\n}\n\n/// The row as codes"),
    (A, "codes: rows not rounded as open blocks round them", "return packable(type == KVC_F16 ? widen", "if (type >= 0) return packable(v);\n    return packable(type == KVC_F16 ? widen"),
    (A, "codes: scale of slot 0", "f.scale_index(inside, first)", "f.scale_index(0, first)"),
    (A, "codes: row overwritten while it is read", "    warp_barrier();  // the row is free\n", ""),
    (P, "codes: keys that share bytes taken row by row", "(!keys || p.type <= KVC_U8)", "(keys || !keys)"),
    (RH, "codes: cleared slot by slot", "if (codes && c.op != KVC_OP_SEAL && c.op != KVC_OP_COPY)", "if (codes && c.op > KVC_OP_GATHER)"),
    (RH, "codes: sealed blocks gathered", "(op == KVC_OP_GATHER && packs(kv))", "(op > KVC_OP_GATHER && packs(kv))"),
    (RH, "codes: shared memory for keys alone", "seal_bytes_of(kv.v, kv.block, kv.dim_v)", "0"),
    # Chunks.
    (PF, "no barrier before the keys of a chunk", "    block_barrier();  // K is there; the last V was used\n", ""),
    (PF, "no barrier before the values of a chunk", "    block_barrier();  // V is there; K was used\n", ""),
    (PF, "no wait before the keys of a chunk", "    cp_async_wait<ahead - 1>();\n    block_barrier();  // K", "    block_barrier();  // K"),
    (PF, "wait for the values of a chunk too weak", "    cp_async_wait<ahead - 1>();\n    block_barrier();  // V", "    cp_async_wait<ahead>();\n    block_barrier();  // V"),
    (PF, "copies of a chunk left behind", "  cp_async_wait<0>();\n}", "}"),
    (PF, "stages do not turn", "    if constexpr (ahead == 2) stages.turn();\n", ""),
    (PS, "next keys over the values", "copy(runs.k, tile + 1, ids, stages.c());", "copy(runs.k, tile + 1, ids, stages.b());"),
    (PS, "runs of a tile swapped", "stage + warp * (16 * staged_row(Dim))", "stage + (warp ^ 1u) * (16 * staged_row(Dim))"),
    (PS, "ids of the first half for all", "warp < 2 ? ids.id[0] : ids.id[1]", "warp < 4 ? ids.id[0] : ids.id[1]"),
    (PS, "ids of the tile before", "if constexpr (deep) ids = fetch(p, notes, tile + 2);", "if constexpr (deep) ids = fetch(p, notes, tile + 1);"),
    (PS, "presence of the first tile for all", "    notes.write_present(present(ids));\n    if constexpr (deep)", "    if constexpr (deep)"),
    (PS, "tokens past a chunk's length read", "has(tile) && token < length ? table", "has(tile) && token < length + 16 ? table"),
    (PS, "ids past the pool present", "static_cast<uint32_t>(ids.id[1]) < pool", "static_cast<uint32_t>(ids.id[1]) <= pool * 1000u"),
    (PS, "last tile of a warp passed over", "return word(0) <= tile && tile < word(1);", "return word(0) <= tile && tile + 1 < word(1);"),
    (PS, "a tile too many not masked", "return word(2) <= tile && tile < word(3);", "return word(2) <= tile && tile <= word(3);"),
    (PS, "queries of head 0 in a chunk", "a.head * p.group + packed % p.group);\n  if (plain)", "packed % p.group);\n  if (plain)"),
    (PS, "queries on any address copied whole", "& 15u) == 0", "& 1u) == 0"),
    (PT, "far steps of a row misplaced", "(pairs >> 2) * 128", "(pairs >> 2) * 64"),
    (PT, "second band with the first's queries", "ldmatrix4(a[m], at + m * 16 * staged_row(Dim))", "ldmatrix4(a[m], at)"),
    (PT, "sums of both rows together", "sum[i / 2] += score[n][i];", "sum[0] += score[n][i];"),
    (PT, "reference lifted for half the rows", "top[i / 2] = larger(score[n][i], top[i / 2]);", "top[0] = larger(score[n][i], top[0]);"),
    (PF, "causal chunk sees the next key", "p.causal != 0 ? at : INT32_MAX", "p.causal != 0 ? most(at, at + 1) : INT32_MAX"),
    (PF, "window of a chunk a key short", "static_cast<int64_t>(at) - p.window + 1;", "static_cast<int64_t>(at) - p.window + 2;"),
    (PF, "mask of the neighbour's tokens", "seen >> (lane % 4 * 2)", "seen >> (lane % 2 * 2)"),
    (PF, "absent keys of a chunk seen", "by_slot ? present & tokens_between(tile, range)", "by_slot ? tokens_between(tile, range)"),
    (PF, "key positions of the first tile for all", "static_cast<int64_t>(tile) * prefill_tokens);", "0);"),
    (PF, "scores of a chunk not scaled", "      s *= p.scale_log2;\n", ""),
    (PF, "scores of a chunk written past its length", "if (slot + n * 8 + i < mine.length) to", "if (slot + n * 8 + i < mine.length + 8) to"),
    (PF, "lowest position of the first rows only", "      low = least(low, at);\n", ""),
    (PF, "positions of half the lanes", "for (uint32_t x = 1; x < 32; x *= 2)", "for (uint32_t x = 1; x < 16; x *= 2)"),
    (PF, "warps share rows", "a.first_packed += static_cast<int32_t>(warp) * Tile::rows;", "a.first_packed += static_cast<int32_t>(warp / 2) * Tile::rows;"),
    (PF, "sink of a chunk dropped", "const joined j = join(lse, sink);", "const joined j = join(lse, minus_infinity());"),
    (PF, "wrong base of a chunk's log-sum-exp", "fast_log2(band.sum[r]) - band.minus_top[r]", "fast_log2(band.sum[r]) * 0.693147f - band.minus_top[r]"),
    (PF, "sequences that neither kernel takes", "a.rows <= p.few_rows ||", "a.rows <= p.few_rows + 1 ||"),
    (D, "a sink rounded otherwise than in the merge", "total > 0 ? value * j.a / total : 0.0f", "total > 0 ? value * (j.a / total) : 0.0f"),
    (M, "chunks overwritten by partial states", "    if (p.only_short != 0 && end - first > p.max_q) return;\n", ""),
    (H, "kernel chosen by the batch", "(fixed || 2 * prefill_blocks", "(2 * prefill_blocks"),
    (H, "tile chosen by the bound on rows", "const bool wide = fixed ||", "const bool wide ="),
    (H, "prefill without rows' starts", "if (p.few_rows == 0 || p.q_start == nullptr) return 0;", "if (p.few_rows == 0) return 0;",
     "one row a sequence is decode's in any case: the blocks that this saves would end at once"),
    # Packed blocks.
    (QD, "packed: no wait before the scores", "    cp_async_wait<Stages - 1>();\n    warp_barrier();\n    t.multiply_keys", "    warp_barrier();\n    t.multiply_keys"),
    (QD, "packed: wait before the values too weak", "    cp_async_wait<Stages - 1>();\n    warp_barrier();\n    if (!full)", "    cp_async_wait<Stages>();\n    warp_barrier();\n    if (!full)"),
    (QD, "packed: no barrier after the queries", "  block_barrier();\n  t.start(queries, lane);\n  located next", "  t.start(queries, lane);\n  located next"),
    (QD, "packed: tail not cleared", "    if (!full) {\n      stream.clear_tail", "    if (false) {\n      stream.clear_tail"),
    (QD, "packed: the tile before", "    now = next;\n", ""),
    (QD, "packed: V with two stages from the wrong place", "if constexpr (Stages == 2) stream.copy_values(next, stage_b);", "if constexpr (Stages == 2) stream.copy_values(next, stage_a);"),
    (QD, "packed: one slot more is packed", "slot < exempt || slot >= row[state]", "slot < exempt || slot > row[state]"),
    (QD, "packed: exempt slots read packed", "slot < exempt || slot >= row[state]", "slot >= row[state]"),
    (QD, "packed: one slot less is open", "slot < exempt || slot < row[state]", "slot < exempt || slot <= row[state]"),
    (QD, "packed: exempt slots read open", "slot < exempt || slot < row[state]", "slot < row[state]"),
    (QD, "packed: border of another row", "least(packed / p.at.group, a.rows - 1);\n  return most", "least(packed, a.rows - 1);\n  return most"),
    (QD, "packed: sealed not cut to the length", "most(least(p.sealed[a.sequence], sealed), 0)", "most(p.sealed[a.sequence], 0)"),
    (QD, "packed: rows taken for whole above the lowest border", "least(sealed.hot_last, low / sealed_tile::tokens)", "least(sealed.hot_last, high / sealed_tile::tokens)"),
    (QD, "packed: open tiles from the highest border", "open.first = most(open.first, low / open_tokens)", "open.first = most(open.first, high / open_tokens)"),
    (QD, "packed: open tiles taken for whole from the lowest border", "(most(high, own.exempt) + open_tokens - 1)", "(most(low, own.exempt) + open_tokens - 1)"),
    (QD, "packed: exempt slots in every split", "if (a.first == 0 && a.first < a.last && own.exempt > 0)", "if (a.first < a.last && own.exempt > 0)",
     "the ranges of later splits begin behind the only tile of the exempt slots"),
    (QD, "packed: exempt id not checked", "id < static_cast<uint32_t>(p.exempt.blocks) ? least", "id != ~0u ? least"),
    (QD, "packed: sums not handed over", "    to.sum[r] = from.sum[r];\n", ""),
    (QD, "packed: no barrier before the state is read back", "  from.store_sums(stage, pitch, p);\n  warp_barrier();", "  from.store_sums(stage, pitch, p);"),
    (QD, "packed: no barrier before open stages", "    hand_over<Dim>(s, t, p, arena + warp * (steps * stage), lane);\n    block_barrier();", "    hand_over<Dim>(s, t, p, arena + warp * (steps * stage), lane);"),
    (QD, "packed: results not turned back", "if ((p.hadamard & KVC_HADAMARD_V) != 0) return", "if (p.hadamard > 3) return"),
    (QD, "packed: queries turned without the factor", "scale = step == 1 ? norm : 1.0f", "scale = step == 0 ? norm : 1.0f"),
    (QD, "packed: bf16 open blocks taken for f16", "t.planes_bf16 = p.exact_bf16 != 0;", "t.planes_bf16 = false;"),
    (QD, "packed: seldom a barrier between Hadamard's steps", "  for (int32_t step = 1; step < Dim; step *= 2) {\n    block_barrier();", "  block_barrier();\n  for (int32_t step = 1; step < Dim; step *= 2) {"),
    (QT, "packed: minima of K forgotten", "k_parts::unit(high_of(n, i)), z);", "k_parts::unit(high_of(n, i)), 0.0f * z);"),
    (QT, "packed: scales of the first run for both", "(Runs == 2 ? unit : 0) * 4 * Dim", "0 * 4 * Dim"),
    (QT, "packed: minima where scales are", "ld_shared2(at + 2 * Dim, z[0], z[1]);", "ld_shared2(at, z[0], z[1]);"),
    (QT, "packed: always the first group's scales", "weigh_group(stage, p, piece, group++, w)", "weigh_group(stage, p, piece, group, w)"),
    (QT, "packed: one group's weights for all", "if (piece == 0 || (p.group_starts >> piece & 1u) != 0)", "if (piece == 0 || p.group_starts == 0)"),
    (QT, "packed: minima of V of one lane", "base::over_lanes(more[r][piece])", "more[r][piece]"),
    (QT, "packed: minima of V of the wrong rows", "zero[r]);\n        if (channel", "zero[1 - r]);\n        if (channel"),
    (QT, "packed: slots of K in another order", "column_at<bits_of(K)>(n, i >> 1, lane / 4)", "column_at<bits_of(V)>(n, 1 - (i >> 1), lane / 4)"),
    (QT, "packed: channels past the last written", "if (channel < Dim) st_shared", "st_shared"),
    (QS, "packed: units not told apart in the banks", "((row ^ (unit << 2)) << 4)", "(row << 4)"),
    (QS, "packed: a tile is there if its second unit is", "return (t.good >> run & 1u) != 0;", "return (t.good >> 1 & 1u) != 0;"),
    (QS, "packed: rows past the end read", "copy<Full>(at, base[run] + far(static_cast<int32_t>(token % 32), row_stride),\n                 readable(t, run) && slot < end);", "copy<Full>(at, base[run] + far(static_cast<int32_t>(token % 32), row_stride), readable(t, run));"),
    (QS, "packed: ids not checked", "static_cast<uint32_t>(id) < static_cast<uint32_t>(blocks)", "id >= 0"),
    (QS, "packed: table read past the end", "tile < last && slot < end ?", "tile < last ?"),
    (QS, "packed: offsets of 32 bits", "return static_cast<uint64_t>(static_cast<uint32_t>(id)) * stride;", "return static_cast<uint32_t>(id) * stride;"),
    (QS, "packed: scales for minima of K", "(y < per_array ? k.scale : k.zero)", "(y < per_array ? k.scale : k.scale)"),
    (QS, "packed: scales for minima of V", "anew((lane < 16 || v.zero == nullptr ? v.scale : v.zero)", "anew((lane < 16 || v.zero == nullptr ? v.scale : v.scale)"),
    (QS, "packed: slots past the end counted", "left > 0 ? there & ((bits{1} << left) - 1) : 0", "there",
     "no row's border lies behind the end, and slots behind its border are masked"),
    (QS, "packed: rows taken for dense", "dense = v.row_stride == chunks * 16;", "dense = true;"),
    (QF, "packed: units of the upper half", "high != 0 ? 0x1p20f : 0x1p24f", "high != 0 ? 0x1p24f : 0x1p24f"),
    (QF, "packed: the lower bytes twice", "pick_bytes(codes, 0, 0x4341)", "pick_bytes(codes, 0, 0x4240)"),
    (QF, "packed: the lower codes twice", "part == 0 ? codes : codes >> 8", "part == 0 ? codes : codes >> 0"),
    (QF, "packed: codes 4 on in another order", "2 * i + part % 2 + 16 * high", "2 * i + high + 16 * (part % 2)"),
    (QH, "packed: symmetric codes about 8", "-7.5f : -127.5f", "-8.0f : -128.0f"),
    (QH, "packed: groups of the wrong size", "p.group_starts |= 1u << (d / 32)", "p.group_starts |= 1u << (d / 64)"),
    (QH, "packed: exempt table forgotten", "b.exempt_table != nullptr && kv.exempt > 0", "b.exempt_table == nullptr && kv.exempt > 0"),
    (QH, "packed: the sealed table's stride for the open one", "b.open_stride != 0 ? b.open_stride : b.table_columns", "0 * b.open_stride"),
    (QH, "packed: any group of K", "if (p.scale_group != kv.block) return", "if (p.scale_group > kv.block) return"),
    # Host code.
    (H, "workspace one byte short", "return static_cast<size_t>(partial_bytes_o(p) + partial_rows(p) * p.splits * 4);", "return static_cast<size_t>(partial_bytes_o(p) + partial_rows(p) * p.splits * 4 - 4);"),
    (H, "sink forgotten in the merge", "  m.sink_logit = d.sink_logit;\n", ""),
    (H, "wide strides copied by the narrow path", "kv.block >= 16 && narrow_strides(kv.k) && narrow_strides(kv.v)", "kv.block >= 16"),
    (H, "small blocks copied in runs", "kv.block >= 16 && narrow", "kv.block >= 8 && narrow"),
    (H, "negative scales in the plain kernel", " || !(p.scale_log2 > 0);", ";"),
    (H, "natural scale", "s.scale * log2_e);", "s.scale);"),
    (H, "workspace not checked", "workspace.bytes < workspace_needed(*plan) ||", "false ||"),
    ("host.hpp", "frequency in radians", "frequency / 6.283185307179586476925", "frequency / 3.14159265358979"),
    ("host.hpp", "misaligned planes taken", "if (s % 16 != 0)", "if (s % 2 != 0)"),
    (P, "results of the wrong stride", "parts[i].row_stride,", "parts[0].row_stride,"),
]


def commands(build):
    """Compile command of each file of the simt library, and link command of each test."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if "kvcache_cuda_on_simt" in entry["command"]:
            found[pathlib.Path(entry["file"]).stem] = (entry["command"], entry["directory"], entry["file"])
    return found


class Bench:
    """A copy of cuda/ in which one file at a time is changed."""

    def __init__(self, build, jobs):
        self.build, self.commands = build, commands(build)
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="simt-mutants-"))
        self.jobs = jobs
        self.original = {p.name: p.read_text() for p in (ROOT / "cuda").iterdir() if p.is_file()}

    def compile(self, unit, tree, name):
        command, cwd, file = self.commands[unit]
        command = command.replace(str(ROOT / "cuda"), str(tree / "cuda"))
        source = file.replace(str(ROOT / "cuda"), str(tree / "cuda"))
        words = [w for w in shlex.split(command.replace(file, source)) if w not in ("-Werror",) and not w.endswith("ccache")]
        words = ["-O1" if w in ("-O2", "-O3") else w for w in words]
        words[words.index("-o") + 1] = str(tree / f"{name}.o")
        for flag in ("-MD", "-MT", "-MF"):
            if flag in words:
                i = words.index(flag)
                del words[i:i + (1 if flag == "-MD" else 2)]
        done = subprocess.run(words + ["-w"], cwd=cwd, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{name}: the mutant does not compile\n{done.stderr[-2000:]}")
        return tree / f"{name}.o"

    def link(self, test, objects, tree):
        listing = subprocess.run(["ninja", "-t", "commands", f"bin/simt_{test}_test"], cwd=self.build, check=True,
                                 capture_output=True, text=True).stdout.strip().splitlines()[-1]
        words = shlex.split(listing)
        words = words[words.index("&&") + 1:] if "&&" in words else words
        words = words[:words.index("&&")] if "&&" in words else words
        at = words.index("-o")
        words[at + 1] = str(tree / f"{test}_test")
        words[at:at] = [str(o) for o in objects]
        subprocess.run([w for w in words if not w.endswith("ccache")], cwd=self.build, check=True)
        return tree / f"{test}_test"

    def try_one(self, mutant):
        file, name, old, new = mutant[:4]
        text = self.original[file]
        if text.count(old) != 1 and not (name in TWICE and text.count(old) == TWICE[name]):
            sys.exit(f"{name}: '{old[:60]}' occurs {text.count(old)} times in {file}")
        tree = self.dir / re.sub(r"\W+", "_", f"{file}-{name}")
        shutil.copytree(ROOT / "cuda", tree / "cuda")
        (tree / "src").symlink_to(ROOT / "src")
        (tree / "cuda" / file).write_text(text.replace(old, new))
        objects = [self.compile(unit, tree, unit) for unit in UNITS[file]]
        caught = ""
        for test in TESTS.get(file, ["attend"]):
            program = self.link(test, objects, tree)
            try:
                done = subprocess.run([str(program), "--abort"], capture_output=True, text=True, timeout=240)
            except subprocess.TimeoutExpired:
                caught = "does not end"
                break
            if done.returncode != 0:
                m = re.search(r"-{20,}\n(.+?)\n-{20,}", done.stdout)
                fault = re.search(r"thread \d+: ([^\n\"]+)", done.stdout)
                caught = f"{test}: {m.group(1) if m else done.returncode}{' / ' + fault.group(1) if fault else ''}"
                break
        shutil.rmtree(tree)
        return caught


TWICE = {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if args.only in m[1]][args.skip:]
    if args.sample:
        sound = [m for m in chosen if len(m) == 4]
        step = max(1, len(sound) // args.sample)
        chosen = sound[step // 2::step][:args.sample]
    if args.list:
        for m in chosen:
            print(f"{m[0]:16} {m[1]}{'   (equivalent: ' + m[4] + ')' if len(m) > 4 else ''}")
        return
    bench = Bench(args.build.resolve(), args.jobs)
    missed, wrong = [], []
    try:
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for mutant, caught in zip(chosen, pool.map(bench.try_one, chosen)):
                print(f"{'caught' if caught else 'missed'}  {mutant[0]:16} {mutant[1]:48} {caught}", flush=True)
                if not caught:
                    (wrong if len(mutant) == 4 else missed).append(mutant[1])
    finally:
        shutil.rmtree(bench.dir, ignore_errors=True)
    caught = len(chosen) - len(missed) - len(wrong)
    print(f"{caught} of {len(chosen)} caught; {len(missed)} missed and explained, {len(wrong)} missed")
    enough = not wrong if args.sample else caught >= 0.95 * len(chosen)
    sys.exit(0 if enough else 1)


if __name__ == "__main__":
    main()
