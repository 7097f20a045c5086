// SPDX-License-Identifier: Apache-2.0
#include "packed_blocks.hpp"

#include <algorithm>
#include <string>

#include "kvcache/blocks/batch_view.hpp"
#include "kvcache/quant/hadamard.hpp"
#include "kvcache/quant/pack.hpp"
#include "library_terms.hpp"

namespace engine {

kvcache::group_shape group_of(const cache_config& config) {
  return {.layers = config.shape.layers,
          .kv_heads = config.shape.kv_heads,
          .head_dim_k = config.shape.head_dim,
          .head_dim_v = config.shape.head_dim,
          .type = element_of(config.type)};
}

bool is_packed(const cache_config& config) {
  return std::any_of(config.formats.begin(), config.formats.end(),
                     [](const kvcache::kv_format& f) { return kvcache::lossy(f); });
}

kvcache::kv_format format_of(const cache_config& config, int layer) {
  if (!is_packed(config)) return {};
  return config.formats[config.formats.size() == 1 ? 0 : static_cast<std::size_t>(layer)];
}

// Open blocks: where seals wait until they are asked for, whole texts are open.
result<kvcache::packed_group_set> groups_for(const cache_config& config, std::int32_t blocks) {
  kvcache::packed_group_set out;
  if (is_packed(config)) {
    const auto made =
        kvcache::packed_groups(group_of(config), config.block_size, config.formats, config.deferred);
    if (!made) return to_error(made.error());
    out = *made;
  } else {
    out.group[0].shape = group_of(config);
    out.group[0].block_size = config.block_size;
  }
  out.group[0].total = kvcache::blocks{blocks};
  if (is_packed(config) && config.deferred) {
    const std::int64_t each = kvcache::ceil_div(config.max_tokens, config.block_size);
    const std::int64_t most = each * (config.max_sequences + 1);
    out.group[0].open = kvcache::blocks{static_cast<std::int32_t>(std::min<std::int64_t>(blocks, most))};
  }
  return out;
}

result<kvcache::host_planes> planes_for(const cache_config& config, const kvcache::geometry& made,
                                        const kvc_rope& rope) {
  kvcache::host_planes_config c;
  c.shape = group_of(config);
  c.block_size = config.block_size;
  c.blocks = made.group[0].total;
  if (is_packed(config)) {
    c.formats = config.formats;
    c.k_rope = &rope;
    c.open_blocks = made.group[0].open;
    c.exempt_blocks = made.groups > 1 ? made.group[1].total : 0;
  }
  auto planes = kvcache::host_planes::create(c);
  if (!planes) return to_error(planes.error());
  return std::move(*planes);
}

void table_census::add(std::span<const kvcache::block_id> table, std::span<const kvcache::block_id> open,
                       std::span<const kvcache::block_id> copies, int slots) {
  const auto note = [](std::map<kvcache::block_id, int>& in, kvcache::block_id b, int filled) {
    int& most = in[b];
    most = std::max(most, filled);
  };
  const int block = made_.group[0].block_size;
  for (std::size_t k = 0; k < table.size(); ++k, slots -= block) {
    const int filled = std::clamp(slots, 0, block);
    const bool is_open = k < open.size() && open[k] != kvcache::no_block;
    note(blocks_, table[k], is_open ? 0 : filled);
    if (is_open) note(open_, open[k], filled);
  }
  for (const kvcache::block_id b : copies) note(copies_, b, made_.group[1].block_size);
}

cache_bytes table_census::total() const {
  cache_bytes out;
  const auto sum = [&out](const std::map<kvcache::block_id, int>& of, kvcache::bytes block, int slots) {
    for (const auto& [b, filled] : of) out.held += static_cast<std::size_t>(block.count * filled / slots);
    out.reserved += of.size() * static_cast<std::size_t>(block.count);
  };
  const kvcache::group_geometry& g = made_.group[0];
  sum(blocks_, kvcache::block_bytes(g.shape, g.block_size, g.format), g.block_size);
  sum(open_, kvcache::open_block_bytes(g.shape, g.block_size, g.format), g.block_size);
  if (made_.groups < 2) return out;
  const kvcache::group_geometry& c = made_.group[1];
  sum(copies_, kvcache::block_bytes(c.shape, c.block_size), c.block_size);
  return out;
}

void packed_rows::add_tables(std::span<const kvcache::block_id> open,
                             std::span<const kvcache::block_id> copies, int first, int rows) {
  open_.push_back(open);
  copies_.push_back(copies.empty() ? -1 : kvcache::raw(copies.front()));
  const std::size_t at = open_slots_.size();
  open_slots_.resize(at + static_cast<std::size_t>(rows));
  require(kvcache::write_slots(open, block_size_, first, std::span(open_slots_).subspan(at)));
  if (exempt_ == 0) return;
  for (int slot = first; slot < first + rows; ++slot) {
    const bool here = !copies.empty() && slot < exempt_;
    exempt_slots_.push_back(here ? std::int64_t{copies_.back()} * exempt_ + slot : -1);
  }
}

kvcache::append_options packed_rows::where(kvcache::append_options with) const {
  with.open_slots = open_slots_;
  with.exempt_slots = exempt_slots_;
  return with;
}

void packed_rows::describe(kvc_batch& batch) {
  const auto columns = static_cast<std::size_t>(batch.table_columns);
  open_table_.resize(open_.size() * columns);
  for (std::size_t i = 0; i < open_.size(); ++i)
    require(kvcache::write_row(open_[i], -1, std::span(open_table_).subspan(i * columns, columns)));
  batch.open_table = open_table_.data();
  batch.sealed = sealed_.data();
  batch.row_sealed = row_sealed_.data();
  batch.exempt_table = exempt_ > 0 ? copies_.data() : nullptr;
}

namespace {

void read_exact(const kvc_plane& plane, kvcache::block_id block, int head, int offset, kv_type type,
                std::span<float> out) {
  const std::byte* from = cell(plane, block, head, offset);
  for (std::size_t d = 0; d < out.size(); ++d)
    out[d] = widen(from + plane.dim_stride * static_cast<std::int64_t>(d), type);
}

// A cell is unpacked as a whole.
void read_codes(const kvc_plane& plane, const kvcache::side_format& format, bool keys, int block_size,
                const stored_token& at, int head, std::span<float> out) {
  const std::int64_t block = kvcache::raw(at.block);
  const auto part = [&](const void* base, std::int64_t block_stride, std::int64_t head_stride) {
    return static_cast<const std::byte*>(base) + block_stride * block + head_stride * head;
  };
  const auto scales = [&](const void* base) {
    return reinterpret_cast<const kvcache::f16*>(
        base == nullptr ? nullptr : part(base, plane.scale_block_stride, plane.scale_head_stride));
  };
  std::vector<float> values(static_cast<std::size_t>(block_size) * out.size());
  kvcache::unpack_cell(format, keys, block_size, static_cast<std::int32_t>(out.size()),
                       part(plane.data, plane.block_stride, plane.head_stride), scales(plane.scale),
                       scales(plane.zero), values.data());
  const std::size_t first = static_cast<std::size_t>(at.slot % block_size) * out.size();
  std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(first), out.size(), out.begin());
}

}  // namespace

void read_token(const kvc_kv& kv, const kvcache::kv_format& format, kv_type type, bool keys, int head,
                const stored_token& at, std::span<float> out) {
  const kvcache::side_format& side = keys ? format.k : format.v;
  const kvc_plane& plane = keys ? kv.k : kv.v;
  if (at.copy != kvcache::no_block && at.slot < format.exempt) {
    read_exact(keys ? kv.exempt_k : kv.exempt_v, at.copy, head, at.slot, type, out);
  } else if (at.open != kvcache::no_block) {
    read_exact(keys ? kv.open_k : kv.open_v, at.open, head, at.slot % kv.block, type, out);
  } else if (side.codes == kvcache::code::exact) {
    read_exact(plane, at.block, head, at.slot % kv.block, type, out);
  } else {
    read_codes(plane, side, keys, kv.block, at, head, out);
  }
  const auto dim = static_cast<std::int32_t>(out.size());
  if (side.hadamard) kvcache::hadamard(out.data(), dim);
  if (!keys || kv.k_rope == nullptr) return;
  // Such texts lose no tokens: their slots are their positions.
  const kvc_rows row = kvcache::dense_rows(out.data(), kvcache::element::f32, 1, dim);
  require(kvcache::to_status(kvc_cpu_rope(kv.k_rope, &row, 1, &at.slot, out.data(), nullptr, nullptr), {}));
}

}  // namespace engine
