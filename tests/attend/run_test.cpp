// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>
#include <numeric>

#include "world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

/// Planes of two layers and a plain copy of what every slot holds: [layer][k or v][block][head][slot][dim].
class shadow {
 public:
  shadow(element type, k_order order, int32_t block, uint32_t seed) : block_(block), random(seed) {
    auto made = host_planes::create(
        {.shape = {.layers = 2, .kv_heads = 2, .head_dim_k = 16, .head_dim_v = 24, .type = type},
         .block_size = block,
         .blocks = 8,
         .order = order});
    REQUIRE(made);
    planes = std::move(*made);
    for (int32_t layer = 0; layer < 2; ++layer) {
      for (int32_t v = 0; v < 2; ++v) {
        for (auto& x : at(layer, v)) x = rounded(std::normal_distribution<float>()(random), type);
        each(
            [&](int32_t b, int32_t h, int32_t t, int32_t d, std::byte* p) {
              const float x = value(layer, v, b, h, t, d);
              if (type == element::f32) std::memcpy(p, &x, 4);
              const uint16_t half = type == element::f16 ? to_f16(x).bits : to_bf16(x).bits;
              if (type != element::f32) std::memcpy(p, &half, 2);
            },
            layer, v);
      }
    }
  }

  int32_t dim(int32_t v) const { return v != 0 ? 24 : 16; }
  std::vector<float>& at(int32_t layer, int32_t v) {
    auto& a = values_[size_t(layer * 2 + v)];
    if (a.empty()) a.resize(size_t(8 * 2 * block_ * dim(v)));
    return a;
  }
  float& value(int32_t layer, int32_t v, int32_t b, int32_t h, int32_t t, int32_t d) {
    return at(layer, v)[size_t((((b * 2 + h) * block_ + t)) * dim(v) + d)];
  }

  /// Largest difference between planes and shadow; NaN counts as infinite.
  double difference() {
    double worst = 0;
    for (int32_t layer = 0; layer < 2; ++layer) {
      for (int32_t v = 0; v < 2; ++v) {
        each(
            [&](int32_t b, int32_t h, int32_t t, int32_t d, std::byte* p) {
              float x = 0;
              uint16_t half = 0;
              const kvc_plane& plane = v != 0 ? planes.layer(layer).v : planes.layer(layer).k;
              std::memcpy(&half, p, 2);
              if (plane.type == KVC_F32) std::memcpy(&x, p, 4);
              if (plane.type == KVC_F16) x = to_float(f16{half});
              if (plane.type == KVC_BF16) x = to_float(bf16{half});
              const double e = std::abs(double{x} - value(layer, v, b, h, t, d));
              worst = std::isfinite(e) ? std::max(worst, e) : INFINITY;
            },
            layer, v);
      }
    }
    return worst;
  }

  template <class F>
  void each(F&& f, int32_t layer, int32_t v) {
    const kvc_plane& p = v != 0 ? planes.layer(layer).v : planes.layer(layer).k;
    for (int32_t b = 0; b < 8; ++b) {
      for (int32_t h = 0; h < 2; ++h) {
        for (int32_t t = 0; t < block_; ++t) {
          for (int32_t d = 0; d < dim(v); ++d) {
            f(b, h, t, d,
              static_cast<std::byte*>(p.data) + b * p.block_stride + h * p.head_stride + t * p.token_stride +
                  d * p.dim_stride);
          }
        }
      }
    }
  }

  /// The plain form of copy: `tokens` slots of src to dst.
  void copy(int32_t src, int32_t dst, int32_t tokens) {
    for (int32_t layer = 0; layer < 2; ++layer) {
      for (int32_t v = 0; v < 2; ++v) {
        for (int32_t h = 0; h < 2; ++h) {
          for (int32_t t = 0; t < tokens; ++t) {
            for (int32_t d = 0; d < dim(v); ++d)
              value(layer, v, dst, h, t, d) = value(layer, v, src, h, t, d);
          }
        }
      }
    }
  }

 private:
  int32_t block_;

 public:
  std::mt19937 random;
  host_planes planes;

 private:
  std::vector<float> values_[4];
};

kvc_command make(int32_t op, int32_t stage, int32_t tokens, int32_t src, int32_t dst, int32_t arg = 0) {
  return {static_cast<uint8_t>(op), 0, static_cast<uint16_t>(stage), tokens, src, dst, arg};
}

constexpr element types[] = {element::f32, element::f16, element::bf16};
constexpr k_order orders[] = {k_order::transposed, k_order::row_major};

}  // namespace

TEST_CASE("copy and zero move exactly the slots they name, in every layer and head", "[run]") {
  for (const element type : types) {
    for (const k_order order : orders) {
      for (const int32_t tokens : {0, 1, 5, 16}) {
        shadow s(type, order, 16, 3);
        const kvc_command list[] = {make(KVC_OP_COPY, 0, tokens, 2, 5), make(KVC_OP_ZERO, 0, tokens, -1, 7)};
        REQUIRE(run(s.planes.layers(), list));
        s.copy(2, 5, tokens);
        for (int32_t layer = 0; layer < 2; ++layer) {
          for (int32_t v = 0; v < 2; ++v) {
            for (int32_t h = 0; h < 2; ++h) {
              for (int32_t t = 0; t < tokens; ++t) {
                for (int32_t d = 0; d < s.dim(v); ++d) s.value(layer, v, 7, h, t, d) = 0;
              }
            }
          }
        }
        INFO("type " << int(type) << " order " << int(order) << " tokens " << tokens);
        CHECK(s.difference() == 0);
      }
    }
  }
}

TEST_CASE("stages run in ascending order wherever their commands stand in the list", "[run][threads]") {
  const thread_executor three(3);
  const kvc_executor* executors[] = {nullptr, three.get()};
  for (const kvc_executor* executor : executors) {
    shadow s(element::f16, k_order::transposed, 8, 5);
    // X -> Y, then Z -> X, then X -> W; listed backwards, with a gap in the stage numbers.
    const kvc_command list[] = {make(KVC_OP_COPY, 900, 8, 0, 3), make(KVC_OP_COPY, 7, 8, 2, 0),
                                make(KVC_OP_COPY, 0, 8, 0, 1)};
    REQUIRE(run(s.planes.layers(), list, {.executor = executor}));
    s.copy(0, 1, 8);
    s.copy(2, 0, 8);
    s.copy(0, 3, 8);
    CHECK(s.difference() == 0);
  }
}

TEST_CASE("random command lists equal the plain copies they stand for", "[run]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("run", 17)));
  for (int64_t round = 0; round < effort(200); ++round) {
    shadow s(types[random() % 3], orders[random() % 2], 4 << random() % 3, static_cast<uint32_t>(random()));
    const int32_t block = s.planes.layer(0).block;
    std::vector<kvc_command> list;
    for (int32_t stage = 0; stage < 6; ++stage) {
      const auto src = static_cast<int32_t>(random() % 8), dst = static_cast<int32_t>(random() % 8);
      const auto tokens = static_cast<int32_t>(random() % uint32_t(block + 1));
      list.push_back(make(KVC_OP_COPY, stage, tokens, src, dst));
      s.copy(src, dst, tokens);
    }
    std::shuffle(list.begin(), list.end(), random);
    REQUIRE(run(s.planes.layers(), list));
    REQUIRE(s.difference() == 0);
  }
}

TEST_CASE("sealing converts the open block to the stored type", "[run]") {
  for (const element type : types) {
    shadow main(type, k_order::transposed, 16, 7), open(element::f32, k_order::row_major, 16, 8);
    std::vector<kvc_kv> layers(main.planes.layers().begin(), main.planes.layers().end());
    for (size_t i = 0; i < 2; ++i) {
      layers[i].open_k = open.planes.layer(int32_t(i)).k;
      layers[i].open_v = open.planes.layer(int32_t(i)).v;
      layers[i].open_blocks = 8;
    }
    const kvc_command list[] = {make(KVC_OP_COPY_OPEN, 0, 9, 1, 2), make(KVC_OP_SEAL, 1, 16, 2, 6)};
    REQUIRE(run(layers, list));
    open.copy(1, 2, 9);
    CHECK(open.difference() == 0);
    for (int32_t layer = 0; layer < 2; ++layer) {
      for (int32_t v = 0; v < 2; ++v) {
        for (int32_t h = 0; h < 2; ++h) {
          for (int32_t t = 0; t < 16; ++t) {
            for (int32_t d = 0; d < main.dim(v); ++d) {
              main.value(layer, v, 6, h, t, d) = rounded(open.value(layer, v, 2, h, t, d), type);
            }
          }
        }
      }
    }
    CHECK(main.difference() == 0);
  }
}

TEST_CASE("gather keeps the listed slots per head and layer, also into its own blocks", "[run]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("gather", 23)));
  for (int64_t round = 0; round < effort(150); ++round) {
    shadow s(types[random() % 3], orders[random() % 2], 8, static_cast<uint32_t>(random()));
    std::vector<int32_t> blocks(8);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random);
    const int32_t n_src = 1 + int32_t(random() % 4), tokens = 1 + int32_t(random() % uint32_t(n_src * 8));
    const int32_t n_dst = ceil_div(tokens, 8);
    const bool in_place = random() % 2 == 0;
    std::vector<int32_t> ids{-1, -1, n_src, n_dst, 1};  // the payload need not start at 0
    ids.insert(ids.end(), blocks.begin(), blocks.begin() + n_src);
    const auto dst = in_place ? blocks.begin() : blocks.begin() + 4;
    ids.insert(ids.end(), dst, dst + n_dst);
    std::vector<int32_t> kept;  // [layer][head][tokens]
    for (int i = 0; i < 4; ++i) {
      std::vector<int32_t> all(size_t(n_src) * 8);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random);
      std::sort(all.begin(), all.begin() + tokens);
      kept.insert(kept.end(), all.begin(), all.begin() + tokens);
    }
    const kvc_keep keeps[] = {{nullptr, 0, 0}, {kept.data(), tokens, tokens * 2}};
    const kvc_command list[] = {make(KVC_OP_GATHER, 0, tokens, -1, -1, 2)};
    REQUIRE(run(s.planes.layers(), list, {.ids = ids, .keeps = keeps}));
    for (int32_t layer = 0; layer < 2; ++layer) {
      for (int32_t v = 0; v < 2; ++v) {
        const std::vector<float> before = s.at(layer, v);
        for (int32_t h = 0; h < 2; ++h) {
          for (int32_t t = 0; t < tokens; ++t) {
            const int32_t from = kept[size_t((layer * 2 + h) * tokens + t)];
            for (int32_t d = 0; d < s.dim(v); ++d) {
              const size_t at = size_t(((blocks[size_t(from / 8)] * 2 + h) * 8 + from % 8) * s.dim(v) + d);
              s.value(layer, v, dst[t / 8], h, t % 8, d) = before[at];
            }
          }
        }
      }
    }
    REQUIRE(s.difference() == 0);
  }
}

TEST_CASE("attending after a gather equals attending with the dropped slots masked", "[run]") {
  for (const int32_t t : targets()) {
    world w({.heads = 2, .group = 2, .block = 16}, {160}, 29);
    w.append_all();
    std::vector<int32_t> kept;
    for (int32_t j = 0; j < 160; ++j) {
      if (j < 4 || j > 150 || j % 3 == 0) kept.push_back(j);
    }
    const auto n = static_cast<int32_t>(kept.size());
    const std::vector<query> qs{w.ask(0, {160})};
    call c;
    c.target = t;
    std::vector<double> o, lse;
    w.oracle(
        qs[0], 160, causal_softmax(0.125f), c.q_type,
        [&](int32_t, int32_t j) { return std::binary_search(kept.begin(), kept.end(), j); }, o, lse);
    const int32_t n_dst = ceil_div(n, 16);
    std::vector<int32_t> ids{10, n_dst, 0};
    ids.insert(ids.end(), w.row_of_table(0), w.row_of_table(0) + 10);
    ids.insert(ids.end(), w.row_of_table(0), w.row_of_table(0) + n_dst);
    const kvc_keep keep{kept.data(), 0, 0};
    const kvc_command list[] = {make(KVC_OP_GATHER, 0, n, 0, 0, 0)};
    REQUIRE(run(w.planes.layers(), list, {.ids = ids, .keeps = std::span(&keep, 1)}));
    const answer a = w.attend(qs, {n}, causal_softmax(0.125f), c);
    CHECK(deviation(a.o, o) < 1e-5);
    CHECK(deviation(a.lse, lse) < 1e-5);
  }
}

TEST_CASE("layers of other groups and borrowed layers are left alone", "[run]") {
  const int32_t owners[] = {0, 0, 2};
  auto planes = host_planes::create(
      {.shape = {.layers = 2, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8, .type = element::f32},
       .block_size = 4,
       .blocks = 2,
       .group = 3,
       .layer_owner = owners});
  REQUIRE(planes);
  REQUIRE(planes->layers().size() == 3);
  CHECK(planes->layer(1).k.data == planes->layer(0).k.data);
  CHECK(planes->layer(1).owner == 1);
  auto* k = static_cast<float*>(planes->layer(0).k.data);
  for (int i = 0; i < 32; ++i) k[i] = 1.0f;
  const double turn_by = 3.14159265358979323846 / 2;
  const std::vector<double> frequency(4, turn_by);
  auto r = rope::create({.dims = 8, .frequency = frequency});
  REQUIRE(r);
  kvc_command c = make(KVC_OP_ROTATE, 0, 4, -1, 0, 1);
  c.group = 2;
  const status lost = run(planes->layers(), std::span(&c, 1), {.rope = &r->view()});
  CHECK((lost.code == errc::bad_argument && std::string(lost.field) == "layers"));
  c.group = 3;
  REQUIRE(run(planes->layers(), std::span(&c, 1), {.rope = &r->view()}));
  // Turned by a quarter once: (1, 1) -> (-1, 1). Twice would be (-1, -1).
  for (int d = 0; d < 4; ++d) {
    CHECK(k[d * 4] == Approx(-1.0f));
    CHECK(k[(d + 4) * 4] == Approx(1.0f));
  }
}
