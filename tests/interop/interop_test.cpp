// SPDX-License-Identifier: Apache-2.0
// Views of other libraries, element by element against what append stored.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/core/numeric.hpp"
#include "kvcache/interop/dlpack.hpp"
#include "kvcache/interop/eigen.hpp"

namespace {

using namespace kvcache;

constexpr int32_t layers = 2, heads = 3, dim_k = 24, dim_v = 16, block = 8, total = 5;

// Planes whose every slot was appended; the values are kept beside them.
struct filled {
  host_planes planes;
  std::vector<float> k, v;  // [layer][slot][head][dim]
  bool alias;

  filled(element type, k_order order, bool v_aliases_k) : alias(v_aliases_k) {
    host_planes_config c;
    c.shape = {.layers = layers, .kv_heads = heads, .head_dim_k = dim_k, .head_dim_v = dim_v, .type = type};
    c.shape.v_aliases_k = alias;
    c.block_size = block;
    c.blocks = total;
    c.order = order;
    auto made = host_planes::create(c);
    REQUIRE(made);
    planes = std::move(*made);
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    constexpr int32_t slots = total * block;
    k.resize(size_t{layers} * slots * heads * dim_k);
    v.resize(size_t{layers} * slots * heads * dim_v);
    for (float& x : k) x = normal(random);
    for (float& x : v) x = normal(random);
    std::vector<int64_t> slot(slots);
    for (int32_t i = 0; i < slots; ++i) slot[static_cast<size_t>(i)] = i;
    for (int32_t i = 0; i < layers; ++i) {
      const auto keys = dense_rows(&k[size_t(i) * slots * heads * dim_k], element::f32, heads, dim_k);
      const auto values = dense_rows(&v[size_t(i) * slots * heads * dim_v], element::f32, heads, dim_v);
      REQUIRE(append(planes.layer(i), keys, alias ? kvc_rows{} : values, slot));
    }
  }
  float key(int32_t layer, int32_t slot, int32_t head, int32_t d) const {
    return k[((size_t(layer) * total * block + size_t(slot)) * heads + size_t(head)) * dim_k + size_t(d)];
  }
  float value(int32_t layer, int32_t slot, int32_t head, int32_t d) const {
    if (alias) return key(layer, slot, head, d);
    return v[((size_t(layer) * total * block + size_t(slot)) * heads + size_t(head)) * dim_v + size_t(d)];
  }
};

template <class Stored, class Scalar>
bool same_bits(Scalar in_view, float appended) {
  const Stored want = narrow<Stored>(appended);
  static_assert(sizeof want == sizeof in_view);
  return std::memcmp(&in_view, &want, sizeof want) == 0;
}

template <class Stored, class Scalar>
void compare_eigen(const filled& f) {
  for (int32_t layer = 0; layer < layers; ++layer) {
    const kvc_kv& kv = f.planes.layer(layer);
    int32_t wrong = 0;
    for (int32_t b = 0; b < total; ++b) {
      for (int32_t h = 0; h < heads; ++h) {
        const auto k = key_cell<const Scalar>(kv, block_id{b}, h);
        const auto v = value_cell<const Scalar>(kv, block_id{b}, h);
        REQUIRE((k.rows() == block && k.cols() == dim_k && v.rows() == block && v.cols() == dim_v));
        for (int32_t t = 0; t < block; ++t) {
          const int32_t slot = b * block + t;
          for (int32_t d = 0; d < dim_k; ++d) {
            wrong += !same_bits<Stored>(k(t, d), f.key(layer, slot, h, d));
            wrong += !same_bits<Stored>(key_channel<const Scalar>(kv, h, d)(b, t), f.key(layer, slot, h, d));
          }
          for (int32_t d = 0; d < dim_v; ++d) {
            wrong += !same_bits<Stored>(v(t, d), f.value(layer, slot, h, d));
            wrong +=
                !same_bits<Stored>(value_channel<const Scalar>(kv, h, d)(b, t), f.value(layer, slot, h, d));
          }
        }
      }
    }
    CHECK(wrong == 0);
  }
}

template <class Stored>
int32_t differences(const dlpack_managed_tensor& m, const filled& f, plane_role role, int32_t only_layer) {
  const dlpack_tensor& t = m.tensor;
  const int32_t lead = t.ndim - 4;
  const auto* data = reinterpret_cast<const Stored*>(static_cast<const char*>(t.data) + t.byte_offset);
  int32_t wrong = 0;
  for (int64_t layer = 0; layer < (lead == 1 ? t.shape[0] : 1); ++layer) {
    for (int64_t b = 0; b < t.shape[lead]; ++b) {
      for (int64_t h = 0; h < t.shape[lead + 1]; ++h) {
        for (int64_t s = 0; s < t.shape[lead + 2]; ++s) {
          for (int64_t d = 0; d < t.shape[lead + 3]; ++d) {
            const int64_t at = (lead == 1 ? layer * t.strides[0] : 0) + b * t.strides[lead] +
                               h * t.strides[lead + 1] + s * t.strides[lead + 2] + d * t.strides[lead + 3];
            const auto of = static_cast<int32_t>(lead == 1 ? layer : only_layer);
            const auto slot = static_cast<int32_t>(b * block + s);
            const float want = role == plane_role::key ? f.key(of, slot, int32_t(h), int32_t(d))
                                                       : f.value(of, slot, int32_t(h), int32_t(d));
            wrong += !same_bits<Stored>(data[at], want);
          }
        }
      }
    }
  }
  return wrong;
}

template <class Stored>
void compare_dlpack(const filled& f, uint8_t code, uint8_t bits) {
  for (const plane_role role : {plane_role::key, plane_role::value}) {
    for (int32_t layer = 0; layer < layers; ++layer) {
      const auto one = to_dlpack(f.planes.layer(layer), role);
      REQUIRE(one);
      const dlpack_managed_tensor& m = **one;
      CHECK((m.version.major == 1 && m.flags == dlpack_read_only && m.tensor.ndim == 4));
      CHECK((m.tensor.dtype.code == code && m.tensor.dtype.bits == bits && m.tensor.dtype.lanes == 1));
      CHECK((m.tensor.device.type == 1 && m.tensor.device.id == 0));
      CHECK(m.tensor.shape[3] == (role == plane_role::key ? dim_k : dim_v));
      CHECK(differences<Stored>(m, f, role, layer) == 0);
      (*one)->deleter(*one);
    }
    const auto all = group_to_dlpack(f.planes.layers(), role, {.read_only = false});
    REQUIRE(all);
    CHECK(((*all)->tensor.ndim == 5 && (*all)->tensor.shape[0] == layers && (*all)->flags == 0));
    CHECK(differences<Stored>(**all, f, role, 0) == 0);
    (*all)->deleter(*all);
  }
}

}  // namespace

TEST_CASE("views show every value that append stored, in both orders of K and with V aliasing it") {
  for (const k_order order : {k_order::transposed, k_order::row_major}) {
    for (const bool alias : {false, true}) {
      INFO("order " << static_cast<int>(order) << ", alias " << alias);
      const filled f32(element::f32, order, alias), half(element::f16, order, alias),
          brain(element::bf16, order, alias);
      compare_eigen<float, float>(f32);
      compare_eigen<f16, Eigen::half>(half);
      compare_eigen<bf16, Eigen::bfloat16>(brain);
      compare_dlpack<float>(f32, 2, 32);
      compare_dlpack<f16>(half, 2, 16);
      compare_dlpack<bf16>(brain, 4, 16);
    }
  }
}

// [eigen]
// Scores of one query against the keys of a table, block by block, where they lie.
Eigen::VectorXf scores(const kvc_kv& layer, std::span<const block_id> table, int32_t head,
                       const Eigen::VectorXf& query, int32_t tokens) {
  Eigen::VectorXf out(tokens);
  for (int32_t t = 0; t < tokens; t += layer.block) {
    const auto keys = key_cell<const float>(layer, table[static_cast<size_t>(t / layer.block)], head);
    const int32_t n = std::min(layer.block, tokens - t);
    out.segment(t, n) = keys.topRows(n) * query;
  }
  return out;
}
// [eigen]

// [dlpack]
// A layer's keys as a tensor of another library, which gives it back through `deleter`.
result<dlpack_managed_tensor*> lend_keys(const kvc_kv& layer, void* owner, void (*release)(void*)) {
  return to_dlpack(layer, plane_role::key, {.read_only = true, .release = release, .owner = owner});
}
// [dlpack]

TEST_CASE("scores computed on Eigen views are those of the plain keys") {
  const filled f(element::f32, k_order::transposed, false);
  const block_id table[] = {block_id{3}, block_id{1}};
  const Eigen::VectorXf query = Eigen::VectorXf::LinSpaced(dim_k, -1.0f, 1.0f);
  const Eigen::VectorXf got = scores(f.planes.layer(1), table, 2, query, 11);
  for (int32_t t = 0; t < 11; ++t) {
    double want = 0;
    for (int32_t d = 0; d < dim_k; ++d) {
      want += double{query(d)} * f.key(1, raw(table[t / block]) * block + t % block, 2, d);
    }
    CHECK(got(t) == Approx(want).margin(1e-5));
  }
}

TEST_CASE("what is written through an Eigen view is in the plane") {
  filled f(element::f32, k_order::transposed, false);
  key_cell<float>(f.planes.layer(1), block_id{3}, 2).row(5).setConstant(7.0f);
  const auto k = key_cell<const float>(f.planes.layer(1), block_id{3}, 2);
  CHECK((k.row(5).array() == 7.0f).all());
  CHECK((k.row(4)(0) == f.key(1, 28, 2, 0) && k.row(6)(23) == f.key(1, 30, 2, 23)));
}

TEST_CASE("the tokens of a table are read in its order, the last block in part") {
  const filled f(element::f16, k_order::transposed, false);
  const block_id table[] = {block_id{4}, block_id{0}, block_id{2}};
  Eigen::MatrixXf k(19, dim_k), v(19, dim_v);
  read_tokens<const Eigen::half>(&key_cell<const Eigen::half>, f.planes.layer(1), table, 1, k);
  read_tokens<const Eigen::half>(&value_cell<const Eigen::half>, f.planes.layer(1), table, 1, v);
  int32_t wrong = 0;
  for (int32_t t = 0; t < 19; ++t) {
    const int32_t slot = raw(table[t / block]) * block + t % block;
    for (int32_t d = 0; d < dim_k; ++d) wrong += k(t, d) != to_float(to_f16(f.key(1, slot, 1, d)));
    for (int32_t d = 0; d < dim_v; ++d) wrong += v(t, d) != to_float(to_f16(f.value(1, slot, 1, d)));
  }
  CHECK(wrong == 0);
}

TEST_CASE("a view of another type or outside the plane is a contract violation and empty") {
  const violation_handler before = set_violation_handler([](const char*, const char*, int) noexcept {});
  const filled f(element::f32, k_order::transposed, false);
  const kvc_kv& kv = f.planes.layer(0);
  const uint64_t count = contract_violations();
  CHECK(key_cell<Eigen::half>(kv, block_id{0}, 0).size() == 0);
  CHECK(key_cell<float>(kv, block_id{total}, 0).size() == 0);
  CHECK(key_cell<float>(kv, no_block, 0).size() == 0);
  CHECK(value_cell<float>(kv, block_id{0}, heads).size() == 0);
  CHECK(value_channel<float>(kv, 0, dim_v).size() == 0);
  CHECK(key_channel<float>(kv, -1, 0).size() == 0);
  CHECK(contract_violations() == count + 6);
  set_violation_handler(before);
}

TEST_CASE("a lent tensor releases its owner once, and what cannot be lent is refused with the field") {
  const filled f(element::f32, k_order::transposed, false);
  int released = 0;
  const auto release = [](void* owner) { ++*static_cast<int*>(owner); };
  const auto t =
      to_dlpack(f.planes.layer(0), plane_role::key,
                {.device = dlpack_device_type::cuda, .device_id = 3, .release = release, .owner = &released});
  REQUIRE(t);
  CHECK(((*t)->tensor.device.type == 2 && (*t)->tensor.device.id == 3 && released == 0));
  (*t)->deleter(*t);
  CHECK(released == 1);
  kvc_kv kv = f.planes.layer(0);
  kv.k.type = KVC_U4;
  CHECK(to_dlpack(kv, plane_role::key).error().code == errc::unsupported);
  kv = f.planes.layer(0);
  kv.k.data = nullptr;
  CHECK(std::string(to_dlpack(kv, plane_role::key).error().field) == "k");
  kv = f.planes.layer(0);
  kv.k.token_stride = 6;
  CHECK(std::string(to_dlpack(kv, plane_role::key).error().field) == "stride");
  const std::span<const kvc_kv> none;
  CHECK(group_to_dlpack(none, plane_role::key).error().code == errc::bad_argument);
  kvc_kv uneven[3] = {f.planes.layer(0), f.planes.layer(1), f.planes.layer(0)};
  CHECK(group_to_dlpack(uneven, plane_role::key).error().value == 2);
  uneven[1].blocks = 4;
  CHECK(group_to_dlpack(uneven, plane_role::key).error().value == 1);
}

TEST_CASE("every byte-wide type has its DLPack code") {
  const auto is = [](int32_t type, int code, int bits) {
    const auto t = dlpack_type_of(type);
    return t && t->code == code && t->bits == bits && t->lanes == 1;
  };
  CHECK((is(KVC_F32, 2, 32) && is(KVC_F16, 2, 16) && is(KVC_BF16, 4, 16) && is(KVC_U8, 1, 8)));
  CHECK((is(KVC_E4M3, 10, 8) && is(KVC_E5M2, 12, 8)));
  CHECK(
      (!dlpack_type_of(KVC_U4) && !dlpack_type_of(KVC_U2) && !dlpack_type_of(KVC_U3) && !dlpack_type_of(-1)));
}
