// SPDX-License-Identifier: Apache-2.0
#include "seal.hpp"

#include <algorithm>

#include "check.hpp"
#include "codes.hpp"
#include "kvcache/quant/pack.hpp"

namespace kvcache::detail {
namespace {

constexpr int32_t most_tokens = 128;

/// The values of one head of an open block, [tokens][dim].
void load_open(const kvc_kv& kv, bool keys, int32_t id, int32_t head, float* to) noexcept {
  const kvc_plane& p = keys ? kv.open_k : kv.open_v;
  const int32_t dim = keys ? kv.dim_k : kv.dim_v;
  const std::byte* from = cell(p, id, head, 0);
  with_type(p.type, [&](auto* tag) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(tag)>>;
    if (p.dim_stride < p.token_stride) {
      for (int32_t t = 0; t < kv.block; ++t) {
        for (int32_t d = 0; d < dim; ++d) {
          to[t * dim + d] = to_float(read<T>(from + t * p.token_stride + d * p.dim_stride));
        }
      }
    } else {
      for (int32_t d = 0; d < dim; ++d) {
        for (int32_t t = 0; t < kv.block; ++t) {
          to[t * dim + d] = to_float(read<T>(from + t * p.token_stride + d * p.dim_stride));
        }
      }
    }
  });
}

/// K or V of a block of one layer while it is packed.
struct side {
  const kvc_kv& kv;
  bool keys;

  const kvc_plane& plane() const noexcept { return keys ? kv.k : kv.v; }
  bool coded() const noexcept { return is_code(plane().type); }
  int32_t dim() const noexcept { return keys ? kv.dim_k : kv.dim_v; }
  int32_t rows() const noexcept { return keys ? kv.dim_k : kv.block; }
  /// Bytes of the codes of a row, and from row to row.
  int64_t row() const noexcept {
    return code_row_bytes(static_cast<code>(plane().type), keys ? kv.block : kv.dim_v);
  }
  int64_t stride() const noexcept { return keys ? plane().dim_stride : plane().token_stride; }
  /// Scales of a cell in bytes, and where those of a block and head begin.
  size_t scale_bytes() const noexcept {
    return sizeof(f16) * static_cast<size_t>(scales_of_cell(format_of(plane()), kv.block, dim()));
  }
  int64_t scale_at(int64_t id, int64_t head) const noexcept {
    return id * plane().scale_block_stride + head * plane().scale_head_stride;
  }

  /// Copies the codes of a cell whose rows lie `from_stride` apart to where its rows belong.
  void copy_rows(const std::byte* from, int64_t from_stride, std::byte* to) const noexcept {
    const bool dense = from_stride == row() && stride() == row();
    const int64_t n = dense ? 1 : rows(), bytes = dense ? row() * rows() : row();
    for (int64_t r = 0; r < n; ++r) {
      std::memmove(to + r * stride(), from + r * from_stride, static_cast<size_t>(bytes));
    }
  }
  /// Codes and scales of one head of a block as they are.
  void copy(int64_t src, int64_t dst, int64_t head) const noexcept {
    const kvc_plane& p = plane();
    copy_rows(cell(p, src, head, 0), stride(), cell(p, dst, head, 0));
    for (void* scales : {p.scale, p.zero}) {
      if (scales == nullptr) continue;
      std::byte* at = bytes_of(scales);
      std::memmove(at + scale_at(dst, head), at + scale_at(src, head), scale_bytes());
    }
  }
};

/// The cell of an open block as rows, if its columns are dense.
bool rows_of(const side& s, int64_t id, int32_t head, cell_rows& out) noexcept {
  const kvc_plane& p = s.keys ? s.kv.open_k : s.kv.open_v;
  if ((s.keys ? p.token_stride : p.dim_stride) != element_size(p.type)) return false;
  out = {cell(p, id, head, 0), p.type, s.keys ? p.dim_stride : p.token_stride, s.rows(),
         s.keys ? s.kv.block : s.kv.dim_v};
  return true;
}

status check_side(const side& s, const kvc_command& c, float* values) noexcept {
  const kernel& body = *find_kernel(KVC_TARGET_BEST);
  for (int32_t h = 0; s.coded() && h < s.kv.kv_heads; ++h) {
    cell_rows rows;
    if (body.packable != nullptr && rows_of(s, c.src, h, rows) && body.packable(rows)) continue;
    load_open(s.kv, s.keys, c.src, h, values);
    if (status bad = check_values({s.keys, s.kv.block, s.dim(), c.arg}, values); !bad) return bad;
  }
  return {};
}

/// The scale that the cells of all heads share.
stored_grid common_grid(const side& s, const kvc_command& c, const side_format& f, float* values) noexcept {
  value_range all;
  for (int32_t h = 0; h < s.kv.kv_heads; ++h) {
    load_open(s.kv, s.keys, c.src, h, values);
    const int64_t skip = int64_t{c.arg} * s.dim();
    const value_range r = range_of({values, int64_t{s.kv.block} * s.dim(), 1, skip});
    all.least = h == 0 ? r.least : std::min(all.least, r.least);
    all.largest = h == 0 ? r.largest : std::max(all.largest, r.largest);
  }
  const float magnitude = std::max({-all.least, all.largest, 0.0f});
  if (is_fp8(f.codes)) return fit_fp8(magnitude, f.codes);
  return f.symmetric ? fit_symmetric(magnitude, largest_code(f.codes))
                     : fit_min_max(all.least, all.largest, largest_code(f.codes));
}

/// Packs one head into codes behind each other.
void pack_head(const side& s, const kvc_command& c, int32_t head, const packed_rows& to,
               float* values) noexcept {
  const kernel& body = *find_kernel(KVC_TARGET_BEST);
  const side_format f = format_of(s.plane());
  cell_rows rows;
  const bool fast = c.arg == 0 && body.pack != nullptr && rows_of(s, c.src, head, rows);
  if (fast && body.pack(f, s.keys, rows, to)) return;
  const cell_shape shape{s.keys, s.kv.block, s.dim(), c.arg};
  load_open(s.kv, s.keys, c.src, head, values);
  if (to.fitted) return encode_cell(f, shape, values, to.codes, to.scale, to.zero);
  (void)pack_cell(f, s.keys, s.kv.block, s.dim(), c.arg, values, to.codes, to.scale, to.zero);
}

void seal_side(const side& s, const kvc_command& c, float* values) noexcept {
  if (!s.coded()) return;
  const kvc_plane& p = s.plane();
  const bool shared = p.scale_kind == KVC_SCALE_TENSOR, dense = s.stride() == s.row();
  std::byte packed[most_tokens * max_dim];  // for planes whose rows do not lie behind each other
  if (shared) {
    const stored_grid grid = common_grid(s, c, format_of(p), values);
    write(bytes_of(p.scale) + s.scale_at(c.dst, 0), grid.scale);
    if (p.zero != nullptr) write(bytes_of(p.zero) + s.scale_at(c.dst, 0), grid.zero);
  }
  for (int32_t h = 0; h < s.kv.kv_heads; ++h) {
    std::byte* own = cell(p, c.dst, h, 0);
    packed_rows to{dense ? own : packed, nullptr, nullptr, shared};
    to.scale = reinterpret_cast<f16*>(bytes_of(p.scale) + s.scale_at(c.dst, h));
    if (p.zero != nullptr) to.zero = reinterpret_cast<f16*>(bytes_of(p.zero) + s.scale_at(c.dst, h));
    pack_head(s, c, h, to, values);
    if (!dense) s.copy_rows(packed, s.row(), own);
  }
}

}  // namespace

bool packs(const kvc_kv& kv) noexcept {
  return is_code(kv.k.type) || is_code(v_plane(kv).type);
}

kvc_status check_seal(const kvc_kv& kv, const kvc_command& c, int64_t at, kvc_error* error) noexcept {
  float values[most_tokens * max_dim];
  for (const bool keys : {true, false}) {
    const status s = check_side({kv, keys}, c, values);
    if (!s) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_VALUE, s.value, at);
  }
  return KVC_OK;
}

int32_t find_unpackable(const kvc_kv& kv, bool keys, int32_t id, int32_t head, int32_t slot) noexcept {
  const side s{kv, keys};
  const kvc_plane& p = keys ? kv.open_k : kv.open_v;
  for (int32_t d = 0; s.coded() && d < s.dim(); ++d) {
    const float x = load(cell(p, id, head, slot) + d * p.dim_stride, p.type);
    if (!(x >= -largest_packed && x <= largest_packed)) return d;
  }
  return -1;
}

void seal_codes(const kvc_kv& kv, const kvc_command& c) noexcept {
  float values[most_tokens * max_dim];
  for (const bool keys : {true, false}) seal_side({kv, keys}, c, values);
}

void copy_codes(const kvc_kv& kv, const kvc_command& c) noexcept {
  for (const side& s : {side{kv, true}, side{kv, false}}) {
    for (int32_t h = 0; s.coded() && h < kv.kv_heads; ++h) s.copy(c.src, c.dst, h);
  }
}

namespace {

/// K or V of one head of a block.
void unpack_side(const kernel& body, const side& s, int32_t id, int32_t head, float* to) noexcept {
  if (to == nullptr) return;
  if (s.coded()) return body.unpack(s.kv, s.keys, id, head, to);
  const kvc_plane& p = s.plane();
  for (int32_t t = 0; t < s.kv.block; ++t) {
    const std::byte* from = cell(p, id, head, t);
    for (int32_t d = 0; d < s.dim(); ++d) {
      to[s.keys ? d * s.kv.block + t : t * s.dim() + d] = load(from + d * p.dim_stride, p.type);
    }
  }
}

}  // namespace

}  // namespace kvcache::detail

using namespace kvcache::detail;

kvc_status kvc_cpu_unpack(const kvc_kv* kv, const int32_t* ids, int32_t n, int32_t head, float* k,
                          int64_t k_stride, float* v, int64_t v_stride, int32_t target, kvc_error* error) {
  KVC_TRY(check_kv(kv, true, error));
  if (n < 0 || (ids == nullptr && n > 0)) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_N, n);
  if (head < 0 || head >= kv->kv_heads) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS, head);
  if (v != nullptr && kv->v.data == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_V);
  const kernel* body = find_kernel(target);
  if (body == nullptr) return fail(error, KVC_UNSUPPORTED, KVC_FIELD_TARGET, target);
  for (int32_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= kv->blocks) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_BLOCKS, ids[i], i);
  }
  for (int32_t i = 0; i < n; ++i) {
    unpack_side(*body, {*kv, true}, ids[i], head, k != nullptr ? k + i * k_stride : nullptr);
    unpack_side(*body, {*kv, false}, ids[i], head, v != nullptr ? v + i * v_stride : nullptr);
  }
  return KVC_OK;
}
