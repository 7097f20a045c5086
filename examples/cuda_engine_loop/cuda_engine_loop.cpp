// SPDX-License-Identifier: Apache-2.0
// The decode loop of an engine on CUDA, in plain C++: one plan for all layers and steps, one captured graph,
// and replays while the texts grow. Between replays only the contents of fixed arrays change: lengths,
// positions, slots. Without a GPU it says so and exits with 1. Not run on a GPU yet.
//
// The check at the end: every value of sequence s is the number s + 1, so whatever the weights are, attention
// has to give s + 1, unless a kernel reads another sequence's block, a slot that was not written, or a stale
// length.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <vector>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/core/numeric.hpp"
#include "kvcache/cuda/data_plane.hpp"

namespace {

constexpr int32_t layers = 4, kv_heads = 8, q_heads = 32, dim = 128, block = 16;
constexpr int32_t sequences = 6, steps = 100, columns = (steps + block - 1) / block;

/// Everything is one piece of device memory, handed out in turn.
class device_arena {
 public:
  bool create(size_t bytes) { return cudaMalloc(&base_, bytes) == cudaSuccess; }
  ~device_arena() { cudaFree(base_); }
  template <class T>
  T* take(size_t n) {
    used_ = (used_ + 255) / 256 * 256;
    auto* p = reinterpret_cast<T*>(static_cast<char*>(base_) + used_);
    used_ += n * sizeof(T);
    return p;
  }

 private:
  void* base_ = nullptr;
  size_t used_ = 0;
};

bool ok(cudaError_t code, const char* what) {
  if (code != cudaSuccess) std::printf("%s: %s\n", what, cudaGetErrorString(code));
  return code == cudaSuccess;
}
bool ok(const kvcache::status& s, const char* what) {
  if (!s)
    std::printf("%s: %s %s %lld\n", what, kvcache::to_text(s.code), s.field, static_cast<long long>(s.value));
  return bool(s);
}

template <class T>
bool put(T* to, const std::vector<T>& from, cudaStream_t stream) {
  return ok(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice, stream),
            "copy");
}

kvc_kv layer_in(device_arena& memory) {
  kvc_kv kv{};
  kv.struct_size = sizeof kv;
  kv.kv_heads = kv_heads;
  kv.dim_k = kv.dim_v = dim;
  kv.block = block;
  kv.blocks = sequences * columns;
  kv.k.type = KVC_F16;
  kv.k.dim_stride = 2;
  kv.k.token_stride = 2 * dim;
  kv.k.head_stride = kv.k.token_stride * block;
  kv.k.block_stride = kv.k.head_stride * kv_heads;
  kv.v = kv.k;
  const auto plane = static_cast<size_t>(kv.k.block_stride * kv.blocks);
  kv.k.data = memory.take<char>(plane);
  kv.v.data = memory.take<char>(plane);
  return kv;
}

/// What a step reads and writes; the addresses are in the graph, the contents change.
struct step_arrays {
  uint16_t *q, *k, *v, *out;
  int32_t *table, *length, *position;
  int64_t* slot;
  explicit step_arrays(device_arena& m)
      : q(m.take<uint16_t>(sequences * q_heads * dim)),
        k(m.take<uint16_t>(sequences * kv_heads * dim)),
        v(m.take<uint16_t>(sequences * kv_heads * dim)),
        out(m.take<uint16_t>(sequences * q_heads * dim)),
        table(m.take<int32_t>(sequences * columns)),
        length(m.take<int32_t>(sequences)),
        position(m.take<int32_t>(sequences)),
        slot(m.take<int64_t>(sequences)) {}
};

/// One step over all layers, queued on the stream.
bool queue_step(const std::vector<kvc_kv>& planes, const kvcache::gpu_attention& at, const step_arrays& a,
                kvc_buf workspace, cudaStream_t stream) {
  using namespace kvcache;
  kvc_batch batch{};
  batch.struct_size = sizeof batch;
  batch.n = sequences;
  batch.table = a.table;
  batch.table_columns = columns;
  batch.kv_len = a.length;
  batch.q_pos = a.position;
  for (const kvc_kv& layer : planes) {
    const status stored = gpu_append(layer, dense_rows(a.k, element::f16, kv_heads, dim),
                                     dense_rows(a.v, element::f16, kv_heads, dim),
                                     {.slots = a.slot, .rows = sequences}, stream);
    if (!ok(stored, "append")) return false;
    const status attended = at.run(layer, batch, dense_rows(a.q, element::f16, q_heads, dim),
                                   causal_softmax(1 / std::sqrt(float{dim})),
                                   dense_out(a.out, element::f16, q_heads, dim), workspace, stream);
    if (!ok(attended, "attend")) return false;
  }
  return true;
}

/// Lengths, positions and slots of a step. Sequence s owns blocks s, s + sequences, ...
bool write_step(int32_t step, const step_arrays& a, cudaStream_t stream) {
  std::vector<int32_t> length, position;
  std::vector<int64_t> slot;
  for (int32_t s = 0; s < sequences; ++s) {
    length.push_back(step + 1);
    position.push_back(step);
    slot.push_back(int64_t{s + step / block * sequences} * block + step % block);
  }
  // Pageable memory: the copies have left it when the calls return.
  return put(a.length, length, stream) && put(a.position, position, stream) && put(a.slot, slot, stream);
}

bool write_constants(const step_arrays& a, cudaStream_t stream) {
  std::vector<int32_t> table;
  std::vector<uint16_t> q, k, v;
  for (int32_t s = 0; s < sequences; ++s) {
    for (int32_t c = 0; c < columns; ++c) table.push_back(s + c * sequences);
    for (int32_t i = 0; i < q_heads * dim; ++i) q.push_back(kvcache::to_f16(float(i % 7) - 3).bits);
    for (int32_t i = 0; i < kv_heads * dim; ++i) k.push_back(kvcache::to_f16(float(i % 5) - 2).bits);
    for (int32_t i = 0; i < kv_heads * dim; ++i) v.push_back(kvcache::to_f16(float(s + 1)).bits);
  }
  return put(a.table, table, stream) && put(a.q, q, stream) && put(a.k, k, stream) && put(a.v, v, stream);
}

int wrong_values(const std::vector<uint16_t>& out) {
  int wrong = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const float want = float(i / size_t(q_heads * dim)) + 1;
    wrong += !(std::fabs(kvcache::to_float(kvcache::f16{out[i]}) - want) < 0.01f);
  }
  return wrong;
}

int loop() {
  cudaDeviceProp card{};
  cudaStream_t stream = nullptr;
  device_arena memory;
  if (!ok(cudaGetDeviceProperties(&card, 0), "device") || !ok(cudaStreamCreate(&stream), "stream") ||
      !memory.create(size_t{256} << 20)) {
    return 1;
  }
  std::vector<kvc_kv> planes;
  for (int32_t l = 0; l < layers; ++l) planes.push_back(layer_in(memory));
  const step_arrays arrays(memory);
  const auto at = kvcache::gpu_attention::create(planes[0], {.q_heads = q_heads,
                                                             .sequences = sequences,
                                                             .slots = steps,
                                                             .multiprocessors = card.multiProcessorCount});
  if (!at) return ok(at.error(), "plan"), 1;
  const kvc_buf workspace{memory.take<char>(at->workspace_bytes()), at->workspace_bytes()};

  // Once without a graph: kernels are loaded when they are first started, which a capture does not allow.
  if (!write_constants(arrays, stream) || !write_step(0, arrays, stream) ||
      !queue_step(planes, *at, arrays, workspace, stream) ||
      !ok(cudaStreamSynchronize(stream), "first step")) {
    return 1;
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  if (!ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture") ||
      !queue_step(planes, *at, arrays, workspace, stream) ||
      !ok(cudaStreamEndCapture(stream, &graph), "capture") ||
      !ok(cudaGraphInstantiate(&replay, graph, 0), "instantiate")) {
    return 1;
  }
  for (int32_t step = 0; step < steps; ++step) {
    if (!write_step(step, arrays, stream) || !ok(cudaGraphLaunch(replay, stream), "replay")) return 1;
  }
  std::vector<uint16_t> out(size_t{sequences} * q_heads * dim);
  if (!ok(cudaMemcpyAsync(out.data(), arrays.out, out.size() * 2, cudaMemcpyDeviceToHost, stream), "copy") ||
      !ok(cudaStreamSynchronize(stream), "steps")) {
    return 1;
  }
  const int wrong = wrong_values(out);
  std::printf("%s: %d replays of %d layers, %d sequences of %d tokens; %d of %zu values wrong\n", card.name,
              steps, layers, sequences, steps, wrong, out.size());
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main() {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess || devices == 0) {
    std::printf("no GPU: %s\n", code != cudaSuccess ? cudaGetErrorString(code) : "no device");
    return 1;
  }
  return loop();
}
