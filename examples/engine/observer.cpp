// SPDX-License-Identifier: Apache-2.0
#include "observer.hpp"

#include <algorithm>
#include <cmath>

#include "library_terms.hpp"

namespace engine {
namespace {

using kvcache::observe;

// Slots that a query at `position` sees: those up to itself. All of them, in whatever order, if none is
// behind it.
int visible(std::span<const int> positions, int position) {
  return static_cast<int>(std::upper_bound(positions.begin(), positions.end(), position) - positions.begin());
}

// Scores of all keys; who sees what is said row by row.
kvc_softmax all_keys(const kv_shape& shape) {
  kvc_softmax s = kvcache::causal_softmax(1.0f / std::sqrt(static_cast<float>(shape.head_dim)));
  s.causal = 0;
  return s;
}

// A batch of one text: rows [starts[0], starts[1]) over `slots` slots.
kvc_batch rows_of_one(const layer_keys& keys, std::size_t head, const std::int32_t& slots,
                      const std::int32_t (&starts)[2]) {
  static constexpr std::int32_t none_sealed = 0;
  const std::vector<std::int32_t>& table = keys.tables[head];
  kvc_batch b{};
  b.struct_size = sizeof b;
  b.n = 1;
  b.table = table.data();
  if (keys.open) {
    b.open_table = table.data();
    b.sealed = &none_sealed;
  }
  b.table_columns = static_cast<std::int32_t>(table.size());
  b.kv_len = &slots;
  b.q_start = starts;
  return b;
}

// Adds to `seen` how many of the rows add to each slot.
void count(std::span<const std::int32_t> upto, std::size_t first, std::size_t step,
           std::vector<std::int32_t>& seen) {
  std::vector<std::int32_t> ends(seen.size() + 1);
  for (std::size_t i = first; i < upto.size(); i += step) ++ends[static_cast<std::size_t>(upto[i])];
  std::int32_t beyond = 0;
  for (std::size_t j = seen.size(); j-- > 0;) seen[j] += beyond += ends[j + 1];
}

}  // namespace

attention_observer::attention_observer(const kv_shape& shape, observe needs,
                                       const kvcache::watch_options& watch, bool remember)
    : shape_(shape), needs_(needs), watch_(watch), remember_(remember) {
  layers_.resize(static_cast<std::size_t>(shape.layers));
  for (layer_state& at : layers_) {
    at.seen.resize(static_cast<std::size_t>(shape.kv_heads));
  }
}

// Adds rows to the sums of the heads: `sums` has one place per table, and heads of a table lie `stride`
// apart, or as many slots as they have if that is 0.
void attention_observer::add_up(const addition& what, const layer_keys& keys, std::span<float* const> sums,
                                std::int64_t stride) const {
  const auto rows = static_cast<std::int32_t>(what.rows.positions.size());
  const auto kv_heads = static_cast<std::size_t>(shape_.kv_heads);
  const int heads = keys.split() ? group() : shape_.query_heads;
  const std::int32_t starts[] = {0, rows};
  std::vector<std::int32_t> upto;
  std::vector<float> least;
  for (std::size_t h = 0; h < keys.tables.size(); ++h) {
    const auto column = [&](const auto& from, auto& to) {
      to.clear();
      for (std::size_t i = h; i < from.size(); i += keys.split() ? kv_heads : 1) to.push_back(from[i]);
    };
    column(what.upto, upto);
    column(what.least, least);
    const std::int32_t slots = keys.slots(h);
    const kvc_batch batch = rows_of_one(keys, h, slots, starts);
    const std::size_t head = h * static_cast<std::size_t>(group());
    kvc_rows q = kvcache::dense_rows(what.rows.q + head * static_cast<std::size_t>(shape_.head_dim),
                                     kvcache::element::f32, shape_.query_heads, shape_.head_dim);
    q.heads = heads;
    kvc_score score =
        kvcache::dense_score(what.kind, sums[h], stride != 0 ? stride : slots, what.rows.lse2 + head);
    score.lse_row_stride = shape_.query_heads;
    score.upto = upto.empty() ? nullptr : upto.data();
    score.least = least.empty() ? nullptr : least.data();
    if (what.rows.scores != nullptr) {
      score.key_score = what.rows.scores + static_cast<std::int64_t>(head) * what.rows.score_stride;
      score.key_score_head_stride = what.rows.score_stride;
    }
    require(keys.with->score(*keys.kv, batch, q, all_keys(shape_), score, keys.executor));
  }
}

void attention_observer::add(int layer, const query_rows& rows, const layer_keys& keys) {
  layer_state& at = layers_[static_cast<std::size_t>(layer)];
  if (sums()) add_sums(at, rows, keys);
  if (!logs()) return;
  std::vector<std::int32_t> saw;
  for (const int p : rows.positions) {
    for (const auto& positions : keys.positions) saw.push_back(visible(positions, p));
  }
  add_log(at, rows, saw);
}

// New slots begin at 0.
void attention_observer::make_room(layer_state& at, const layer_keys& keys) const {
  std::int64_t longest = 0;
  for (std::size_t h = 0; h < keys.positions.size(); ++h) {
    longest = std::max<std::int64_t>(longest, keys.slots(h));
    at.seen[h].resize(keys.positions[h].size());
  }
  if (longest <= at.stride) return;
  const std::int64_t stride = std::max(longest, 2 * at.stride);
  std::vector<float> wider(static_cast<std::size_t>(stride * shape_.query_heads));
  for (int q = 0; q < shape_.query_heads; ++q)
    std::copy_n(at.sums.begin() + q * at.stride, at.stride, wider.begin() + q * stride);
  at.sums = std::move(wider);
  at.stride = stride;
}

void attention_observer::add_sums(layer_state& at, const query_rows& rows, const layer_keys& keys) const {
  const bool far = needs_ == observe::far_squares;
  make_room(at, keys);
  addition what{far ? KVC_SCORE_SQUARE : KVC_SCORE_WEIGHT, rows, {}, {}};
  for (const int p : rows.positions) {
    for (const auto& positions : keys.positions)
      what.upto.push_back(visible(positions, far ? p - watch_.distance : p));
  }
  for (std::size_t h = 0; h < at.seen.size(); ++h) count(what.upto, h, at.seen.size(), at.seen[h]);
  std::vector<float*> sums;
  for (std::size_t h = 0; h < keys.tables.size(); ++h)
    sums.push_back(at.sums.data() + static_cast<std::int64_t>(h) * group() * at.stride);
  add_up(what, keys, sums, at.stride);
}

void attention_observer::add_log(layer_state& at, const query_rows& rows, std::span<const std::int32_t> saw) {
  const std::size_t n = rows.positions.size();
  const auto heads = static_cast<std::size_t>(shape_.query_heads);
  const std::size_t width = heads * static_cast<std::size_t>(shape_.head_dim);
  const auto kv_heads = static_cast<std::size_t>(shape_.kv_heads);
  at.q.insert(at.q.end(), rows.q, rows.q + n * width);
  at.lse2.insert(at.lse2.end(), rows.lse2, rows.lse2 + n * heads);
  at.saw.insert(at.saw.end(), saw.begin(), saw.end());
  at.positions.insert(at.positions.end(), rows.positions.begin(), rows.positions.end());
  if (remember_ || needs_ == observe::moved) return;
  const auto wanted = static_cast<std::size_t>(watch_.queries);
  if (at.positions.size() < 2 * wanted + n) return;  // cut now and then, not at every row
  const auto cut = static_cast<std::ptrdiff_t>(at.positions.size() - wanted);
  at.q.erase(at.q.begin(), at.q.begin() + cut * static_cast<std::ptrdiff_t>(width));
  at.lse2.erase(at.lse2.begin(), at.lse2.begin() + cut * static_cast<std::ptrdiff_t>(heads));
  at.saw.erase(at.saw.begin(), at.saw.begin() + cut * static_cast<std::ptrdiff_t>(kv_heads));
  at.positions.erase(at.positions.begin(), at.positions.begin() + cut);
}

// The first row of the log that counts.
std::size_t attention_observer::first_row(const layer_state& at) const {
  if (needs_ == observe::moved) {
    return static_cast<std::size_t>(std::lower_bound(at.positions.begin(), at.positions.end(), watch_.skip) -
                                    at.positions.begin());
  }
  const auto wanted = static_cast<std::size_t>(watch_.queries);
  return at.positions.size() > wanted ? at.positions.size() - wanted : 0;
}

void attention_observer::count_votes(const layer_state& at, const layer_keys& keys,
                                     std::span<float* const> sums) const {
  const std::size_t first = first_row(at);
  const std::size_t width = static_cast<std::size_t>(shape_.query_heads * shape_.head_dim);
  const bool hits = needs_ == observe::hits;
  addition what{
      hits ? KVC_SCORE_HIT : KVC_SCORE_WEIGHT,
      {at.q.data() + first * width, at.lse2.data() + first * static_cast<std::size_t>(shape_.query_heads),
       std::span(at.positions).subspan(first)},
      {},
      {}};
  for (const int p : what.rows.positions) {
    for (const auto& positions : keys.positions) what.upto.push_back(visible(positions, p));
  }
  const auto kv_heads = static_cast<std::size_t>(shape_.kv_heads);
  for (std::size_t i = first * kv_heads; hits && i < at.saw.size(); ++i) {
    // Rounding must not decide where all parts are equal.
    what.least.push_back(0.99999f / static_cast<float>(at.saw[i]));
  }
  add_up(what, keys, sums, 0);
}

// The queries have a softmax of their own, over all keys: attention without values.
void attention_observer::count_moved(const layer_state& at, const layer_keys& keys, int next_position,
                                     const kvcache::rope& rope, std::span<float* const> sums) const {
  constexpr std::size_t at_a_time = 128;
  const auto heads = static_cast<std::size_t>(shape_.query_heads);
  const std::size_t width = heads * static_cast<std::size_t>(shape_.head_dim);
  const std::size_t first = first_row(at), rows = at.positions.size() - first;
  std::vector<float> turned, lse2;
  std::vector<std::int32_t> by;
  for (std::size_t begin = 0; begin < rows; begin += at_a_time) {
    const std::size_t n = std::min(at_a_time, rows - begin);
    by.clear();
    for (std::size_t i = begin; i < begin + n; ++i) {
      const auto target = next_position + static_cast<int>(static_cast<std::int64_t>(i) * watch_.ahead /
                                                           static_cast<std::int64_t>(rows));
      by.push_back(target - at.positions[first + i]);
    }
    turned.resize(n * width);
    lse2.resize(n * heads);
    const kvc_rows q = kvcache::dense_rows(at.q.data() + (first + begin) * width, kvcache::element::f32,
                                           shape_.query_heads, shape_.head_dim);
    require(rope.turn(q, by, turned.data(), keys.executor));
    normalise(keys, turned, static_cast<std::int32_t>(n), lse2);
    add_up({KVC_SCORE_SQUARE, {turned.data(), lse2.data(), by}, {}, {}}, keys, sums, 0);
  }
}

// lse2 of rows [n][query_heads][head_dim] over all keys.
void attention_observer::normalise(const layer_keys& keys, std::span<const float> rows, std::int32_t n,
                                   std::span<float> lse2) const {
  const int heads = keys.split() ? group() : shape_.query_heads;
  const std::int32_t starts[] = {0, n};
  for (std::size_t h = 0; h < keys.tables.size(); ++h) {
    const std::int32_t slots = keys.slots(h);
    const kvc_batch batch = rows_of_one(keys, h, slots, starts);
    const std::size_t head = h * static_cast<std::size_t>(group());
    kvc_rows q = kvcache::dense_rows(rows.data() + head * static_cast<std::size_t>(shape_.head_dim),
                                     kvcache::element::f32, shape_.query_heads, shape_.head_dim);
    q.heads = heads;
    kvc_out out =
        kvcache::dense_out(nullptr, kvcache::element::f32, heads, shape_.head_dim, lse2.data() + head);
    out.lse_row_stride = shape_.query_heads;
    require(keys.with->run(*keys.kv, batch, q, all_keys(shape_), out, keys.executor));
  }
}

std::vector<kvcache::observation> attention_observer::look(int layer, int next_position,
                                                           const layer_keys& keys,
                                                           const kvcache::rope& rope) {
  const layer_state& at = layers_[static_cast<std::size_t>(layer)];
  const auto kv_heads = static_cast<std::size_t>(shape_.kv_heads);
  std::size_t total = 0;
  for (const auto& positions : keys.positions) total += positions.size();
  looked_.assign(total * static_cast<std::size_t>(group()), 0.0f);
  looked_seen_.resize(kv_heads);
  std::vector<kvcache::observation> out;
  std::vector<float*> tables;
  std::size_t begin = 0;
  for (std::size_t h = 0; h < kv_heads; ++h) {
    const std::size_t slots = keys.positions[h].size(), size = slots * static_cast<std::size_t>(group());
    if (h < keys.tables.size()) tables.push_back(looked_.data() + begin);
    look_at(at, keys, static_cast<int>(h), std::span(looked_).subspan(begin, size));
    out.push_back({.held = static_cast<std::int32_t>(slots),
                   .queries = group(),
                   .weights = std::span(looked_).subspan(begin, size),
                   .seen = looked_seen_[h],
                   .value_norms = keys.norms[h],
                   .positions = keys.positions[h]});
    begin += size;
  }
  if (needs_ == observe::moved) {
    count_moved(at, keys, next_position, rope, tables);
  } else if (!sums()) {
    count_votes(at, keys, tables);
  }
  return out;
}

// Sums that are there already, and how many queries a slot's sum is made from.
void attention_observer::look_at(const layer_state& at, const layer_keys& keys, int kv_head,
                                 std::span<float> weights) {
  const auto h = static_cast<std::size_t>(kv_head);
  std::vector<std::int32_t>& seen = looked_seen_[h];
  const auto slots = keys.slots(h);
  if (sums()) {
    seen = at.seen[h];
    for (int q = 0; q < group(); ++q)
      std::copy_n(at.sums.begin() + (kv_head * group() + q) * at.stride, slots,
                  weights.begin() + std::ptrdiff_t{q} * slots);
    return;
  }
  std::vector<std::int32_t> upto;
  for (std::size_t row = first_row(at); row < at.positions.size(); ++row)
    upto.push_back(needs_ == observe::moved ? slots : visible(keys.positions[h], at.positions[row]));
  seen.assign(static_cast<std::size_t>(slots), 0);
  count(upto, 0, 1, seen);
}

void attention_observer::gather(int layer, int kv_head, std::span<const std::int32_t> kept) {
  if (!sums()) return;
  layer_state& at = layers_[static_cast<std::size_t>(layer)];
  const auto take = [&](auto from, std::size_t held) {
    for (std::size_t t = 0; t < kept.size(); ++t) from[t] = from[static_cast<std::size_t>(kept[t])];
    std::fill(from.begin() + kept.size(), from.begin() + held, 0);  // whoever comes next begins at 0
  };
  std::vector<std::int32_t>& seen = at.seen[static_cast<std::size_t>(kv_head)];
  for (int q = kv_head * group(); q < (kv_head + 1) * group(); ++q)
    take(std::span(at.sums).subspan(static_cast<std::size_t>(q * at.stride)), seen.size());
  take(std::span(seen), seen.size());
  seen.resize(kept.size());
}

void attention_observer::renew(int layer, int kv_head, int slot) {
  if (!sums()) return;
  layer_state& at = layers_[static_cast<std::size_t>(layer)];
  at.seen[static_cast<std::size_t>(kv_head)][static_cast<std::size_t>(slot)] = 0;
  for (int q = kv_head * group(); q < (kv_head + 1) * group(); ++q)
    at.sums[static_cast<std::size_t>(q * at.stride + slot)] = 0;
}

void attention_observer::replay(int layer, const attention_observer& other, const layer_keys& keys) {
  const layer_state& from = other.layers_[static_cast<std::size_t>(layer)];
  add(layer, {from.q.data(), from.lse2.data(), from.positions}, keys);
}

std::size_t attention_observer::bytes() const {
  std::size_t numbers = 0;
  for (const layer_state& at : layers_) {
    for (const auto& s : at.seen) numbers += s.size() * static_cast<std::size_t>(1 + group());
    numbers += at.q.size() + at.lse2.size() + at.saw.size() + at.positions.size();
  }
  return numbers * sizeof(float);
}

}  // namespace engine
