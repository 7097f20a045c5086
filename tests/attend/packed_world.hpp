// SPDX-License-Identifier: Apache-2.0
#pragma once
// A packed cache filled with random keys and values, the same cache with the numbers its codes stand for in
// f32 planes of the same ids, and attention over these numbers in double. Every byte that was not written is
// 0xff, which is NaN in every float type; ids are permuted, and table entries nobody may read are wild.
#include <memory>
#include <numeric>
#include <span>
#include <string>

#include "kvcache/quant/pack.hpp"
#include "world.hpp"

namespace kvcache::test {

/// Memory that ends where its last byte does, so that a sanitizer sees who reads further.
class exact_memory {
 public:
  explicit exact_memory(int64_t size) : bytes_(new std::byte[static_cast<size_t>(size)]), size_(size) {
    std::memset(bytes_.get(), 0xff, static_cast<size_t>(size));
  }
  std::byte* data() const { return bytes_.get(); }
  std::span<std::byte> all() const { return {bytes_.get(), static_cast<size_t>(size_)}; }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  int64_t size_;
};

struct packed_shape {
  kv_format f{};
  int32_t heads = 1, group = 1, dim_k = 64, dim_v = 64, block = 32;
  element type = element::f16;
  k_order order = k_order::transposed;
  int32_t gap = 0;          ///< bytes behind every code row, cell and block; their scales lie elsewhere
  bool head_major = false;  ///< all blocks of a head lie together

  int32_t q_heads() const { return heads * group; }
  int32_t dim(bool of_keys) const { return of_keys ? dim_k : dim_v; }
  const side_format& side(bool of_keys) const { return of_keys ? f.k : f.v; }
  bool coded(bool of_keys) const { return side(of_keys).codes != code::exact; }
  group_shape stored() const {
    return {.layers = 1,
            .kv_heads = heads,
            .head_dim_k = dim_k,
            .head_dim_v = dim_v,
            .type = type,
            .v_aliases_k = false,
            .window = 0};
  }
};

inline float load_value(const std::byte* p, int32_t type) {
  float x = 0;
  uint16_t half = 0;
  std::memcpy(type == KVC_F32 ? static_cast<void*>(&x) : &half, p, type == KVC_F32 ? 4 : 2);
  return type == KVC_F32 ? x : type == KVC_F16 ? to_float(f16{half}) : to_float(bf16{half});
}
inline std::byte* value_at(const kvc_plane& p, int64_t block, int64_t head, int64_t slot, int64_t dim) {
  return static_cast<std::byte*>(p.data) + block * p.block_stride + head * p.head_stride +
         slot * p.token_stride + dim * p.dim_stride;
}

/// The normalised Walsh-Hadamard matrix from its definition.
inline std::vector<double> rotated_in_double(const std::vector<double>& x) {
  std::vector<double> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < x.size(); ++j) out[i] += std::popcount(i & j) % 2 != 0 ? -x[j] : x[j];
    out[i] /= std::sqrt(static_cast<double>(x.size()));
  }
  return out;
}

/// Rows of one sequence that attend together.
struct packed_rows {
  int32_t sequence = 0;
  std::vector<int32_t> positions, borders;  ///< [rows] last slot seen; slots read packed
  std::vector<float> values;                ///< [rows][q_heads][dim_k]
  int32_t kv_len = 0;
};

/// A kvc_batch with its arrays. `plain`: for the f32 planes, where borders inside the table ask for the same
/// two passes.
struct packed_batch {
  kvc_batch b{};
  std::vector<int32_t> table, open, exempt, lens, sealed, borders, starts{0}, positions, k_pos;
  std::vector<float> q;
  int32_t longest = 1, most = 1;

  packed_batch() = default;
  packed_batch(const packed_batch&) = delete;
  const kvc_batch& get() {
    b.struct_size = sizeof b;
    b.n = static_cast<int32_t>(starts.size()) - 1;
    b.table = table.data();
    b.open_table = open.data();
    b.kv_len = lens.data();
    b.sealed = sealed.data();
    b.row_sealed = borders.data();
    b.exempt_table = exempt.data();
    b.q_start = starts.data();
    b.q_pos = positions.data();
    b.k_pos = k_pos.empty() ? nullptr : k_pos.data();
    return b;
  }
  int32_t rows() const { return static_cast<int32_t>(positions.size()); }
};

struct packed_call {
  int32_t target = KVC_TARGET_BEST, width = 1;
  const kvc_executor* executor = nullptr;
  element q_type = element::f32;
  kvc_softmax softmax = causal_softmax(0.125f);
  bool scores = false;
};

struct packed_answer {
  std::vector<float> o, lse, scores;
  bool operator==(const packed_answer& a) const {
    return same_bits(o, a.o) && same_bits(lse, a.lse) && same_bits(scores, a.scores);
  }
};

class packed_world {
 public:
  packed_world(const packed_shape& shape, const std::vector<int32_t>& lengths, uint32_t seed)
      : geo(shape), random(seed), lengths_(lengths) {
    int32_t longest = 0, total = 3;
    for (const int32_t n : lengths) {
      keys.push_back(normal(random, size_t(n) * size_t(geo.heads * geo.dim_k)));
      values.push_back(normal(random, size_t(n) * size_t(geo.heads * geo.dim_v)));
      stretch(keys.back(), geo.heads, geo.dim_k);
      stretch(values.back(), geo.heads, geo.dim_v);
      longest = std::max(longest, n);
      total += ceil_div(n, geo.block);
    }
    columns = std::max(ceil_div(longest, geo.block), 1) + 1;
    describe(total);
    ids(table, total);
    ids(open_table, total);
    for (size_t s = 0; s < lengths.size(); ++s) {
      exempt_table.push_back(geo.f.exempt != 0 ? static_cast<int32_t>(lengths.size() - s) : -1);
    }
    sealed.assign(lengths.size(), std::vector<bool>(static_cast<size_t>(columns), false));
  }

  int32_t length(size_t s) const { return lengths_[s]; }
  int32_t id(size_t s, int32_t column) const { return table[s * size_t(columns) + size_t(column)]; }
  int32_t open_id(size_t s, int32_t column) const { return open_table[s * size_t(columns) + size_t(column)]; }

  /// Appends slots [first, last) to open blocks and, where they are exempt, beside them.
  void append(size_t s, int32_t first, int32_t last, const append_options& options = {}) {
    if (first == last) return;
    std::vector<int64_t> slots, exact;
    for (int32_t i = first; i < last; ++i) {
      slots.push_back(int64_t{open_id(s, i / geo.block)} * geo.block + i % geo.block);
      exact.push_back(i < geo.f.exempt ? int64_t{exempt_table[s]} * geo.f.exempt + i : -1);
    }
    append_options o = options;
    o.open_slots = slots;
    if (geo.f.exempt != 0) o.exempt_slots = exact;
    const auto row = [&](const std::vector<float>& v, int32_t dim) {
      return dense_rows(v.data() + size_t(first) * size_t(geo.heads * dim), element::f32, geo.heads, dim);
    };
    const status done = kvcache::append(kv, row(keys[s], geo.dim_k), row(values[s], geo.dim_v), {}, o);
    if (!done) FAIL("append: " << to_text(done.code) << " " << done.field << " " << done.value);
  }

  kvc_command seal_command(size_t s, int32_t column) const {
    return {KVC_OP_SEAL, 0, 0, geo.block, open_id(s, column), id(s, column), column == 0 ? geo.f.exempt : 0};
  }
  /// Seals all blocks of a sequence below slot `border` that are not sealed yet.
  void seal(size_t s, int32_t border) {
    std::vector<kvc_command> list;
    for (int32_t c = 0; c < border / geo.block; ++c) {
      if (!sealed[s][size_t(c)]) list.push_back(seal_command(s, c));
      sealed[s][size_t(c)] = true;
    }
    const status done = run(std::span(&kv, 1), list);
    if (!done) FAIL("seal: " << to_text(done.code) << " " << done.field << " " << done.value);
  }
  /// Slots that the query at `position` reads packed.
  int32_t border(int32_t position) const {
    return std::max(position + 1 - geo.f.residual, 0) / geo.block * geo.block;
  }
  /// All of it: every row appended, every full block sealed.
  void fill() {
    for (size_t s = 0; s < lengths_.size(); ++s) {
      append(s, 0, lengths_[s]);
      seal(s, lengths_[s]);
    }
    reflect();
    // A side that is not packed is exact where it lies.
    for (const bool k : {true, false}) {
      if (geo.coded(k) || geo.f.exempt == 0) continue;
      const kvc_plane& p = k ? kv.exempt_k : kv.exempt_v;
      for (const exact_memory& m : memory_) {
        if (m.data() == p.data) std::memset(m.data(), 0xff, m.all().size());
      }
    }
  }
  /// NaN in the open form of sealed blocks: nobody may read it any more.
  void forget_open(size_t s, int32_t border) {
    for (int32_t c = 0; c < border / geo.block; ++c) {
      for (int32_t h = 0; h < geo.heads; ++h) {
        for (const bool k : {true, false}) {
          const kvc_plane& p = k ? kv.open_k : kv.open_v;
          const auto cell = size_t(geo.block * geo.dim(k)) * size_t(element_bytes(geo.type));
          std::memset(value_at(p, open_id(s, c), h, 0, 0), 0xff, cell);
        }
      }
    }
  }

  /// Writes what the packed planes hold into the f32 planes.
  void reflect() {
    for (size_t s = 0; s < lengths_.size(); ++s) {
      for (int32_t c = 0; c < ceil_div(lengths_[s], geo.block); ++c) {
        for (const bool k : {true, false}) {
          write_plain(k ? plain.open_k : plain.open_v, open_id(s, c), k, open_values(k, open_id(s, c)));
          if (!sealed[s][size_t(c)]) continue;
          write_plain(k ? plain.k : plain.v, id(s, c), k, sealed_values(k, s, c));
        }
      }
    }
  }

  packed_rows ask(int32_t s, std::vector<int32_t> positions) {
    packed_rows q;
    q.sequence = s;
    for (const int32_t p : positions) q.borders.push_back(border(p));
    q.kv_len = positions.empty() ? lengths_[size_t(s)] : positions.back() + 1;
    q.values = normal(random, positions.size() * size_t(geo.q_heads() * geo.dim_k));
    q.positions = std::move(positions);
    return q;
  }

  void make(std::span<const packed_rows> asked, bool is_plain, packed_batch& out) const {
    out.b.table_columns = columns;
    for (const packed_rows& q : asked) {
      const auto s = size_t(q.sequence);
      int32_t most = 0, least = q.kv_len;
      for (const int32_t b : q.borders) {
        out.borders.push_back(std::min(b, q.kv_len));
        most = std::max(most, b);
        least = std::min(least, b);
      }
      for (int32_t c = 0; c < columns; ++c) {
        const bool below = c * geo.block < std::min(most, q.kv_len);
        const bool above = (c + 1) * geo.block > least && c * geo.block < q.kv_len;
        out.table.push_back(below ? id(s, c) : is_plain && c * geo.block < q.kv_len ? -1 : INT32_MAX - c);
        out.open.push_back(above ? open_id(s, c) : -5 - c);
      }
      out.exempt.push_back(is_plain ? -1 : exempt_table[s]);
      out.lens.push_back(q.kv_len);
      out.sealed.push_back(is_plain ? q.kv_len : most);
      out.positions.insert(out.positions.end(), q.positions.begin(), q.positions.end());
      out.starts.push_back(out.rows());
      out.q.insert(out.q.end(), q.values.begin(), q.values.end());
      out.longest = std::max(out.longest, q.kv_len);
      out.most = std::max(out.most, static_cast<int32_t>(q.positions.size()));
    }
  }

  packed_answer attend(bool is_plain, packed_batch& b, const packed_call& c) const {
    const kvc_kv& used = is_plain ? plain : kv;
    attention at = plan(used, b, c);
    packed_answer a;
    const auto states = size_t(b.rows() * geo.q_heads());
    a.o.assign(states * size_t(geo.dim_v), -12345.0f);
    a.lse.assign(states, -12345.0f);
    kvc_out out = dense_out(a.o.data(), element::f32, geo.q_heads(), geo.dim_v, a.lse.data());
    if (c.scores) {
      a.scores.assign(states * size_t(b.longest), -INFINITY);
      out.key_score = a.scores.data();
      out.key_score_head_stride = b.longest;
      out.key_score_stride = int64_t{b.longest} * geo.q_heads();
    }
    std::vector<uint16_t> small;
    const status done = at.run(used, b.get(), queries(b, c, small), c.softmax, out, c.executor);
    if (!done) FAIL("attend: " << to_text(done.code) << " " << done.field << " " << done.value);
    return a;
  }
  packed_answer attend(bool is_plain, std::span<const packed_rows> asked, const packed_call& c) const {
    packed_batch b;
    make(asked, is_plain, b);
    return attend(is_plain, b, c);
  }

  /// Adds to sum [n][heads][length]; `edit` may change the call.
  template <class Edit>
  void add_scores(packed_batch& b, const packed_call& c, kvc_score what, const packed_answer& a, bool stored,
                  Edit&& edit) const {
    attention at = plan(kv, b, c);
    what.lse2 = a.lse.data();
    if (stored) {
      what.key_score = a.scores.data();
      what.key_score_head_stride = b.longest;
      what.key_score_stride = int64_t{b.longest} * geo.q_heads();
    }
    edit(what);
    std::vector<uint16_t> small;
    const kvc_rows q = stored ? kvc_rows{} : queries(b, c, small);
    const status done = at.score(kv, b.get(), q, c.softmax, what, c.executor);
    if (!done) FAIL("score: " << to_text(done.code) << " " << done.field << " " << done.value);
  }

  /// Largest error of rows in units of what is promised: 1e-5 of the largest sum of weighted magnitudes of a
  /// row, and for lse2 of the largest partial sum of a score. `visible(row, slot)`.
  template <class Visible>
  double error(const packed_rows& q, const packed_call& c, std::span<const float> o,
               std::span<const float> lse, Visible&& visible) const {
    double worst = 0;
    for (size_t r = 0; r < q.positions.size(); ++r) {
      for (int32_t h = 0; h < geo.q_heads(); ++h) {
        const size_t at = r * size_t(geo.q_heads()) + size_t(h);
        const double e = row_error(q, r, h, c, o.subspan(at * size_t(geo.dim_v), size_t(geo.dim_v)), lse[at],
                                   [&](int32_t j) { return visible(static_cast<int32_t>(r), j); });
        worst = e <= worst ? worst : e;  // NaN too
      }
    }
    return worst;
  }

  /// [heads][block][dim] of an open block.
  std::vector<float> open_values(bool k, int32_t block) const {
    return plane_values(k ? kv.open_k : kv.open_v, k, block);
  }
  /// Codes and scales of a block as format.hpp draws them.
  std::vector<std::byte> packed_side(bool k, int32_t block) const {
    const side_layout l = layout_of(geo.side(k), geo.stored(), geo.block, k);
    std::vector<std::byte> side(size_t(l.bytes));
    each_piece(k, block, [&](int64_t offset, std::byte* at, int64_t n) {
      std::memcpy(side.data() + offset, at, size_t(n));
    });
    return side;
  }
  /// Calls f(offset in a packed side, where the planes have it, bytes) for every run of codes or scales.
  template <class F>
  void each_piece(bool k, int32_t block, F&& f) const {
    const side_layout l = layout_of(geo.side(k), geo.stored(), geo.block, k);
    const kvc_plane& p = k ? kv.k : kv.v;
    const int64_t rows = k ? geo.dim_k : geo.block, stride = k ? p.dim_stride : p.token_stride;
    const int64_t n = 2 * scales_of_cell(geo.side(k), geo.block, geo.dim(k));
    for (int64_t h = 0; h < geo.heads; ++h) {
      for (int64_t r = 0; r < rows; ++r) {
        f(h * l.head_stride + r * l.code_row, value_at(p, block, h, 0, 0) + r * stride, l.code_row);
      }
      if (h > 0 && l.scale_stride == 0) continue;
      const int64_t at = block * p.scale_block_stride + h * p.scale_head_stride;
      f(h * l.scale_stride + l.scale, static_cast<std::byte*>(p.scale) + at, n);
      if (p.zero != nullptr) f(h * l.scale_stride + l.minimum, static_cast<std::byte*>(p.zero) + at, n);
    }
  }
  /// [heads][block][dim] of a sealed block as they are read.
  std::vector<float> sealed_values(bool k, size_t s, int32_t column) const {
    if (!geo.coded(k)) return plane_values(k ? kv.k : kv.v, k, id(s, column));
    std::vector<float> out(size_t(geo.heads * geo.block * geo.dim(k)));
    unpack_cells(geo.side(k), geo.stored(), geo.block, k, packed_side(k, id(s, column)).data(), out.data());
    const kvc_plane& p = k ? kv.exempt_k : kv.exempt_v;
    for (int32_t h = 0; h < geo.heads && column == 0 && exempt_table[s] >= 0; ++h) {
      for (int32_t t = 0; t < geo.f.exempt; ++t) {
        for (int32_t d = 0; d < geo.dim(k); ++d) {
          out[size_t((h * geo.block + t) * geo.dim(k) + d)] =
              load_value(value_at(p, exempt_table[s], h, t, d), p.type);
        }
      }
    }
    return out;
  }
  /// All memory of the packed planes.
  std::vector<std::span<std::byte>> memory() const {
    std::vector<std::span<std::byte>> all;
    for (const exact_memory& m : memory_) all.push_back(m.all());
    return all;
  }

  packed_shape geo;
  std::mt19937 random;
  kvc_kv kv{}, plain{};
  int32_t columns = 0;
  std::vector<int32_t> table, open_table, exempt_table;
  std::vector<std::vector<float>> keys, values;  ///< [sequence][slot][heads][dim] as appended
  std::vector<std::vector<bool>> sealed;         ///< [sequence][column]

 private:
  /// Two channels and the first token are larger than the rest, as in models; one is next to nothing, so that
  /// small floats are zeros of both signs.
  static void stretch(std::vector<float>& v, int32_t heads, int32_t dim) {
    for (size_t i = 0; i < v.size(); ++i) {
      const auto d = static_cast<int32_t>(i % size_t(dim));
      if (d == 3 || d == dim / 2 + 1) v[i] = v[i] * 3 + 2;
      if (i < size_t(heads * dim)) v[i] *= 3;
      if (d == 5) v[i] *= 1e-9f;
    }
  }
  void ids(std::vector<int32_t>& to, int32_t total) {
    std::vector<int32_t> all(static_cast<size_t>(total));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    size_t next = 0;
    for (const int32_t n : lengths_) {
      for (int32_t c = 0; c < columns; ++c) {
        to.push_back(c < ceil_div(n, geo.block) ? all[next++] : std::numeric_limits<int32_t>::min());
      }
    }
  }
  std::byte* take(int64_t size) {
    memory_.emplace_back(size);
    return memory_.back().data();
  }
  /// Strides of cells of `cell` bytes, the last of which has `last`; returns the bytes they take.
  int64_t place(int64_t cell, int64_t last, int64_t blocks, int64_t gap, int64_t& block, int64_t& head) {
    head = geo.head_major ? (cell + gap) * blocks : cell + gap;
    block = geo.head_major ? cell + gap : (cell + gap) * geo.heads + gap;
    return block * (blocks - 1) + head * (geo.heads - 1) + last;
  }
  kvc_plane values_plane(int32_t slots, int32_t dim, int64_t blocks, element type, bool transposed) {
    const group_shape s{.layers = 1, .kv_heads = geo.heads, .type = type};
    kvc_plane p = detail::plane_of_cells(nullptr, s, slots, dim, transposed, 0);
    const int64_t cell = int64_t{slots} * dim * element_bytes(type);
    p.data = take(place(cell, cell, blocks, geo.gap * element_bytes(type), p.block_stride, p.head_stride));
    return p;
  }
  kvc_plane sealed_plane(bool k, int64_t blocks) {
    const side_format& f = geo.side(k);
    if (f.codes == code::exact) return values_plane(geo.block, geo.dim(k), blocks, geo.type, k);
    kvc_plane p{};
    p.type = static_cast<int16_t>(f.codes);
    p.scale_kind = static_cast<int16_t>(int32_t(f.axis) + KVC_SCALE_TENSOR);
    p.clip = static_cast<int16_t>(f.clip);
    if (f.axis == scale_axis::token || f.axis == scale_axis::channel) {
      p.scale_group = static_cast<int16_t>(group_of(f, geo.block, geo.dim(k)));
    }
    const int64_t rows = k ? geo.dim_k : geo.block;
    const int64_t row = code_row_bytes(f.codes, k ? geo.block : geo.dim_v), stride = row + geo.gap;
    const int64_t n = 2 * scales_of_cell(f, geo.block, geo.dim(k));
    (k ? p.dim_stride : p.token_stride) = stride;
    p.data =
        take(place(stride * rows, stride * (rows - 1) + row, blocks, geo.gap, p.block_stride, p.head_stride));
    int64_t size = place(n, n, blocks, 2 * geo.gap, p.scale_block_stride, p.scale_head_stride);
    if (f.axis == scale_axis::tensor) {
      p.scale_head_stride = 0;
      p.scale_block_stride = 2;
      size = 2 * blocks;
    }
    p.scale = take(size);
    p.zero = has_minimum(f) ? take(size) : nullptr;
    return p;
  }
  void describe(int32_t total) {
    kv.struct_size = sizeof kv;
    kv.kv_heads = geo.heads;
    kv.dim_k = geo.dim_k;
    kv.dim_v = geo.dim_v;
    kv.block = geo.block;
    kv.blocks = kv.open_blocks = total;
    kv.hadamard = (geo.f.k.hadamard ? KVC_HADAMARD_K : 0) | (geo.f.v.hadamard ? KVC_HADAMARD_V : 0);
    plain = kv;
    const bool transposed = geo.order == k_order::transposed;
    for (kvc_plane* p : {&plain.k, &plain.open_k})
      *p = values_plane(geo.block, geo.dim_k, total, element::f32, transposed);
    for (kvc_plane* p : {&plain.v, &plain.open_v})
      *p = values_plane(geo.block, geo.dim_v, total, element::f32, false);
    for (exact_memory& m : memory_) plain_memory_.push_back(std::move(m));
    memory_.clear();
    kv.k = sealed_plane(true, total);
    kv.v = sealed_plane(false, total);
    kv.open_k = values_plane(geo.block, geo.dim_k, total, geo.type, transposed);
    kv.open_v = values_plane(geo.block, geo.dim_v, total, geo.type, false);
    if (geo.f.exempt == 0) return;
    kv.exempt = geo.f.exempt;
    kv.exempt_blocks = static_cast<int32_t>(lengths_.size()) + 1;
    kv.exempt_k = values_plane(kv.exempt, geo.dim_k, kv.exempt_blocks, geo.type, false);
    kv.exempt_v = values_plane(kv.exempt, geo.dim_v, kv.exempt_blocks, geo.type, false);
  }

  std::vector<float> plane_values(const kvc_plane& p, bool k, int32_t block) const {
    std::vector<float> out;
    for (int32_t h = 0; h < geo.heads; ++h) {
      for (int32_t t = 0; t < geo.block; ++t) {
        for (int32_t d = 0; d < geo.dim(k); ++d)
          out.push_back(load_value(value_at(p, block, h, t, d), p.type));
      }
    }
    return out;
  }
  void write_plain(const kvc_plane& p, int32_t block, bool k, const std::vector<float>& from) const {
    const float* x = from.data();
    for (int32_t h = 0; h < geo.heads; ++h) {
      for (int32_t t = 0; t < geo.block; ++t) {
        for (int32_t d = 0; d < geo.dim(k); ++d) std::memcpy(value_at(p, block, h, t, d), x++, 4);
      }
    }
  }
  float plain_value(bool k, const packed_rows& q, size_t row, int32_t j, int32_t head, int32_t d) const {
    const auto s = size_t(q.sequence);
    const bool is_sealed = j < q.borders[row];
    const kvc_plane& p = is_sealed ? (k ? plain.k : plain.v) : (k ? plain.open_k : plain.open_v);
    const int32_t block = is_sealed ? id(s, j / geo.block) : open_id(s, j / geo.block);
    return load_value(value_at(p, block, head, j % geo.block, d), KVC_F32);
  }

  attention plan(const kvc_kv& used, const packed_batch& b, const packed_call& c) const {
    auto at = attention::create(used, {.q_heads = geo.q_heads(),
                                       .sequences = std::max(static_cast<int32_t>(b.starts.size()) - 1, 1),
                                       .rows = b.most,
                                       .slots = b.longest,
                                       .width = c.width,
                                       .q_type = c.q_type,
                                       .target = c.target,
                                       .features = KVC_USE_OPEN | KVC_USE_KEY_SCORE});
    if (!at) FAIL("plan: " << to_text(at.error().code) << " " << at.error().field << " " << at.error().value);
    return std::move(*at);
  }
  kvc_rows queries(const packed_batch& b, const packed_call& c, std::vector<uint16_t>& small) const {
    if (c.q_type == element::f32) return dense_rows(b.q.data(), c.q_type, geo.q_heads(), geo.dim_k);
    for (const float x : b.q) small.push_back(c.q_type == element::f16 ? to_f16(x).bits : to_bf16(x).bits);
    return dense_rows(small.data(), c.q_type, geo.q_heads(), geo.dim_k);
  }

  template <class Visible>
  double row_error(const packed_rows& q, size_t r, int32_t h, const packed_call& c, std::span<const float> o,
                   float lse, Visible&& visible) const {
    const kvc_softmax& s = c.softmax;
    const int32_t head = h / geo.group;
    std::vector<double> x(size_t(geo.dim_k)), score, row(size_t(geo.dim_v)), size(size_t(geo.dim_v));
    for (size_t d = 0; d < x.size(); ++d) {
      x[d] = rounded(q.values[(r * size_t(geo.q_heads()) + size_t(h)) * x.size() + d], c.q_type);
    }
    if (geo.f.k.hadamard) x = rotated_in_double(x);
    double top = s.sink_logit != nullptr ? s.sink_logit[h] : -INFINITY, reach = 1;
    for (int32_t j = 0; j < q.kv_len; ++j) {
      double sum = 0;
      for (size_t d = 0; d < x.size() && visible(j); ++d) {
        sum += x[d] * plain_value(true, q, r, j, head, int32_t(d));
        reach = std::max(reach, std::fabs(sum * s.scale));
      }
      sum *= s.scale;
      if (s.soft_cap > 0) sum = s.soft_cap * std::tanh(sum / s.soft_cap);
      score.push_back(visible(j) ? sum : -INFINITY);
      top = std::max(top, score.back());
    }
    double total = s.sink_logit != nullptr ? std::exp(s.sink_logit[h] - top) : 0;
    for (int32_t j = 0; j < q.kv_len; ++j) {
      if (score[size_t(j)] == -INFINITY) continue;
      const double w = std::exp(score[size_t(j)] - top);
      total += w;
      for (size_t d = 0; d < row.size(); ++d) {
        const double v = plain_value(false, q, r, j, head, int32_t(d));
        row[d] += w * v;
        size[d] += w * std::fabs(v);
      }
    }
    if (total == 0) {
      const bool zero = std::all_of(o.begin(), o.end(), [](float v) { return v == 0; });
      return zero && lse == -INFINITY ? 0 : INFINITY;
    }
    if (geo.f.v.hadamard) row = rotated_in_double(row);
    double most = *std::max_element(size.begin(), size.end()), worst = 0;
    for (size_t d = 0; d < row.size(); ++d) {
      const double e = std::fabs(o[d] - row[d] / total);
      worst = e <= worst ? worst : e;
    }
    worst = most == 0 ? worst : worst * total / most;
    const double off = std::fabs(lse - (top + std::log(total)) / std::log(2.0)) / reach;
    return (off <= worst ? worst : off) / 1e-5;
  }

  std::vector<exact_memory> memory_, plain_memory_;
  std::vector<int32_t> lengths_;
};

/// A valid format for one side.
inline side_format random_side(std::mt19937& random, int32_t dim, int32_t block, bool may_be_exact) {
  for (;;) {
    side_format f;
    f.codes = static_cast<code>(3 + random() % 8);
    if (may_be_exact && random() % 8 == 0) f.codes = code::exact;
    f.axis = static_cast<scale_axis>(random() % 4);
    f.group_size = pick(random, {0, 8, 16, 24, 32, 64});
    f.symmetric = random() % 2 == 0;
    f.clip = random() % 3 == 0 ? static_cast<clip_search>(random() % 3) : clip_search::none;
    f.hadamard = is_power_of_two(dim) && random() % 4 == 0;
    if (f.codes != code::exact && detail::validate_side(f, dim, block)) return f;
    if (f.codes == code::exact) {
      side_format exact;
      exact.hadamard = f.hadamard;
      return exact;
    }
  }
}

inline packed_shape random_packed_shape(std::mt19937& random) {
  packed_shape g;
  g.dim_k = pick(random, {64, 128, 80, 96, 72, 8, 256});
  g.dim_v = random() % 2 == 0 ? g.dim_k : pick(random, {64, 128, 80, 96, 8, 256});
  g.group = pick(random, {1, 3, 4, 8});
  g.heads = pick(random, {1, 2, 3});
  g.block = pick(random, {32, 64, 128});
  g.type = pick(random, {element::f16, element::f32, element::bf16});
  g.order = random() % 2 == 0 ? k_order::transposed : k_order::row_major;
  g.gap = pick(random, {0, 0, 1, 8});
  g.head_major = random() % 2 == 0;
  do {
    g.f.k = random_side(random, g.dim_k, g.block, true);
    g.f.v = random_side(random, g.dim_v, g.block, true);
  } while (!lossy(g.f));
  g.f.residual = pick(random, {0, 1, g.block / 2, g.block, g.block + 3});
  g.f.exempt = pick(random, {0, 1, 2, 4});
  return g;
}

inline std::string text_of(const packed_shape& g) {
  const auto side = [](const side_format& f) {
    return "codes " + std::to_string(int(f.codes)) + " axis " + std::to_string(int(f.axis)) + " group " +
           std::to_string(f.group_size) + (f.symmetric ? " symmetric" : "") +
           (f.hadamard ? " hadamard" : "") + " clip " + std::to_string(int(f.clip));
  };
  return "k: " + side(g.f.k) + "; v: " + side(g.f.v) + "; residual " + std::to_string(g.f.residual) +
         " exempt " + std::to_string(g.f.exempt) + " heads " + std::to_string(g.heads) + "x" +
         std::to_string(g.group) + " dims " + std::to_string(g.dim_k) + "," + std::to_string(g.dim_v) +
         " block " + std::to_string(g.block) + " type " + std::to_string(int(g.type)) + " order " +
         std::to_string(int(g.order)) + " gap " + std::to_string(g.gap) + " head_major " +
         std::to_string(g.head_major);
}

}  // namespace kvcache::test
