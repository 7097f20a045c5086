// SPDX-License-Identifier: Apache-2.0
// Sealing open blocks into codes with the CUDA kernels, run on the CPU, byte for byte against the CPU's own
// data plane through the same structs.
#include "kvcache/quant/pack.hpp"
#include "simt/coded_world.hpp"

namespace kvcache::test {
namespace {

/// Runs the same commands over two worlds of the same bytes; all their memory is equal then.
void same_bytes(const std::vector<coded_shape>& shapes, const std::vector<kvc_command>& commands,
                uint32_t seed, int32_t filled = 1) {
  coded_world on_cpu(shapes, seed, filled), on_gpu(shapes, seed, filled);
  const kvc_run cpu = on_cpu.run_of(commands), gpu = on_gpu.run_of(commands);
  kvc_error e{};
  kvc_status s = kvc_cpu_run(&cpu, nullptr, &e);
  INFO("CPU: " << s << " " << kvc_field_text(e.field) << " " << e.value);
  REQUIRE(s == KVC_OK);
  REQUIRE_FALSE(on_cpu == on_gpu);
  simt::the_backend().seed = seed % 4;
  s = kvc_cuda_run(&gpu, nullptr, &e);
  INFO(simt::the_backend().fault << " " << s << " " << kvc_field_text(e.field) << " " << e.value);
  REQUIRE(s == KVC_OK);
  REQUIRE(on_cpu == on_gpu);
}

coded_side with(coded_side s, std::pair<int32_t, int32_t> scales, int32_t clip = KVC_CLIP_NONE) {
  s.kind = scales.first;
  s.group = scales.second;
  s.clip = clip;
  return s;
}

}  // namespace

TEST_CASE("sealing gives the bits that the CPU gives, for every code, scale, head dim and block") {
  uint32_t n = 0;
  for (const coded_side& codes : all_codes()) {
    for (const auto& scales : all_scales()) {
      for (const int32_t dim : {64, 80, 96, 128, 256}) {
        for (const int32_t block : {32, 64, 128}) {
          // Each pair of code and scales meets a third of the head dims and blocks, neighbours another third.
          ++n;
          if ((n + n / 15) % 3 != 0) continue;
          coded_shape s;
          s.k = s.v = with(codes, scales);
          s.dim_k = s.dim_v = dim;
          s.block = block;
          s.heads = scales.first == KVC_SCALE_TENSOR ? 2 : 1;
          s.blocks = 2;
          s.open_blocks = 2;
          s.open_k = n % 2 == 0 ? KVC_F16 : KVC_BF16;
          s.open_v = n % 4 < 2 ? KVC_F16 : KVC_BF16;
          s.one_run = n % 5 < 3;
          CAPTURE(codes.type, codes.symmetric, scales.first, scales.second, dim, block, n);
          same_bytes({s}, {command_of(KVC_OP_SEAL, block, 0, 1)}, n);
        }
      }
    }
  }
}

TEST_CASE("clip searches choose the levels that the CPU chooses") {
  uint32_t n = 0;
  for (const coded_side& codes : all_codes()) {
    for (const auto& scales : all_scales()) {
      for (const int32_t clip : {KVC_CLIP_MIDDLE, KVC_CLIP_TWO_SIDED}) {
        coded_shape s;
        s.k = s.v = with(codes, scales, clip);
        s.dim_k = n % 3 == 0 ? 80 : 64;
        s.dim_v = n % 5 == 0 ? 96 : 32;
        s.block = n % 7 == 0 ? 64 : 32;
        s.exempt = int32_t(n % 3) == 2 ? 4 : int32_t(n % 3);
        s.open_k = n % 2 == 0 ? KVC_F16 : KVC_BF16;
        s.blocks = s.open_blocks = 2;
        s.one_run = n % 2 == 0;
        CAPTURE(codes.type, codes.symmetric, scales.first, scales.second, clip, n);
        same_bytes({s}, {command_of(KVC_OP_SEAL, s.block, 0, 1, s.exempt)}, ++n);
      }
    }
  }
}

TEST_CASE("exempt slots are left out of ranges and get code 0") {
  uint32_t n = 0;
  for (const coded_side& codes : all_codes()) {
    for (const auto& scales : all_scales()) {
      coded_shape s;
      s.k = s.v = with(codes, scales);
      s.exempt = 4;
      s.dim_v = 80;
      s.blocks = 3;
      CAPTURE(codes.type, codes.symmetric, scales.first, scales.second);
      same_bytes({s}, {command_of(KVC_OP_SEAL, 32, 0, 1, 1 << n % 3), command_of(KVC_OP_SEAL, 32, 1, 2, 0)},
                 n + 1, 2);
      ++n;
    }
  }
}

TEST_CASE("layers of a group may have formats of their own, K and V chosen independently") {
  const coded_side exact{KVC_F16, false, KVC_SCALE_NONE, 0, 0};
  const auto side = [](int32_t type, std::pair<int32_t, int32_t> scales, bool symmetric = false) {
    coded_side s;
    s.type = type;
    s.symmetric = symmetric;
    return with(s, scales);
  };
  for (uint32_t seed = 0; seed < 4; ++seed) {
    std::vector<coded_shape> layers(6);
    for (size_t i = 0; i < layers.size(); ++i) {
      layers[i].heads = 3;
      layers[i].dim_k = 80;
      layers[i].dim_v = 48;
      layers[i].one_run = (i + seed) % 2 == 0;
      layers[i].blocks = 6;
    }
    layers[0].k = side(KVC_U4, {KVC_SCALE_CHANNEL, 16});
    layers[0].v = side(KVC_U2, {KVC_SCALE_TOKEN, 16}, true);
    layers[1].k = exact;
    layers[1].v = side(KVC_E5M2, {KVC_SCALE_HEAD, 0});
    layers[2].k = side(KVC_U3, {KVC_SCALE_TENSOR, 0});
    layers[2].v = exact;
    layers[3].k = layers[3].v = exact;
    layers[4].k = exact;
    layers[4].open_k = KVC_BF16;  // converted
    layers[4].v = side(KVC_U6, {KVC_SCALE_TOKEN, 0});
    layers[5] = layers[0];
    layers[5].group = 1;
    layers[5].heads = 1;
    const std::vector<kvc_command> c = {
        command_of(KVC_OP_SEAL, 32, 0, 1),          command_of(KVC_OP_SEAL, 32, 1, 4),
        command_of(KVC_OP_SEAL, 32, 0, 3, 0, 0, 1), command_of(KVC_OP_COPY, 32, 1, 0, 0, 1),
        command_of(KVC_OP_COPY, 32, 4, 5, 0, 1),    command_of(KVC_OP_COPY, 32, 2, 2, 0, 1),
        command_of(KVC_OP_COPY, 32, 3, 0, 0, 1, 1)};
    CAPTURE(seed);
    same_bytes(layers, c, seed, 2);
  }
}

TEST_CASE("blocks of another exact type are converted") {
  for (const int32_t to : {KVC_F16, KVC_BF16}) {
    coded_shape s;
    s.k = s.v = {to, false, KVC_SCALE_NONE, 0, 0};
    s.open_k = KVC_F16;
    s.open_v = KVC_BF16;
    s.heads = 3;
    for (const bool one_run : {true, false}) {
      s.one_run = one_run;
      same_bytes({s, s}, {command_of(KVC_OP_SEAL, 32, 0, 1), command_of(KVC_OP_SEAL, 7, 1, 2)}, 5, 2);
    }
  }
}

TEST_CASE("what the CPU would refuse to pack becomes the nearest number of f16's range, and NaN 0") {
  for (const coded_side& codes : all_codes()) {
    for (const auto& scales : all_scales()) {
      for (const int32_t type : {KVC_F16, KVC_BF16}) {
        coded_shape s;
        s.k = s.v = with(codes, scales);
        s.heads = 1;
        s.dim_v = 80;
        s.blocks = s.open_blocks = 1;
        s.open_k = s.open_v = type;
        coded_world w({s}, 3);
        const kvc_kv& kv = w.layers[0];
        const uint16_t wild[] = {0x7fff, 0xffff, uint16_t(type == KVC_F16 ? 0x7c00 : 0x7f80),
                                 uint16_t(type == KVC_F16 ? 0xfc00 : 0xff00)};
        for (int32_t i = 0; i < 4; ++i) {
          coded_layer_memory::put(kv.open_k, 0, 0, 3 + 5 * i, 7 * i, wild[i]);
          coded_layer_memory::put(kv.open_v, 0, 0, 3 + 5 * i, 7 * i, wild[i]);
        }
        const std::vector<kvc_command> c = {command_of(KVC_OP_SEAL, 32, 0, 0)};
        const kvc_run run = w.run_of(c);
        REQUIRE(kvc_cpu_run(&run, nullptr, nullptr) == KVC_BAD_ARGUMENT);
        REQUIRE(kvc_cuda_run(&run, nullptr, nullptr) == KVC_OK);
        side_format f;
        f.codes = static_cast<code>(codes.type);
        f.axis = static_cast<scale_axis>(scales.first - KVC_SCALE_TENSOR);
        f.group_size = scales.second;
        f.symmetric = codes.symmetric;
        for (const bool keys : {true, false}) {
          const int32_t dim = keys ? 64 : 80;
          const kvc_plane &open = keys ? kv.open_k : kv.open_v, &p = keys ? kv.k : kv.v;
          std::vector<float> values(size_t(32 * dim));
          for (int32_t i = 0; i < 32 * dim; ++i) {
            uint16_t bits;
            std::memcpy(&bits,
                        static_cast<const std::byte*>(open.data) + i / dim * open.token_stride + i % dim * 2,
                        2);
            const float x = type == KVC_F16 ? to_float(f16{bits}) : to_float(bf16{bits});
            values[size_t(i)] = std::isnan(x) ? 0.0f : std::min(std::max(x, -65504.0f), 65504.0f);
          }
          const size_t row = size_t(code_row_bytes(f.codes, keys ? 32 : dim)),
                       n = size_t(scales_of_cell(f, 32, dim));
          std::vector<std::byte> want(row * size_t(keys ? dim : 32));
          std::vector<f16> scale(n), zero(n);
          REQUIRE(pack_cell(f, keys, 32, dim, 0, values.data(), want.data(), scale.data(), zero.data()));
          CAPTURE(codes.type, codes.symmetric, scales.first, keys);
          REQUIRE(std::memcmp(want.data(), p.data, want.size()) == 0);
          REQUIRE(std::memcmp(scale.data(), p.scale, 2 * n) == 0);
          if (p.zero != nullptr) REQUIRE(std::memcmp(zero.data(), p.zero, 2 * n) == 0);
        }
      }
    }
  }
}

TEST_CASE("sealing takes one launch per stage, group and kind over all layers and commands", "[machine]") {
  coded_shape s;
  s.k.type = KVC_U4;
  s.v.type = KVC_F16;
  coded_world w(std::vector<coded_shape>(5, s), 1, 3);
  std::vector<kvc_command> c;
  for (int32_t i = 0; i < 3; ++i) c.push_back(command_of(KVC_OP_SEAL, 32, i, i));
  for (int32_t i = 0; i < 2; ++i) c.push_back(command_of(KVC_OP_COPY, 32, i, i + 3, 0, 1));
  const kvc_run run = w.run_of(c);
  const int before = simt::the_backend().launches;
  REQUIRE(kvc_cuda_run(&run, nullptr, nullptr) == KVC_OK);
  REQUIRE(simt::the_backend().launches - before == 2);
}

TEST_CASE("more layers and commands than one launch of sealing takes are divided") {
  coded_shape s;
  s.k.type = KVC_U4;
  s.v.type = KVC_E4M3;
  s.heads = 1;
  s.dim_k = s.dim_v = 8;
  s.blocks = 2;
  s.open_blocks = 1;
  same_bytes(std::vector<coded_shape>(130, s), {command_of(KVC_OP_SEAL, 32, 0, 1)}, 4);
  s.blocks = 600;
  std::vector<kvc_command> c;
  for (int32_t i = 0; i < 600; ++i) c.push_back(command_of(KVC_OP_SEAL, 32, 0, i));
  same_bytes({s, s}, c, 5);
}

TEST_CASE("open blocks of packed layers are copied and gathered, sealed ones only copied whole") {
  coded_shape s;
  s.k = {KVC_U5, false, KVC_SCALE_CHANNEL, 0, 0};
  s.v = {KVC_U3, false, KVC_SCALE_TOKEN, 0, 0};
  s.open_blocks = 6;
  const guarded<int32_t> slots(std::vector<int32_t>{1, 5, 30, 33, 34, 60, 2, 3, 4, 31, 50, 63});
  const kvc_keep keep{slots.data(), 6, 0};
  const std::vector<int32_t> ids{2, 1, 0, 1, 0, 3};
  for (uint32_t seed = 0; seed < 4; ++seed) {
    s.one_run = seed % 2 == 0;
    coded_world on_cpu({s, s}, seed, 2), on_gpu({s, s}, seed, 2);
    const std::vector<kvc_command> c = {
        command_of(KVC_OP_GATHER, 6, 0, 0, 0), command_of(KVC_OP_COPY_OPEN, 9, 0, 4, 0, 1),
        command_of(KVC_OP_COPY_OPEN, 32, 1, 5, 0, 1), command_of(KVC_OP_SEAL, 32, 5, 2, 0, 2),
        command_of(KVC_OP_COPY, 32, 2, 4, 0, 3)};
    for (coded_world* w : {&on_cpu, &on_gpu}) {
      kvc_run r = w->run_of(c);
      r.ids = ids.data();
      r.n_ids = int32_t(ids.size());
      r.keeps = &keep;
      r.n_keeps = 1;
      simt::the_backend().seed = seed;
      REQUIRE((w == &on_cpu ? kvc_cpu_run(&r, nullptr, nullptr) : kvc_cuda_run(&r, nullptr, nullptr)) ==
              KVC_OK);
    }
    REQUIRE(on_cpu == on_gpu);
  }
}

TEST_CASE("the command list refuses over codes what the CPU refuses, with the same field") {
  coded_shape s;
  s.k = {KVC_U4, false, KVC_SCALE_CHANNEL, 0, 0};
  s.v = {KVC_F16, false, KVC_SCALE_NONE, 0, 0};
  s.exempt = 2;
  coded_world w({s}, 1, 3);
  const kvc_rope rope{sizeof(kvc_rope), KVC_ROPE_INTERLEAVED, 64, 0, 1e4, nullptr, nullptr};
  const guarded<int32_t> slots(std::vector<int32_t>{0, 1, 2, 3});
  const kvc_keep keep{slots.data(), 0, 0};
  const std::vector<int32_t> ids{2, 1, 0, 0, 9, 1, 1, 1, 0, 0, 9, 2, 1, 0, 0, 1, 1};
  const std::vector<kvc_command> bad = {
      command_of(KVC_OP_ZERO, 32, 1, 1),       command_of(KVC_OP_ROTATE, 32, 1, 1, 3),
      command_of(KVC_OP_COPY, 31, 0, 1),       command_of(KVC_OP_SEAL, 16, 0, 1),
      command_of(KVC_OP_SEAL, 33, 0, 1),       command_of(KVC_OP_SEAL, 32, 3, 1),
      command_of(KVC_OP_SEAL, 32, 0, 5),       command_of(KVC_OP_SEAL, 32, -1, 1),
      command_of(KVC_OP_SEAL, 32, 0, 1, 3),    command_of(KVC_OP_SEAL, 32, 0, 1, -1),
      command_of(KVC_OP_COPY_OPEN, 32, 0, 3),  command_of(KVC_OP_COPY_OPEN, 33, 0, 1),
      command_of(KVC_OP_GATHER, 4, 0, 0, 0),   command_of(KVC_OP_GATHER, 4, 0, 0, 6),
      command_of(KVC_OP_GATHER, 33, 0, 0, 11), command_of(KVC_OP_GATHER, 4, 0, 0, 11)};
  for (size_t i = 0; i < bad.size(); ++i) {
    kvc_run r = w.run_of({bad[i]});
    const std::vector<kvc_command> one{bad[i]};
    r.commands = one.data();
    r.ids = ids.data();
    r.n_ids = int32_t(ids.size());
    r.keeps = &keep;
    r.n_keeps = 1;
    r.rope = &rope;
    kvc_error on_cpu{}, on_gpu{};
    const kvc_status want = kvc_cpu_run(&r, nullptr, &on_cpu);
    CAPTURE(i, kvc_field_text(on_cpu.field));
    REQUIRE(want != KVC_OK);
    REQUIRE(kvc_cuda_run(&r, nullptr, &on_gpu) == want);
    REQUIRE(on_gpu.field == on_cpu.field);
    REQUIRE(on_gpu.value == on_cpu.value);
  }
}

TEST_CASE("planes of codes that kernels cannot address are refused with the field", "[machine]") {
  coded_shape s;
  s.k = s.v = {KVC_U4, false, KVC_SCALE_CHANNEL, 0, 0};
  s.one_run = false;
  const auto refuses = [&](kvc_status status, int32_t field, auto edit) {
    coded_world w({s}, 1);
    edit(w.layers[0]);
    const std::vector<kvc_command> c = {command_of(KVC_OP_SEAL, 32, 0, 1)};
    const kvc_run r = w.run_of(c);
    kvc_error e{};
    const int before = simt::the_backend().launches;
    CHECK(kvc_cuda_run(&r, nullptr, &e) == status);
    CHECK(kvc_field_text(e.field) == std::string(kvc_field_text(field)));
    CHECK(simt::the_backend().launches == before);
  };
  const auto un = KVC_UNSUPPORTED, bad = KVC_BAD_ARGUMENT;
  refuses(un, KVC_FIELD_STRIDE, [](kvc_kv& kv) { kv.k.dim_stride -= 1; });
  refuses(un, KVC_FIELD_STRIDE, [](kvc_kv& kv) { kv.v.head_stride += 1; });
  refuses(bad, KVC_FIELD_K, [](kvc_kv& kv) { kv.k.data = static_cast<char*>(kv.k.data) + 1; });
  refuses(un, KVC_FIELD_STRIDE, [](kvc_kv& kv) {  // transposed open K
    kv.open_k.dim_stride = 2 * kv.block;
    kv.open_k.token_stride = 2;
  });
  refuses(un, KVC_FIELD_OPEN_V, [](kvc_kv& kv) {
    kv.open_v.type = KVC_F32;
    kv.open_v.dim_stride = 4;
    kv.open_v.token_stride *= 2;
    kv.open_v.head_stride *= 2;
    kv.open_v.block_stride *= 2;
  });
  refuses(bad, KVC_FIELD_SCALE, [](kvc_kv& kv) { kv.k.scale = nullptr; });
  refuses(bad, KVC_FIELD_BLOCKS, [](kvc_kv& kv) { kv.blocks = 0; });
  static kvc_rope rope{sizeof(kvc_rope), KVC_ROPE_INTERLEAVED, 64, 0, 1e4, nullptr, nullptr};
  refuses(un, KVC_FIELD_K_ROPE, [](kvc_kv& kv) { kv.k_rope = &rope; });
  refuses(un, KVC_FIELD_V, [](kvc_kv& kv) { kv.v.data = nullptr; });
}

TEST_CASE("codes and scales beyond 2^31 bytes are found", "[machine]") {
  coded_shape s;
  s.k = s.v = {KVC_U4, false, KVC_SCALE_TOKEN, 0, 0};
  s.heads = 1;
  s.blocks = 5;
  coded_world near({s}, 7), far({s}, 7);
  const int64_t step = (int64_t{1} << 30) + 4096;
  sparse_arena arena(size_t(step) * 30);
  kvc_kv& kv = far.layers[0];
  for (kvc_plane* p : {&kv.k, &kv.v}) {
    std::byte* base = arena.data() + (p == &kv.k ? 0 : 15 * step);
    p->data = base;
    p->scale = base + 5 * step;
    p->zero = base + 10 * step;
    p->block_stride = p->scale_block_stride = step;
  }
  const std::vector<kvc_command> c = {command_of(KVC_OP_SEAL, 32, 0, 4),
                                      command_of(KVC_OP_COPY, 32, 4, 3, 0, 1)};
  const kvc_run a = near.run_of(c), b = far.run_of(c);
  REQUIRE(kvc_cpu_run(&a, nullptr, nullptr) == KVC_OK);
  REQUIRE(kvc_cuda_run(&b, nullptr, nullptr) == KVC_OK);
  for (const bool keys : {true, false}) {
    const kvc_plane &x = keys ? near.layers[0].k : near.layers[0].v, &y = keys ? kv.k : kv.v;
    for (const int64_t id : {3, 4}) {
      const auto same = [&](void* p, int64_t stride, void* q, size_t n) {
        return std::memcmp(static_cast<char*>(p) + id * stride, static_cast<char*>(q) + id * step, n) == 0;
      };
      CHECK(same(x.data, x.block_stride, y.data, 32 * 64 / 2));
      CHECK(same(x.scale, x.scale_block_stride, y.scale, 64));
      CHECK(same(x.zero, x.scale_block_stride, y.zero, 64));
    }
  }
}

}  // namespace kvcache::test
