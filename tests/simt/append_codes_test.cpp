// SPDX-License-Identifier: Apache-2.0
// Storing rows in open, exempt and packed blocks with the CUDA kernels, run on the CPU. Where the CPU stores
// the same rows the bytes are compared; codes written at once are compared with those that the CPU gets by
// storing the rows in an open block and sealing it.
#include "simt/coded_world.hpp"

namespace kvcache::test {
namespace {

/// Rows with random contents and gaps between heads.
struct rows_of_type {
  rows_of_type(std::mt19937& random, int32_t n, int32_t heads, int32_t dim, int32_t type)
      : data(size_t(n * heads * (dim + 8)) * (type == KVC_F32 ? 4 : 2)) {
    const int64_t element = type == KVC_F32 ? 4 : 2;
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < data.size() / size_t(element); ++i) {
      const float x = normal(random) * (i % 23 == 5 ? 11.0f : 1.0f);
      const uint16_t half = type == KVC_F16 ? to_f16(x).bits : to_bf16(x).bits;
      std::memcpy(data.data() + element * int64_t(i), type == KVC_F32 ? static_cast<const void*>(&x) : &half,
                  size_t(element));
    }
    rows = {data.data(), type, heads, dim, 0, element * (dim + 8) * heads, element * (dim + 8)};
  }
  guarded<std::byte> data;
  kvc_rows rows{};
};

struct rope_with_table {
  rope_with_table(int32_t style, int32_t dims) : table(size_t(256 * dims)) {
    rope.struct_size = sizeof rope;
    rope.style = style;
    rope.dims = dims;
    rope.theta = 1e4;
    REQUIRE(kvc_cpu_rope_table(&rope, 256, table.data(), nullptr) == KVC_OK);
    rope.table = table.data();
    rope.table_positions = 256;
  }
  kvc_rope rope{};
  guarded<float> table;
};

kvc_append append_of(const kvc_rows& k, const kvc_rows& v, int32_t n) {
  kvc_append a{};
  a.struct_size = sizeof a;
  a.rows = n;
  a.k = k;
  a.v = v;
  return a;
}

void same_append(const kvc_append& a, coded_world& on_cpu, coded_world& on_gpu, uint32_t seed) {
  kvc_error e{};
  REQUIRE(kvc_cpu_append(&on_cpu.layers[0], &a, nullptr, &e) == KVC_OK);
  simt::the_backend().seed = seed % 4;
  const kvc_status s = kvc_cuda_append(&on_gpu.layers[0], &a, nullptr, &e);
  INFO(simt::the_backend().fault << " " << s << " " << kvc_field_text(e.field));
  REQUIRE(s == KVC_OK);
  REQUIRE(on_cpu == on_gpu);
}

coded_side exact(int32_t type) {
  return {type, false, KVC_SCALE_NONE, 0, 0};
}

/// Bytes of the sealed planes, codes and scales.
bool same_sealed(const coded_world& a, const coded_world& b, size_t not_compared) {
  const auto &x = a.memory[0]->memory, &y = b.memory[0]->memory;
  for (size_t i = 0; i + not_compared < x.size(); ++i) {
    if (std::memcmp(x[i].data(), y[i].data(), x[i].size()) != 0) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("rows go to sealed, open and exempt slots at once, rotated as the CPU rotates them") {
  uint32_t n = 0;
  for (const int32_t dim : {8, 16, 32, 64, 128, 256}) {
    for (const int32_t hadamard : {0, 1, 2, 3}) {
      for (const int32_t from : {KVC_F32, KVC_F16, KVC_BF16}) {
        for (const bool rotated : {false, true}) {
          std::mt19937 random(++n);
          coded_shape s;
          s.k = exact(n % 2 == 0 ? KVC_F16 : KVC_BF16);
          s.v = exact(n % 3 == 0 ? KVC_F16 : KVC_BF16);
          s.dim_k = dim;
          s.dim_v = n % 2 == 0 ? dim : 64;
          s.heads = 1 + int32_t(n % 3);
          s.hadamard = hadamard;
          s.exempt = 1 << n % 3;
          s.exempt_blocks = 4;
          s.open_k = n % 5 < 2 ? KVC_F16 : KVC_BF16;
          s.open_v = n % 5 < 3 ? KVC_F16 : KVC_BF16;
          s.one_run = n % 2 == 0;
          coded_world on_cpu({s}, n), on_gpu({s}, n);
          const rope_with_table rope(n % 4 < 2 ? KVC_ROPE_INTERLEAVED : KVC_ROPE_HALF_SPLIT,
                                     n % 7 == 0 ? 4 : dim);
          rows_of_type k(random, 5, s.heads, dim, from), v(random, 5, s.heads, s.dim_v, from);
          const guarded<int64_t> slot(std::vector<int64_t>{3, -1, 159, 0, 64}), open({-1, 95, 31, -1, 7});
          const guarded<int64_t> exempt_slot(std::vector<int64_t>{0, -1, -1, s.exempt * 4 - 1, -1});
          const guarded<int32_t> pos(std::vector<int32_t>{0, 1, 255, 77, 100});
          kvc_append a = append_of(k.rows, v.rows, 5);
          a.slot = n % 4 != 0 ? slot.data() : nullptr;
          a.open_slot = open.data();
          a.exempt_slot = exempt_slot.data();
          if (rotated) a.rope = &rope.rope;
          if (rotated) a.pos = pos.data();
          CAPTURE(n, dim, hadamard, from, rotated);
          same_append(a, on_cpu, on_gpu, n);
        }
      }
    }
  }
}

TEST_CASE("layers of codes take rows in their open and exempt blocks, per head if asked") {
  for (uint32_t seed = 0; seed < 4; ++seed) {
    std::mt19937 random(seed);
    coded_shape s;
    s.k = {KVC_U4, false, KVC_SCALE_CHANNEL, 0, 0};
    s.v = {KVC_U4, false, KVC_SCALE_TOKEN, 32, 0};
    s.hadamard = KVC_HADAMARD_V;
    s.exempt = 4;
    s.exempt_blocks = 2;
    s.one_run = seed % 2 == 0;
    coded_world on_cpu({s}, seed), on_gpu({s}, seed);
    rows_of_type k(random, 3, 2, 64, KVC_F32), v(random, 3, 2, 64, KVC_F32);
    const guarded<int64_t> open(std::vector<int64_t>{1, 95, -1, -1, 64, 63}),
        exempt_slot({7, -1, 1, 2, -1, -1});
    kvc_append a = append_of(k.rows, v.rows, 3);
    a.open_slot = open.data();
    a.exempt_slot = exempt_slot.data();
    a.slot_head_stride = 1;
    same_append(a, on_cpu, on_gpu, seed);
    // Slots outside their spaces are skipped.
    const guarded<int64_t> wild(std::vector<int64_t>{96, INT64_MAX, -2, INT64_MIN, 1 << 30, 97}),
        wild2({8, 9, -5, INT64_MAX, 8, -1});
    a.open_slot = wild.data();
    a.exempt_slot = wild2.data();
    REQUIRE(kvc_cuda_append(&on_gpu.layers[0], &a, nullptr, nullptr) == KVC_OK);
    REQUIRE(on_cpu == on_gpu);
  }
}

TEST_CASE("rows stored as codes are what sealing an open block of them gives, and disturb no neighbour") {
  uint32_t n = 0;
  for (const coded_side& codes : all_codes()) {
    for (const int32_t group : {0, 8, 24, 32, 40}) {
      for (const int32_t clip : {KVC_CLIP_NONE, KVC_CLIP_MIDDLE, KVC_CLIP_TWO_SIDED}) {
        for (const int32_t dim : {64, 80, 128, 256}) {
          ++n;
          if (clip != KVC_CLIP_NONE && n % 3 != 0) continue;
          std::mt19937 random(n);
          coded_shape s;
          s.v = codes;
          s.v.kind = KVC_SCALE_TOKEN;
          s.v.group = group;
          s.v.clip = clip;
          s.k = codes.type <= KVC_U8 ? s.v : exact(n % 2 == 0 ? KVC_F16 : KVC_BF16);
          s.dim_k = s.dim_v = dim;
          s.block = 32 << n % 3;
          s.hadamard = dim != 80 ? int32_t(n / 4 % 4) : 0;
          s.heads = 1 + int32_t(n % 3);  // with three a warp takes several rows
          s.open_k = n % 5 < 2 ? KVC_F16 : KVC_BF16;
          s.open_v = n % 7 < 3 ? KVC_F16 : KVC_BF16;
          if (!holds_codes(s.k)) s.open_k = s.k.type;
          s.one_run = n % 2 == 0;
          coded_world on_cpu({s}, n), on_gpu({s}, n);
          const std::vector<kvc_command> seal = {command_of(KVC_OP_SEAL, s.block, 0, 3)};
          const kvc_run both[2] = {on_cpu.run_of(seal), on_gpu.run_of(seal)};
          REQUIRE(kvc_cpu_run(&both[1], nullptr, nullptr) == KVC_OK);
          const int32_t from = n % 3 == 0 ? KVC_F32 : n % 3 == 1 ? KVC_F16 : KVC_BF16;
          rows_of_type k(random, 5, s.heads, dim, from), v(random, 5, s.heads, dim, from);
          guarded<int64_t> slot(5), open(5);
          const int32_t places[] = {0, 1, 17, s.block - 1, -1};
          for (size_t i = 0; i < 5; ++i) {
            open[i] = places[i];
            slot[i] =
                places[i] < 0 ? (n % 2 == 0 ? -1 : int64_t{s.blocks} * s.block) : 3 * s.block + places[i];
          }
          const rope_with_table rope(KVC_ROPE_HALF_SPLIT, 64);
          const guarded<int32_t> pos(std::vector<int32_t>{0, 1, 17, 200, 100});
          kvc_append a = append_of(k.rows, v.rows, 5);
          a.rope = n % 4 < 2 ? &rope.rope : nullptr;
          a.pos = pos.data();
          CAPTURE(n, codes.type, codes.symmetric, group, clip, dim, s.block, from, s.hadamard);
          a.open_slot = open.data();
          REQUIRE(kvc_cpu_append(&on_cpu.layers[0], &a, nullptr, nullptr) == KVC_OK);
          REQUIRE(kvc_cpu_run(&both[0], nullptr, nullptr) == KVC_OK);
          REQUIRE_FALSE(same_sealed(on_cpu, on_gpu, 2));
          a.open_slot = nullptr;
          a.slot = slot.data();
          simt::the_backend().seed = n % 4;
          kvc_error e{};
          const kvc_status status = kvc_cuda_append(&on_gpu.layers[0], &a, nullptr, &e);
          INFO(simt::the_backend().fault << " " << status << " " << kvc_field_text(e.field));
          REQUIRE(status == KVC_OK);
          REQUIRE(same_sealed(on_cpu, on_gpu, 2));
        }
      }
    }
  }
}

TEST_CASE("a number that no code can stand for is stored as the nearest one, NaN as 0") {
  coded_shape s;
  s.k = {KVC_U8, false, KVC_SCALE_TOKEN, 0, 0};
  s.v = {KVC_E4M3, false, KVC_SCALE_TOKEN, 32, 0};
  s.heads = 1;
  for (const int32_t open : {KVC_F16, KVC_BF16}) {
    s.open_k = s.open_v = open;
    coded_world w({s}, 1), tame({s}, 1);
    std::mt19937 random(1);
    rows_of_type k(random, 1, 1, 64, KVC_F32), v(random, 1, 1, 64, KVC_F32);
    const guarded<int64_t> slot(std::vector<int64_t>{40});
    for (const bool wild : {false, true}) {
      const float odd[] = {wild ? NAN : 0.0f, wild ? 1e30f : 65504.0f, wild ? -INFINITY : -65504.0f,
                           wild ? -70000.0f : -65504.0f};
      for (int32_t i = 0; i < 4; ++i) {
        std::memcpy(k.data.data() + 4 * (3 + 9 * i), &odd[i], 4);
        std::memcpy(v.data.data() + 4 * (2 + 7 * i), &odd[i], 4);
      }
      kvc_append a = append_of(k.rows, v.rows, 1);
      a.slot = slot.data();
      REQUIRE(kvc_cuda_append(wild ? &w.layers[0] : &tame.layers[0], &a, nullptr, nullptr) == KVC_OK);
    }
    REQUIRE((open == KVC_BF16 || w == tame));  // 65504 is no bf16: there only the wild ones meet the clamp
    float got[64];
    const guarded<int32_t> ids(std::vector<int32_t>{1});
    std::vector<float> values(32 * 64);
    REQUIRE(kvc_cpu_unpack(&w.layers[0], ids.data(), 1, 0, values.data(), 0, nullptr, 0, 0, nullptr) ==
            KVC_OK);
    for (int32_t d = 0; d < 64; ++d) got[d] = values[size_t(d * 32 + 8)];
    CHECK(std::fabs(got[3]) <= 300.0f);  // half a step of 256 levels over the whole range
    CHECK(std::fabs(got[12] - 65504.0f) <= 300.0f);
    CHECK(std::fabs(got[21] + 65504.0f) <= 300.0f);
  }
}

TEST_CASE("append says which planes of codes it cannot write row by row", "[machine]") {
  std::mt19937 random(2);
  rows_of_type k(random, 2, 2, 64, KVC_F16), v(random, 2, 2, 64, KVC_F16);
  const guarded<int64_t> slot(std::vector<int64_t>{0, 1});
  static kvc_rope rope{sizeof(kvc_rope), KVC_ROPE_INTERLEAVED, 64, 0, 1e4, nullptr, nullptr};
  const auto answers = [&](kvc_status status, int32_t field, const coded_side& of_k, const coded_side& of_v,
                           auto edit) {
    coded_shape s;
    s.k = of_k;
    s.v = of_v;
    coded_world w({s}, 1);
    kvc_append a = append_of(k.rows, v.rows, 2);
    a.slot = slot.data();
    edit(w.layers[0], a);
    kvc_error e{};
    const int before = simt::the_backend().launches;
    CHECK(kvc_cuda_append(&w.layers[0], &a, nullptr, &e) == status);
    if (status == KVC_OK) return;
    CHECK(kvc_field_text(e.field) == std::string(kvc_field_text(field)));
    CHECK(simt::the_backend().launches == before);
  };
  const auto none = [](kvc_kv&, kvc_append&) {};
  const auto side = [](int32_t type, int32_t kind) { return coded_side{type, false, kind, 0, 0}; };
  const coded_side u8 = side(KVC_U8, KVC_SCALE_TOKEN), u4 = side(KVC_U4, KVC_SCALE_TOKEN);
  const auto un = KVC_UNSUPPORTED, bad = KVC_BAD_ARGUMENT;
  answers(KVC_OK, 0, u8, u4, none);
  answers(KVC_OK, 0, exact(KVC_F16), u4, none);
  answers(un, KVC_FIELD_SLOT, u4, u4, none);
  for (const int32_t kind : {KVC_SCALE_TENSOR, KVC_SCALE_HEAD, KVC_SCALE_CHANNEL}) {
    answers(un, KVC_FIELD_SLOT, side(KVC_U8, kind), u4, none);
    answers(un, KVC_FIELD_SLOT, u8, side(KVC_E4M3, kind), none);
  }
  answers(bad, KVC_FIELD_SLOT, u8, u8, [](kvc_kv&, kvc_append& a) { a.slot = nullptr; });
  answers(un, KVC_FIELD_K_ROPE, u8, u8, [](kvc_kv& kv, kvc_append&) { kv.k_rope = &rope; });
  answers(un, KVC_FIELD_HADAMARD, u8, u8, [](kvc_kv& kv, kvc_append&) { kv.hadamard = 4; });
  answers(un, KVC_FIELD_OPEN_K, u8, u8, [](kvc_kv& kv, kvc_append&) {
    kv.open_k.type = KVC_F32;
    kv.open_k.dim_stride = 4;
    kv.open_k.token_stride *= 2;
    kv.open_k.head_stride *= 2;
    kv.open_k.block_stride *= 2;
  });
  answers(un, KVC_FIELD_STRIDE, u8, u8, [](kvc_kv& kv, kvc_append& a) {
    a.open_slot = a.slot;
    kv.open_v.dim_stride = 64;
    kv.open_v.token_stride = 2;
  });
  answers(bad, KVC_FIELD_OPEN_SLOT, exact(KVC_F16), exact(KVC_F16), [](kvc_kv& kv, kvc_append& a) {
    a.open_slot = a.slot;
    kv.open_blocks = 0;
  });
}

}  // namespace kvcache::test
