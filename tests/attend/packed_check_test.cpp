// SPDX-License-Identifier: Apache-2.0
// Geometry of packed planes and borders of batches: what is wrong is refused by its field, and nothing is
// written.
#include <catch2/catch.hpp>
#include <functional>

#include "packed_world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

packed_shape usual_shape() {
  packed_shape g;
  g.heads = 2;
  g.group = 2;
  g.f.k = {.codes = code::int4, .axis = scale_axis::channel, .group_size = 16};
  g.f.v = {.codes = code::int3, .axis = scale_axis::token, .group_size = 32, .hadamard = true};
  g.f.exempt = 2;
  return g;
}

/// A valid call over packed planes; a case changes one thing.
struct bench {
  explicit bench(const packed_shape& shape = usual_shape()) : w(shape, {150}, 1), kv(w.kv) {
    w.fill();
    asked.push_back(w.ask(0, {40, 70, 149}));
    w.make(asked, false, batch);
    (void)batch.get();
    batch.b.n = 1;
  }
  packed_world w;
  kvc_kv kv;
  std::vector<packed_rows> asked;
  packed_batch batch;
  std::vector<float> o = std::vector<float>(3 * 4 * 64, 77.0f), lse = std::vector<float>(12, 77.0f);

  kvc_status attend(kvc_error& e) {
    kvc_plan_in in{};
    in.struct_size = sizeof in;
    in.q_heads = 4;
    in.n = 1;
    in.max_q = 3;
    in.max_kv = 150;
    in.kv = &w.kv;
    kvc_plan plan{};
    plan.struct_size = sizeof plan;
    REQUIRE(kvc_cpu_plan(&in, &plan, &e) == KVC_OK);
    std::vector<std::byte> workspace(plan.workspace_bytes);
    const kvc_rows q = dense_rows(batch.q.data(), element::f32, 4, 64);
    const kvc_softmax soft = causal_softmax(0.125f);
    const kvc_out out = dense_out(o.data(), element::f32, 4, 64, lse.data());
    return kvc_cpu_attend(&plan, &kv, &batch.b, &q, &soft, &out, {workspace.data(), workspace.size()},
                          nullptr, &e);
  }
  kvc_status plan(kvc_error& e) const {
    kvc_plan_in in{};
    in.struct_size = sizeof in;
    in.q_heads = 4;
    in.n = in.max_q = 1;
    in.kv = &kv;
    kvc_plan made{};
    made.struct_size = sizeof made;
    return kvc_cpu_plan(&in, &made, &e);
  }
};

struct fault {
  const char* what;
  kvc_status status;
  int32_t field;
  std::function<void(bench&)> edit;
};

const fault geometry_faults[] = {
    {"block 16", KVC_UNSUPPORTED, KVC_FIELD_BLOCK, [](bench& b) { b.kv.block = 16; }},
    {"block 256", KVC_UNSUPPORTED, KVC_FIELD_BLOCK, [](bench& b) { b.kv.block = 256; }},
    {"head dim 60", KVC_UNSUPPORTED, KVC_FIELD_DIM_K, [](bench& b) { b.kv.dim_k = 60; }},
    {"type after the last", KVC_UNSUPPORTED, KVC_FIELD_V, [](bench& b) { b.kv.v.type = KVC_U2 + 1; }},
    {"codes in open blocks", KVC_UNSUPPORTED, KVC_FIELD_OPEN_K, [](bench& b) { b.kv.open_k = b.kv.k; }},
    {"codes in exempt rows", KVC_UNSUPPORTED, KVC_FIELD_EXEMPT, [](bench& b) { b.kv.exempt_v = b.kv.v; }},
    {"no open space", KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_BLOCKS, [](bench& b) { b.kv.open_blocks = 0; }},
    {"negative open space", KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_BLOCKS, [](bench& b) { b.kv.open_blocks = -1; }},
    {"no scale kind", KVC_UNSUPPORTED, KVC_FIELD_SCALE, [](bench& b) { b.kv.k.scale_kind = KVC_SCALE_NONE; }},
    {"scale kind after the last", KVC_UNSUPPORTED, KVC_FIELD_SCALE, [](bench& b) { b.kv.v.scale_kind = 5; }},
    {"unknown clip", KVC_UNSUPPORTED, KVC_FIELD_SCALE, [](bench& b) { b.kv.v.clip = 3; }},
    {"negative clip", KVC_UNSUPPORTED, KVC_FIELD_SCALE, [](bench& b) { b.kv.k.clip = -1; }},
    {"scales of plain values", KVC_UNSUPPORTED, KVC_FIELD_OPEN_V,
     [](bench& b) { b.kv.open_v.scale_kind = KVC_SCALE_TOKEN; }},
    {"no group", KVC_BAD_ARGUMENT, KVC_FIELD_GROUP, [](bench& b) { b.kv.v.scale_group = 0; }},
    {"negative group", KVC_BAD_ARGUMENT, KVC_FIELD_GROUP, [](bench& b) { b.kv.k.scale_group = -16; }},
    {"group 12", KVC_BAD_ARGUMENT, KVC_FIELD_GROUP, [](bench& b) { b.kv.v.scale_group = 12; }},
    {"group over the block", KVC_BAD_ARGUMENT, KVC_FIELD_GROUP, [](bench& b) { b.kv.k.scale_group = 64; }},
    {"group that does not divide the block", KVC_BAD_ARGUMENT, KVC_FIELD_GROUP,
     [](bench& b) { b.kv.k.scale_group = 24; }},
    {"negative block stride", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.k.block_stride = -64; }},
    {"rows over each other", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, [](bench& b) { b.kv.k.dim_stride = 15; }},
    {"V rows over each other", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.v.token_stride = 23; }},
    {"slots of K apart", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, [](bench& b) { b.kv.k.token_stride = 1; }},
    {"channels of V apart", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, [](bench& b) { b.kv.v.dim_stride = 1; }},
    {"heads over each other", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.k.head_stride = 64 * 16 - 1; }},
    {"blocks over each other", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.v.block_stride = 32 * 24 - 1; }},
    {"rows reach too far", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.k.dim_stride = INT64_MAX / 64; }},
    {"a cell of rows reaches too far", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) {
       b.kv.k.dim_stride = INT64_MAX / 64 + 1;
       b.kv.k.block_stride = b.kv.k.head_stride = 1;
     }},
    {"blocks reach too far", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.k.block_stride = INT64_MAX / 2; }},
    {"scales of heads over each other", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.k.scale_head_stride = 2 * 64 * 2 - 2; }},
    {"scales of blocks over each other", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.v.scale_block_stride = 2 * 32 * 2 - 2; }},
    {"odd scale stride", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.v.scale_head_stride = 2 * 32 * 2 + 1; }},
    {"negative scale stride", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.v.scale_block_stride = -2; }},
    {"scales per tensor and head", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.v.scale_kind = KVC_SCALE_TENSOR; }},
    {"Hadamard of dim 80", KVC_UNSUPPORTED, KVC_FIELD_HADAMARD,
     [](bench& b) { b.kv.dim_k = 80, b.kv.hadamard = KVC_HADAMARD_K; }},
    {"Hadamard of V of dim 80", KVC_UNSUPPORTED, KVC_FIELD_HADAMARD, [](bench& b) { b.kv.dim_v = 80; }},
    {"unknown rotation", KVC_UNSUPPORTED, KVC_FIELD_HADAMARD, [](bench& b) { b.kv.hadamard = 4; }},
    {"exempt 3", KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT, [](bench& b) { b.kv.exempt = 3; }},
    {"exempt 8", KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT, [](bench& b) { b.kv.exempt = 8; }},
    {"exempt -1", KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT, [](bench& b) { b.kv.exempt = -1; }},
    {"negative exempt space", KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT, [](bench& b) { b.kv.exempt_blocks = -1; }},
};

const fault memory_faults[] = {
    {"no scales", KVC_BAD_ARGUMENT, KVC_FIELD_SCALE, [](bench& b) { b.kv.k.scale = nullptr; }},
    {"scales misaligned", KVC_BAD_ARGUMENT, KVC_FIELD_SCALE,
     [](bench& b) { b.kv.v.scale = static_cast<char*>(b.kv.v.scale) + 1; }},
    {"minima misaligned", KVC_BAD_ARGUMENT, KVC_FIELD_SCALE,
     [](bench& b) { b.kv.v.zero = static_cast<char*>(b.kv.v.zero) + 1; }},
    {"minima of small floats", KVC_BAD_ARGUMENT, KVC_FIELD_SCALE,
     [](bench& b) {
       b.kv.v.type = KVC_E4M3;
       b.kv.v.token_stride = 64;
       b.kv.v.head_stride = b.kv.v.block_stride = 64 * 32;
     }},
    {"no K", KVC_BAD_ARGUMENT, KVC_FIELD_K, [](bench& b) { b.kv.k.data = nullptr; }},
    {"V that aliases codes", KVC_UNSUPPORTED, KVC_FIELD_V, [](bench& b) { b.kv.v.data = nullptr; }},
    {"no open K", KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_K, [](bench& b) { b.kv.open_k.data = nullptr; }},
    {"no open V", KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_V, [](bench& b) { b.kv.open_v.data = nullptr; }},
    {"no exempt rows", KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT, [](bench& b) { b.kv.exempt_k.data = nullptr; }},
    {"exempt rows misaligned", KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT,
     [](bench& b) { b.kv.exempt_v.data = static_cast<char*>(b.kv.exempt_v.data) + 1; }},
    {"exempt id past the space", KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT_TABLE,
     [](bench& b) { b.batch.exempt[0] = b.kv.exempt_blocks; }},
    {"exempt id below -1", KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT_TABLE,
     [](bench& b) { b.batch.exempt[0] = -2; }},
    {"exempt id without a space", KVC_BAD_ARGUMENT, KVC_FIELD_EXEMPT_TABLE,
     [](bench& b) { b.kv.exempt = b.kv.exempt_blocks = 0; }},
    {"border inside a block", KVC_BAD_ARGUMENT, KVC_FIELD_ROW_SEALED,
     [](bench& b) { b.batch.borders[1] = 33; }},
    {"border above sealed", KVC_BAD_ARGUMENT, KVC_FIELD_ROW_SEALED,
     [](bench& b) { b.batch.borders[1] = 160; }},
    {"negative border", KVC_BAD_ARGUMENT, KVC_FIELD_ROW_SEALED, [](bench& b) { b.batch.borders[0] = -32; }},
    {"border without an open table", KVC_BAD_ARGUMENT, KVC_FIELD_ROW_SEALED,
     [](bench& b) { b.batch.b.open_table = nullptr, b.batch.sealed[0] = 150; }},
    {"sealed inside a block", KVC_BAD_ARGUMENT, KVC_FIELD_SEALED, [](bench& b) { b.batch.sealed[0] = 127; }},
    {"negative sealed", KVC_BAD_ARGUMENT, KVC_FIELD_SEALED, [](bench& b) { b.batch.sealed[0] = -32; }},
    {"sealed id past the pool", KVC_BAD_ARGUMENT, KVC_FIELD_TABLE,
     [](bench& b) { b.batch.table[3] = b.kv.blocks; }},
    {"open id past the space", KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_TABLE,
     [](bench& b) { b.batch.open[1] = b.kv.open_blocks; }},
};

}  // namespace

TEST_CASE("a packed geometry that cannot be read is refused by its field", "[packed]") {
  {
    bench good;
    kvc_error e{};
    REQUIRE(good.plan(e) == KVC_OK);
    REQUIRE(good.attend(e) == KVC_OK);
  }
  for (const fault& f : geometry_faults) {
    bench b;
    f.edit(b);
    kvc_error e{};
    INFO(f.what);
    CHECK(b.plan(e) == f.status);
    CHECK(e.field == f.field);
    e = {};
    const kvc_status s = b.attend(e);
    INFO(kvc_status_text(s) << " " << kvc_field_text(e.field) << " " << e.value);
    CHECK(s == f.status);
    CHECK(e.field == f.field);
    CHECK(b.o[0] == 77.0f);
  }
}

TEST_CASE("packed memory and borders that cannot be read are refused by their field", "[packed]") {
  for (const fault& f : memory_faults) {
    bench b;
    f.edit(b);
    kvc_error e{};
    const kvc_status s = b.attend(e);
    INFO(f.what << ": " << kvc_status_text(s) << " " << kvc_field_text(e.field) << " " << e.value);
    CHECK(s == f.status);
    CHECK(e.field == f.field);
    CHECK(b.o[0] == 77.0f);
    CHECK(b.lse[0] == 77.0f);
  }
}

TEST_CASE("a latent that V aliases may not be packed, mixed or exempt", "[packed]") {
  for (int32_t turn = 0; turn < 3; ++turn) {
    packed_shape g = usual_shape();
    bench b(g);
    b.kv.k = b.kv.open_k;  // no codes
    b.kv.v = {};
    b.kv.hadamard = turn == 0 ? KVC_HADAMARD_V : 0;
    b.kv.exempt = turn == 1 ? 2 : 0;
    kvc_error e{};
    const kvc_status s = b.plan(e);
    CHECK(s == (turn == 2 ? KVC_OK : KVC_UNSUPPORTED));
    CHECK(e.field == (turn == 2 ? KVC_FIELD_NONE : KVC_FIELD_V));
  }
}

TEST_CASE("planes with formats that do not fit together are not made", "[packed]") {
  const packed_shape g = usual_shape();
  const auto field = [&](auto&& edit) {
    host_planes_config c{.shape = g.stored(), .block_size = 32, .blocks = 2};
    c.open_blocks = 2;
    c.exempt_blocks = 1;
    std::vector<kv_format> formats{g.f};
    edit(c, formats);
    c.formats = formats;
    const auto made = host_planes::create(c);
    return std::string(made ? "" : made.error().field);
  };
  using config = host_planes_config;
  using list = std::vector<kv_format>;
  CHECK(field([](config&, list&) {}) == "");
  CHECK(field([](config& c, list&) { c.open_blocks = 0; }) == "open_blocks");
  CHECK(field([](config& c, list&) { c.exempt_blocks = -1; }) == "exempt_blocks");
  CHECK(field([](config& c, list&) { c.block_size = 16; }) == "block_size");
  CHECK(field([](config&, list& f) { f.push_back(f[0]); }) == "layers");
  CHECK(field([](config&, list& f) { f[0].exempt = 3; }) == "exempt");
  CHECK(field([](config&, list& f) { f[0].k.group_size = 20; }) == "group_size");
  CHECK(field([](config& c, list& f) { c.shape.layers = 2, f.push_back(f[0]), f[1].residual = 1; }) ==
        "residual");
  CHECK(field([](config& c, list&) { c.shape.v_aliases_k = true; }) == "v_aliases_k");
  CHECK(field([](config&, list& f) { f[0] = {}; }) == "formats");
}
