// SPDX-License-Identifier: Apache-2.0
// The calls of docs/cuda.md, on the CPU: device memory is host memory here, and the stream is none.
#include "kvcache/cuda/data_plane.hpp"

#include "kvcache/attend/data_plane.hpp"
#include "simt/gpu_world.hpp"

namespace kvcache::test {

TEST_CASE("the calls of the documentation append a token and attend") {
  constexpr int32_t kv_heads = 2, q_heads = 8, dim = 64, sequences = 2;
  constexpr kvc_stream stream = nullptr;
  guarded<std::byte> memory(4 * 1024 * 1024);
  std::byte* device = memory.data() + memory.size() % 64;

  // [layer]
  // Blocks of 16 tokens, heads first: a head's block is one run of 2 KiB.
  kvc_kv layer{};
  layer.struct_size = sizeof layer;
  layer.kv_heads = kv_heads;
  layer.dim_k = layer.dim_v = dim;
  layer.block = 16;
  layer.blocks = 256;
  layer.k.type = KVC_F16;
  layer.k.dim_stride = 2;
  layer.k.token_stride = 2 * dim;
  layer.k.head_stride = layer.k.token_stride * layer.block;
  layer.k.block_stride = layer.k.head_stride * kv_heads;
  layer.v = layer.k;
  layer.k.data = device;
  layer.v.data = device + layer.k.block_stride * layer.blocks;
  // [layer]

  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto some = [&](size_t n) {
    guarded<uint16_t> v(n);
    for (uint16_t& x : v) x = to_f16(normal(random)).bits;
    return v;
  };
  const auto keys = some(sequences * kv_heads * dim), values = some(sequences * kv_heads * dim);
  const auto queries = some(sequences * q_heads * dim);
  guarded<uint16_t> results(sequences * q_heads * dim);
  // Two sequences, one token each so far: blocks 7 and 3.
  const guarded<int32_t> table(std::vector<int32_t>{7, -1, 3, -1}), lengths(std::vector<int32_t>{1, 1});
  const guarded<int32_t> positions(std::vector<int32_t>{0, 0});
  const guarded<int64_t> slots(std::vector<int64_t>{7 * 16, 3 * 16});
  kvc_batch batch{};
  batch.struct_size = sizeof batch;
  batch.n = sequences;
  batch.table = table.data();
  batch.table_columns = 2;
  batch.kv_len = lengths.data();
  batch.q_pos = positions.data();

  // [plan]
  // Once. Needs no driver; workspace_bytes() of device memory serve every layer.
  auto at = gpu_attention::create(layer, {.q_heads = q_heads, .sequences = sequences, .slots = 32});
  if (!at) FAIL(at.error().field);
  // [plan]
  guarded<std::byte> workspace(at->workspace_bytes());
  const kvc_buf scratch{workspace.data(), workspace.size()};

  // [step]
  // Per layer and step: nothing waits, nothing is allocated, and a graph may capture it.
  status done = gpu_append(layer, dense_rows(keys.data(), element::f16, kv_heads, dim),
                           dense_rows(values.data(), element::f16, kv_heads, dim),
                           {.slots = slots.data(), .rows = sequences}, stream);
  if (done) {
    done =
        at->run(layer, batch, dense_rows(queries.data(), element::f16, q_heads, dim), causal_softmax(0.125f),
                dense_out(results.data(), element::f16, q_heads, dim), scratch, stream);
  }
  // [step]
  REQUIRE(done);
  // One key: its value is the result.
  for (size_t s = 0; s < sequences; ++s) {
    for (size_t h = 0; h < q_heads; ++h) {
      for (size_t d = 0; d < dim; ++d) {
        REQUIRE(results[(s * q_heads + h) * dim + d] == values[(s * kv_heads + h / 4) * dim + d]);
      }
    }
  }
}

}  // namespace kvcache::test
