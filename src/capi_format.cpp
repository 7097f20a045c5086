// SPDX-License-Identifier: Apache-2.0
// The C API's packed formats: their text, the groups of a cache and the planes that are made from them.
#include <algorithm>
#include <string_view>

#include "capi.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/core/text.hpp"
#include "kvcache/quant/parse.hpp"

namespace kvcache::detail {
namespace {

host_planes_config convert(const kvc_planes& p, std::span<const kv_format> formats) noexcept {
  host_planes_config c;
  c.shape = {.layers = p.layers,
             .kv_heads = p.kv_heads,
             .head_dim_k = p.dim_k,
             .head_dim_v = p.dim_v,
             .type = static_cast<element>(p.type),
             .v_aliases_k = p.v_aliases_k != 0,
             .window = 0};
  c.block_size = p.block;
  c.blocks = p.blocks;
  c.group = p.group;
  c.order = p.order == KVC_K_ROW_MAJOR ? k_order::row_major : k_order::transposed;
  c.memory = p.memory.ptr;
  c.formats = formats;
  if (formats.empty()) return c;
  c.open_blocks = p.open_blocks;
  c.exempt_blocks = p.exempt_blocks;
  c.k_rope = p.k_rope;
  return c;
}

kvc_status check_planes(const host_planes_config& c, kvc_error* error) noexcept {
  KVC_TRY(fail(error, validate(c.shape, c.block_size)));
  KVC_TRY(need(c.group >= 0 && c.group <= UINT8_MAX, KVC_FIELD_GROUP, error, c.group));
  // Of each of the three spaces, so that their sum fits; a packed block may be larger than an open one.
  const int64_t block = std::min(block_bytes(c.shape, c.block_size).count, INT64_MAX / 16) * 2;
  const auto fits = [&](int32_t n) { return n <= INT64_MAX / 8 / block; };
  KVC_TRY(need(c.blocks >= 1 && fits(c.blocks), KVC_FIELD_BLOCKS, error, c.blocks));
  if (c.formats.empty()) return KVC_OK;
  const result<block_format> format = block_format_of(c.formats, c.shape, c.block_size);
  if (!format) return fail(error, format.error());
  KVC_TRY(
      need(format->lossy, KVC_FIELD_FORMATS, error));  // planes of what is not packed have no such settings
  KVC_TRY(need(c.open_blocks >= 1 && fits(c.open_blocks), KVC_FIELD_OPEN_BLOCKS, error, c.open_blocks));
  return need(c.exempt_blocks >= 0 && fits(c.exempt_blocks), KVC_FIELD_EXEMPT_BLOCKS, error, c.exempt_blocks);
}

}  // namespace

kvc_status parse_formats(const char* const* text, int32_t n, int32_t layers, fixed_array<kv_format>& out,
                         kvc_error* error) noexcept {
  const bool given = text != nullptr;
  KVC_TRY(need(given ? n == 1 || (n == layers && n > 1) : n == 0, KVC_FIELD_FORMATS, error, n));
  if (!given) return KVC_OK;
  fixed_array<kv_format> formats;
  if (!formats.create(static_cast<size_t>(n))) return fail(error, KVC_OUT_OF_MEMORY, KVC_FIELD_FORMATS, n);
  bool all_as_written = true;
  for (int32_t i = 0; i < n; ++i) {
    if (text[i] == nullptr) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS, 0, i);
    const parsed_format read = parse_format(text[i]);
    if (!read.ok()) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS, 0, i);
    formats[static_cast<size_t>(i)] = read.value;
    all_as_written = all_as_written && read.value == kv_format{};
  }
  if (!all_as_written) out = std::move(formats);
  return KVC_OK;
}

kvc_status convert_group(const kvc_group_config& in, int64_t index, group_config& out,
                         kvc_error* error) noexcept {
  const auto refuse = [&](kvc_status s, int32_t field, int64_t value) {
    return fail(error, s, field, value, index);
  };
  if (in.struct_size != sizeof in) return refuse(KVC_ABI, KVC_FIELD_GROUPS, in.struct_size);
  // Checked here because the enumeration is one byte wide.
  if (in.type < 0 || in.type > KVC_BF16) return refuse(KVC_BAD_ARGUMENT, KVC_FIELD_TYPE, in.type);
  if (in.reserved != 0) return refuse(KVC_BAD_ARGUMENT, KVC_FIELD_RESERVED, in.reserved);
  out.shape = {.layers = in.layers,
               .kv_heads = in.kv_heads,
               .head_dim_k = in.head_dim_k,
               .head_dim_v = in.head_dim_v != 0 ? in.head_dim_v : in.head_dim_k,
               .type = static_cast<element>(in.type),
               .v_aliases_k = in.v_aliases_k != 0,
               .window = in.window};
  out.block_size = in.block_size != 0 ? in.block_size : 16;
  out.total = {in.total};
  out.open = {in.open};
  out.format = {.block = {in.format.block},
                .open_block = {in.format.open_block},
                .residual = in.format.residual,
                .lossy = in.format.lossy != 0,
                .fingerprint = in.format.fingerprint,
                .deferred = in.format.deferred != 0,
                .exempt = in.format.exempt};
  out.first_only = in.first_only != 0;
  fixed_array<kv_format> formats;
  KVC_TRY(parse_formats(in.formats, in.n_formats, in.layers, formats, error));
  if (in.formats == nullptr) return KVC_OK;
  const bool deferred = std::exchange(out.format.deferred, false);
  if (out.format != block_format{}) return refuse(KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS, in.n_formats);
  if (formats.size() == 0) return KVC_OK;
  const result<block_format> format = block_format_of(formats.view(), out.shape, out.block_size);
  if (!format) return fail(error, format.error(), index);
  out.format = *format;
  out.format.deferred = deferred && format->lossy;
  return KVC_OK;
}

}  // namespace kvcache::detail

using namespace kvcache;
using namespace kvcache::detail;

kvc_status kvc_format_text(const char* text, char* out, size_t size, kvc_error* error) {
  KVC_TRY(need(text != nullptr, KVC_FIELD_FORMATS, error));
  KVC_TRY(need(out != nullptr || size == 0, KVC_FIELD_OUT, error));
  const parsed_format read = parse_format(text);
  if (read.ok()) {
    (void)to_text(read.value, {out, size});
    return KVC_OK;
  }
  text_out why(std::span<char>(out, size));
  why.add(read.key).add(": '").add(read.text).add("'; allowed: ").add(read.allowed);
  return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_FORMATS);
}

kvc_status kvc_block_format_of(const kvc_group_config* group, kvc_block_format* format, kvc_error* error) {
  KVC_TRY(need(group != nullptr, KVC_FIELD_GROUP, error));
  KVC_TRY(need(format != nullptr, KVC_FIELD_FORMAT, error));
  group_config g;
  KVC_TRY(convert_group(*group, 0, g, error));
  KVC_TRY(fail(error, validate(g.shape, g.block_size)));
  *format = {.block = block_bytes(g.shape, g.block_size, g.format).count,
             .open_block = open_block_bytes(g.shape, g.block_size, g.format).count,
             .residual = g.format.residual,
             .lossy = g.format.lossy ? 1 : 0,
             .fingerprint = g.format.fingerprint,
             .deferred = g.format.deferred ? 1 : 0,
             .exempt = g.format.exempt};
  return KVC_OK;
}

kvc_status kvc_cpu_planes(const kvc_planes* planes, kvc_kv* layers, int64_t* bytes, kvc_error* error) {
  KVC_TRY(check_struct(planes, KVC_FIELD_PLANES, error));
  const kvc_planes& p = *planes;
  KVC_TRY(need(p.type >= 0 && p.type <= KVC_BF16, KVC_FIELD_TYPE, error, p.type));
  KVC_TRY(need(p.order == KVC_K_TRANSPOSED || p.order == KVC_K_ROW_MAJOR, KVC_FIELD_ORDER, error, p.order));
  KVC_TRY(need(p.reserved == 0 && p.reserved2 == 0, KVC_FIELD_RESERVED, error));
  fixed_array<kv_format> formats;
  KVC_TRY(parse_formats(p.formats, p.n_formats, p.layers, formats, error));
  const host_planes_config c = convert(p, formats.view());
  KVC_TRY(check_planes(c, error));
  const int64_t needed = host_planes::size_of(c).count;
  if (planes->memory.ptr != nullptr) {
    KVC_TRY(need(layers != nullptr, KVC_FIELD_LAYERS, error));
    if (planes->memory.bytes < static_cast<size_t>(needed)) {
      return fail(error, KVC_WORKSPACE, KVC_FIELD_MEMORY, needed);
    }
    const result<host_planes> made = host_planes::create(c);
    if (!made) return fail(error, made.error());
    std::copy(made->layers().begin(), made->layers().end(), layers);
  }
  if (bytes != nullptr) *bytes = needed;
  return KVC_OK;
}
