// SPDX-License-Identifier: Apache-2.0
// A table per head: how a text comes to them, attends through them, drops from them.
#include <algorithm>
#include <cstring>

#include "library_terms.hpp"
#include "session_state.hpp"

namespace engine {
namespace {

void copy_token(const kvc_plane& from, const std::byte* source, const kvc_plane& to, std::byte* target,
                int dim, std::size_t bytes) {
  for (int d = 0; d < dim; ++d) std::memcpy(target + to.dim_stride * d, source + from.dim_stride * d, bytes);
}

}  // namespace

// The second cache takes memory only as it is written.
status session_cache::parts::make_split() {
  if (heads) return {};
  const kvcache::group_shape one = {.layers = 1,
                                    .kv_heads = 1,
                                    .head_dim_k = config.shape.head_dim,
                                    .head_dim_v = config.shape.head_dim,
                                    .type = element_of(config.type)};
  const std::int64_t blocks = std::int64_t{whole.pool().total_blocks()} * head_count();
  if (blocks > INT32_MAX) return cannot_run("out_of_blocks", "blocks", std::to_string(blocks));
  const kvcache::group_config groups[] = {
      {.shape = one, .block_size = config.block_size, .total = {static_cast<std::int32_t>(blocks)}}};
  auto built = kvcache::cache::create({.groups = groups,
                                       .max_sequences = config.max_sequences * head_count(),
                                       .max_sequence_tokens = config.max_tokens,
                                       .max_nodes = -1,
                                       .max_gathers = 1});
  if (!built) return to_error(built.error());
  auto planes = kvcache::host_planes::create({.shape = one,
                                              .block_size = config.block_size,
                                              .blocks = groups[0].total.count,
                                              .large_pages = false,
                                              .layer_owner = {}});
  if (!planes) return to_error(planes.error());
  heads = std::move(*built);
  head_planes = std::move(*planes);
  const int group = config.shape.query_heads / config.shape.kv_heads;
  if (status s = plan(head_observing, head_planes.layer(0), group, 1, config.max_tokens, config.max_tokens);
      !s)
    return s;
  return plan(head_attention, head_planes.layer(0), group, 1, 1, config.max_tokens);
}

void session_cache::parts::run_split_commands(std::span<const kvc_keep> keeps) {
  if (!heads) return;
  require(kvcache::run(
      head_planes.layers(), heads->commands().view(),
      {.ids = heads->commands().ids(), .keeps = keeps, .rope = &rope.view(), .executor = &executor}));
  heads->end_step();
}

// Every (text, kv head) is a sequence of one head; rows go from [row][head] to [text][head][row] and back.
void session_cache::parts::attend_split(int layer, const stretch& part, const float* k, const float* v,
                                        float* out) {
  const auto dim = static_cast<std::size_t>(config.shape.head_dim);
  const auto kv_heads = static_cast<std::size_t>(config.shape.kv_heads);
  const auto group = static_cast<std::size_t>(config.shape.query_heads) / kv_heads;
  const std::size_t total = static_cast<std::size_t>(part.rows) * kv_heads;
  std::vector<float> q_rows(total * group * dim), k_rows(total * dim), v_rows(total * dim);
  std::vector<float> o_rows(total * group * dim), lse_rows(total * group);
  std::vector<reading> tables;
  std::vector<int> text, origin;  // origin: row * kv_heads + head
  int row = part.row;
  for (std::size_t i = part.first; i < part.first + part.count; ++i) {
    const state& s = *by_slot[static_cast<std::size_t>(segments_[i].slot)];
    for (int h = 0; h < config.shape.kv_heads; ++h) {
      tables.push_back({&s.heads[s.index(layer, h)], &s.tokens[s.index(layer, h)], segments_[i].rows});
      for (int r = 0; r < segments_[i].rows; ++r) {
        origin.push_back((row + r) * config.shape.kv_heads + h);
        text.push_back(positions_[static_cast<std::size_t>(row + r)]);
      }
    }
    row += segments_[i].rows;
  }
  for (std::size_t j = 0; j < total; ++j) {
    const auto from = static_cast<std::size_t>(origin[j]);
    std::copy_n(rotated_.data() + from * group * dim, group * dim, q_rows.data() + j * group * dim);
    std::copy_n(k + from * dim, dim, k_rows.data() + j * dim);
    std::copy_n(v + from * dim, dim, v_rows.data() + j * dim);
  }
  attend_heads(tables, q_rows.data(), k_rows.data(), v_rows.data(), o_rows.data(), lse_rows.data(),
               head_planes.layer(0), head_attention, static_cast<int>(group), 1, text, nullptr);
  for (std::size_t j = 0; j < total; ++j) {
    const auto to = static_cast<std::size_t>(origin[j]);
    std::copy_n(o_rows.data() + j * group * dim, group * dim, out + to * group * dim);
    std::copy_n(lse_rows.data() + j * group, group, lse2_.data() + to * group);
  }
}

status session_cache::parts::gather_heads(state& s, const std::vector<std::vector<std::int32_t>>& kept) {
  // All heads or none: blocks that forks can see are replaced, and there must be enough for all of them.
  const int block = config.block_size;
  std::int64_t fresh = 0;
  for (std::size_t h = 0; h < kept.size(); ++h) {
    if (static_cast<int>(kept[h].size()) == s.tokens[h].slots()) continue;
    const auto columns = static_cast<std::size_t>(kvcache::ceil_div(static_cast<int>(kept[h].size()), block));
    for (const kvcache::block_id b : s.heads[h].table().first(columns)) fresh += heads->pool().immutable(b);
  }
  if (fresh > heads->pool().free_blocks())
    return cannot_run("out_of_blocks", "blocks", std::to_string(fresh));
  for (std::size_t h = 0; h < kept.size(); ++h) {
    if (static_cast<int>(kept[h].size()) == s.tokens[h].slots()) continue;
    keep_plan exact;
    exact.form = drop_form::gather;
    exact.keep = static_cast<std::int32_t>(kept[h].size());
    // Some heads gain and some lose a block: whether it is worth it was the policy's decision.
    const auto done = s.heads[h].retain(exact, 0, true);
    require(done.error());
    std::vector<kvc_keep> keeps(static_cast<std::size_t>(config.max_sequences * head_count()));
    keeps[static_cast<std::size_t>(s.heads[h].place())] = {kept[h].data(), 0, 0};
    run_split_commands(keeps);
  }
  return {};
}

status session_cache::parts::split(state& s, const std::vector<std::vector<std::int32_t>>& kept) {
  if (status made = make_split(); !made) return made;
  std::vector<kvcache::sequence> tables;
  for (const auto& list : kept) {
    auto opened = heads->open({}, scope_of(s.options.scope));
    if (!opened) return to_error(opened.error());
    const auto got = opened->extend(static_cast<std::int32_t>(list.size()));
    if (!got) return to_error(got.error());
    tables.push_back(std::move(*opened));
  }
  run_split_commands();
  const auto bytes = static_cast<std::size_t>(kvcache::element_bytes(element_of(config.type)));
  const auto block = static_cast<std::size_t>(config.block_size);
  const kvc_kv& to = head_planes.layer(0);
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    const kvc_kv& from = whole_planes.layer(layer);
    for (int h = 0; h < config.shape.kv_heads; ++h) {
      const auto& list = kept[s.index(layer, h)];
      const auto target = tables[s.index(layer, h)].table();
      for (std::size_t t = 0; t < list.size(); ++t) {
        const auto slot = static_cast<std::size_t>(list[t]);
        const kvcache::block_id source = s.whole.table()[slot / block];
        const int in = static_cast<int>(slot % block), out = static_cast<int>(t % block);
        copy_token(from.k, cell(from.k, source, h, in), to.k, cell(to.k, target[t / block], 0, out), to.dim_k,
                   bytes);
        copy_token(from.v, cell(from.v, source, h, in), to.v, cell(to.v, target[t / block], 0, out), to.dim_v,
                   bytes);
      }
    }
  }
  s.heads = std::move(tables);
  (void)s.whole.close();
  return {};
}

}  // namespace engine
