// SPDX-License-Identifier: Apache-2.0
// Reading sealed blocks back with the CUDA kernels, run on the CPU, bit for bit against the CPU's data plane.
#include "kvcache/cuda/data_plane.hpp"
#include "simt/coded_world.hpp"

namespace kvcache::test {

TEST_CASE("unpacked values have the bits that the CPU gives, for every code and scale") {
  uint32_t n = 0;
  for (const coded_side& codes : all_codes()) {
    for (const auto& scales : all_scales()) {
      for (const int32_t dim : {64, 80, 256}) {
        ++n;
        coded_shape s;
        s.k = s.v = codes;
        s.k.kind = s.v.kind = scales.first;
        s.k.group = s.v.group = scales.second;
        if (n % 6 == 0) s.k = {n % 4 == 0 ? KVC_F16 : KVC_BF16, false, KVC_SCALE_NONE, 0, 0};
        s.dim_k = s.dim_v = dim;
        s.block = 32 << n % 3;
        s.one_run = n % 2 == 0;
        coded_world w({s}, n, 2);
        const std::vector<kvc_command> c = {command_of(KVC_OP_SEAL, s.block, 0, 4),
                                            command_of(KVC_OP_SEAL, s.block, 1, 1)};
        const kvc_run r = w.run_of(c);
        REQUIRE(kvc_cpu_run(&r, nullptr, nullptr) == KVC_OK);
        const size_t cell = size_t(s.block * dim), steps[2] = {cell + 5, cell + 9};
        std::vector<float> k(2 * steps[0]), v(2 * steps[1]);
        const int32_t good[] = {4, 1};
        const guarded<int32_t> ids(std::vector<int32_t>{4, 5, -1, 1});
        for (int32_t head = 0; head < 2; ++head) {
          REQUIRE(kvc_cpu_unpack(&w.layers[0], good, 2, head, k.data(), int64_t(steps[0]), v.data(),
                                 int64_t(steps[1]), 0, nullptr) == KVC_OK);
          guarded<float> got_k(3 * steps[0] + cell), got_v(3 * steps[1] + cell);
          simt::the_backend().seed = n % 4;
          const status done =
              gpu_unpack(w.layers[0], ids.data(), 4, head,
                         {got_k.data(), int64_t(steps[0]), got_v.data(), int64_t(steps[1])}, nullptr);
          INFO(simt::the_backend().fault << done.field);
          REQUIRE(done);
          CAPTURE(n, codes.type, codes.symmetric, scales.first, scales.second, dim, s.block);
          for (const bool keys : {true, false}) {
            const auto& got = keys ? got_k : got_v;
            const auto& want = keys ? k : v;
            const size_t step = steps[keys ? 0 : 1];
            REQUIRE(std::memcmp(got.data(), want.data(), 4 * cell) == 0);
            REQUIRE(std::memcmp(got.data() + 3 * step, want.data() + step, 4 * cell) == 0);
            // Ids outside the pool leave their places, and nothing lies between.
            for (size_t i = cell; i < 3 * step; ++i) REQUIRE(std::isnan(got[i]));
          }
        }
      }
    }
  }
}

TEST_CASE("keys or values alone are unpacked, of layers without codes too") {
  coded_shape s;
  s.k = {KVC_F16, false, KVC_SCALE_NONE, 0, 0};
  s.v = {KVC_BF16, false, KVC_SCALE_NONE, 0, 0};
  coded_world w({s}, 1);
  const std::vector<kvc_command> c = {command_of(KVC_OP_SEAL, 32, 0, 2)};
  const kvc_run r = w.run_of(c);
  REQUIRE(kvc_cpu_run(&r, nullptr, nullptr) == KVC_OK);
  const guarded<int32_t> ids(std::vector<int32_t>{2});
  std::vector<float> want(32 * 64);
  guarded<float> got(32 * 64);
  for (const bool keys : {true, false}) {
    REQUIRE(kvc_cpu_unpack(&w.layers[0], ids.data(), 1, 1, keys ? want.data() : nullptr, 0,
                           keys ? nullptr : want.data(), 0, 0, nullptr) == KVC_OK);
    REQUIRE(kvc_cuda_unpack(&w.layers[0], ids.data(), 1, 1, keys ? got.data() : nullptr, 0,
                            keys ? nullptr : got.data(), 0, nullptr, nullptr) == KVC_OK);
    REQUIRE(std::memcmp(want.data(), got.data(), 4 * want.size()) == 0);
  }
}

TEST_CASE("codes of any bits are read as the CPU reads them") {
  std::mt19937 random(3);
  for (const coded_side& codes : all_codes()) {
    coded_shape s;
    s.k = s.v = codes;
    s.blocks = 1;
    s.heads = 1;
    coded_world w({s}, 1);
    auto& sealed = w.memory[0]->memory[0];
    for (std::byte& b : sealed) b = static_cast<std::byte>(random());
    // Scales that are numbers, of either sign and as small as they come.
    for (const kvc_plane* p : {&w.layers[0].k, &w.layers[0].v}) {
      for (void* at : {p->scale, p->zero}) {
        for (int32_t i = 0; at != nullptr && i < 32; ++i) static_cast<uint16_t*>(at)[i] &= 0xbbff;
      }
    }
    const guarded<int32_t> ids(std::vector<int32_t>{0});
    std::vector<float> k(32 * 64), v(32 * 64);
    guarded<float> got_k(32 * 64), got_v(32 * 64);
    REQUIRE(kvc_cpu_unpack(&w.layers[0], ids.data(), 1, 0, k.data(), 0, v.data(), 0, KVC_TARGET_SCALAR,
                           nullptr) == KVC_OK);
    REQUIRE(kvc_cuda_unpack(&w.layers[0], ids.data(), 1, 0, got_k.data(), 0, got_v.data(), 0, nullptr,
                            nullptr) == KVC_OK);
    for (size_t i = 0; i < k.size(); ++i) {
      CAPTURE(codes.type, codes.symmetric, i);
      REQUIRE(((std::isnan(k[i]) && std::isnan(got_k[i])) || std::memcmp(&k[i], &got_k[i], 4) == 0));
      REQUIRE(((std::isnan(v[i]) && std::isnan(got_v[i])) || std::memcmp(&v[i], &got_v[i], 4) == 0));
    }
  }
}

TEST_CASE("unpack names the field it objects to", "[machine]") {
  coded_shape s;
  coded_world w({s}, 1);
  const guarded<int32_t> ids(std::vector<int32_t>{0});
  guarded<float> k(32 * 64);
  const auto refuses = [&](kvc_status status, int32_t field, auto edit, const int32_t* id, int32_t n,
                           int32_t head) {
    kvc_kv kv = w.layers[0];
    edit(kv);
    kvc_error e{};
    const int before = simt::the_backend().launches;
    CHECK(kvc_cuda_unpack(&kv, id, n, head, k.data(), 0, nullptr, 0, nullptr, &e) == status);
    CHECK(e.field == field);
    CHECK(simt::the_backend().launches == before);
  };
  const auto none = [](kvc_kv&) {};
  refuses(KVC_BAD_ARGUMENT, KVC_FIELD_N, none, ids.data(), -1, 0);
  refuses(KVC_BAD_ARGUMENT, KVC_FIELD_N, none, nullptr, 1, 0);
  refuses(KVC_UNSUPPORTED, KVC_FIELD_N, none, ids.data(), INT32_MAX, 0);
  refuses(KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS, none, ids.data(), 1, 2);
  refuses(KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS, none, ids.data(), 1, -1);
  refuses(
      KVC_ABI, KVC_FIELD_KV, [](kvc_kv& kv) { kv.struct_size = 0; }, ids.data(), 1, 0);
  refuses(
      KVC_UNSUPPORTED, KVC_FIELD_V, [](kvc_kv& kv) { kv.v.data = nullptr; }, ids.data(), 1, 0);
  REQUIRE(kvc_cuda_unpack(&w.layers[0], nullptr, 0, 0, nullptr, 0, nullptr, 0, nullptr, nullptr) == KVC_OK);
}

}  // namespace kvcache::test
