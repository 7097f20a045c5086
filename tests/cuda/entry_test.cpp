// SPDX-License-Identifier: Apache-2.0
// The CUDA library itself, linked by a plain C++ program. A machine without a driver refuses every launch:
// then each entry point has to say so with a status, as it says what is wrong with its arguments before it
// asks for a device at all. On a machine with a driver the addresses below are no device memory, so nothing
// is launched.
#include <catch2/catch.hpp>
#include <cstdint>
#include <vector>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/cuda/data_plane.hpp"
#include "no_exceptions.hpp"

extern "C" int kvc_test_entry_points_in_c(kvc_status* statuses, int most);

namespace kvcache::test {
namespace {

/// Addresses that nothing may follow on the host.
void* far_away(uintptr_t i) {
  return reinterpret_cast<void*>(0x10000u * (i + 1));
}

kvc_kv layer() {
  kvc_kv kv{};
  kv.struct_size = sizeof kv;
  kv.kv_heads = 8;
  kv.dim_k = kv.dim_v = 128;
  kv.block = 16;
  kv.blocks = 1024;
  kv.k.type = KVC_F16;
  kv.k.dim_stride = 2;
  kv.k.token_stride = 256;
  kv.k.head_stride = 4096;
  kv.k.block_stride = 32768;
  kv.k.data = far_away(1);
  kv.v = kv.k;
  kv.v.data = far_away(2000);
  return kv;
}

/// A layer of int8 keys and int4 values with a scale per token, and its open blocks.
kvc_kv packed_layer() {
  kvc_kv kv = layer();
  kv.block = 32;
  kv.open_blocks = 8;
  kv.open_k = kv.k;
  kv.open_k.head_stride = 8192;
  kv.open_k.block_stride = 65536;
  kv.open_v = kv.open_k;
  for (kvc_plane* p : {&kv.k, &kv.v}) {
    const bool keys = p == &kv.k;
    p->type = keys ? KVC_U8 : KVC_U4;
    p->scale_kind = KVC_SCALE_TOKEN;
    p->scale_group = 128;
    p->dim_stride = keys ? 32 : 0;
    p->token_stride = keys ? 0 : 64;
    p->head_stride = 4096;
    p->block_stride = 32768;
    p->scale = far_away(keys ? 3000 : 4000);
    p->zero = far_away(keys ? 5000 : 6000);
    p->scale_head_stride = 64;
    p->scale_block_stride = 512;
  }
  return kv;
}

}  // namespace

TEST_CASE("a plan needs no driver and says what it cannot do") {
  const kvc_kv kv = layer();
  const auto at = gpu_attention::create(kv, {.q_heads = 32, .sequences = 8, .rows = 1, .slots = 131072});
  REQUIRE(at);
  CHECK(at->plan().splits > 1);
  CHECK(at->workspace_bytes() == size_t(8) * 32 * size_t(at->plan().splits) * (128 + 1) * 4);
  const auto refused = gpu_attention::create(kv, {.q_heads = 33});
  REQUIRE_FALSE(refused);
  CHECK(refused.error().field == std::string_view("q_heads"));
}

TEST_CASE("without a driver every entry point answers with a status") {
  const kvc_kv kv = layer();
  const auto at = gpu_attention::create(kv, {.q_heads = 32, .sequences = 2, .rows = 1, .slots = 4096});
  REQUIRE(at);
  if (!has_no_driver()) {
    WARN("there is a driver here: launches into addresses of nothing are left out");
    return;
  }
  const auto rows = dense_rows(far_away(3), element::f16, 8, 128),
             q = dense_rows(far_away(4), element::f16, 32, 128);
  kvc_batch batch{};
  batch.struct_size = sizeof batch;
  batch.n = 2;
  batch.table = static_cast<const int32_t*>(far_away(5));
  batch.table_columns = 256;
  batch.kv_len = static_cast<const int32_t*>(far_away(6));
  batch.q_pos = static_cast<const int32_t*>(far_away(7));
  const kvc_out out = dense_out(far_away(8), element::f16, 32, 128, static_cast<float*>(far_away(9)));
  const kvc_buf workspace{far_away(10), at->workspace_bytes()};
  kvc_rope rope{};
  rope.struct_size = sizeof rope;
  rope.dims = 128;
  rope.theta = 1e4;
  const auto* pos = static_cast<const int32_t*>(far_away(7));
  const auto is_device_error = [](status s) {
    return !s && s.field == std::string_view("device") && s.value > 0;
  };
  CHECK(is_device_error(at->run(kv, batch, q, causal_softmax(0.1f), out, workspace, nullptr)));
  CHECK(is_device_error(gpu_append(
      kv, rows, rows,
      {.slots = static_cast<const int64_t*>(far_away(11)), .rows = 4, .rope = &rope, .positions = pos},
      nullptr)));
  CHECK(is_device_error(gpu_rope(rope, q, 4, pos, far_away(12), nullptr)));
  const kvc_out parts[2] = {out, out};
  CHECK(is_device_error(gpu_merge(parts, 4, out, nullptr)));
  const kvc_kv packed = packed_layer();
  const kvc_command seal{KVC_OP_SEAL, 0, 0, 32, 1, 2, 0}, copy{KVC_OP_COPY, 0, 0, 32, 1, 2, 0};
  CHECK(is_device_error(gpu_run({&packed, 1}, {&seal, 1}, nullptr)));
  CHECK(is_device_error(gpu_run({&packed, 1}, {&copy, 1}, nullptr)));
  CHECK(is_device_error(gpu_run({&kv, 1}, {&copy, 0}, nullptr)) == false);
  CHECK(is_device_error(gpu_append(
      packed, rows, rows, {.slots = static_cast<const int64_t*>(far_away(11)), .rows = 4}, nullptr)));
  CHECK(is_device_error(gpu_unpack(packed, static_cast<const int32_t*>(far_away(5)), 2, 0,
                                   {.k = static_cast<float*>(far_away(12)), .k_stride = 4096}, nullptr)));
  // A caller's mistake is found first.
  kvc_batch bad = batch;
  bad.kv_len = nullptr;
  CHECK(at->run(kv, bad, q, causal_softmax(0.1f), out, workspace, nullptr).field ==
        std::string_view("kv_len"));
}

TEST_CASE("programs in C and without exceptions link the same library") {
  kvc_status in_c[8] = {};
  const int n = kvc_test_entry_points_in_c(in_c, 8);
  REQUIRE(n == 4);
  CHECK(in_c[0] == KVC_ABI);
  CHECK(in_c[1] == KVC_OK);
  CHECK(in_c[2] == KVC_BAD_ARGUMENT);
  CHECK(in_c[3] == KVC_BAD_ARGUMENT);
  CHECK(plan_without_exceptions() == KVC_OK);
}

}  // namespace kvcache::test
