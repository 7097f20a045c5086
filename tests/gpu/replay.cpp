// SPDX-License-Identifier: Apache-2.0
// gpu_replay: a step (append, attention over a shared prefix and over each sequence's own keys, merge with a
// sink) captured once and replayed while lengths grow, tables change and sequences leave. Every result, and
// the cache itself, has to have the bits that plain calls of the same step give. Not run on a GPU yet.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "gpu/device.hpp"
#include "kvcache/attend/data_plane.hpp"
#include "kvcache/core/numeric.hpp"

namespace kvcache::gpu_check {
namespace {

constexpr int32_t kv_heads = 2, q_heads = 8, dim = 128, block = 16, sequences = 5;
constexpr int32_t columns = 40, prefix_columns = 3, blocks = 256, steps = 24;

/// Everything a step reads and writes; the addresses are in the graph.
struct step_memory {
  device_array<uint16_t> k, v, new_k, new_v, q, part0, part1, out;
  device_array<float> lse0, lse1, lse, sink;
  device_array<int32_t> table, prefix_table, length, prefix_length, position;
  device_array<int64_t> slot;
  device_memory workspace;
  kvc_kv layer{};
  kvc_plan plan{};
};

kvc_plan plan_of(const kvc_kv& layer) {
  kvc_plan_in in{};
  in.struct_size = sizeof in;
  in.q_heads = q_heads;
  in.q_type = layer.k.type;
  in.out_type = KVC_F32;
  in.n = sequences;
  in.max_q = 1;
  in.max_kv = columns * block;
  in.width = 16;  // of a small device, so that there are splits
  in.kv = &layer;
  in.features = KVC_USE_LSE;
  kvc_plan plan{};
  plan.struct_size = sizeof plan;
  kvc_error e{};
  check(kvc_cuda_plan(&in, &plan, &e), e, "plan");
  return plan;
}

step_memory make_step(int32_t type, const device_stream& s) {
  constexpr size_t plane = size_t{blocks} * kv_heads * block * dim, results = size_t{sequences} * q_heads;
  step_memory m;
  for (auto* array : {&m.k, &m.v}) *array = device_array<uint16_t>(plane);
  for (auto* array : {&m.new_k, &m.new_v})
    *array = device_array<uint16_t>(size_t{sequences} * kv_heads * dim);
  m.q = device_array<uint16_t>(results * dim);
  for (auto* array : {&m.part0, &m.part1, &m.out}) *array = device_array<uint16_t>(2 * results * dim);
  for (auto* array : {&m.lse0, &m.lse1, &m.lse}) *array = device_array<float>(results);
  m.sink = device_array<float>(std::vector<float>(q_heads, 0.5f), s);
  m.table = device_array<int32_t>(size_t{sequences} * columns);
  m.prefix_table = device_array<int32_t>(size_t{sequences} * prefix_columns);
  for (auto* array : {&m.length, &m.prefix_length, &m.position}) *array = device_array<int32_t>(sequences);
  m.slot = device_array<int64_t>(sequences);
  kvc_kv& kv = m.layer;
  kv.struct_size = sizeof kv;
  kv.kv_heads = kv_heads;
  kv.dim_k = kv.dim_v = dim;
  kv.block = block;
  kv.blocks = blocks;
  kv.k.type = static_cast<int16_t>(type);
  kv.k.dim_stride = 2;
  kv.k.token_stride = 2 * dim;
  kv.k.head_stride = kv.k.token_stride * block;
  kv.k.block_stride = kv.k.head_stride * kv_heads;
  kv.v = kv.k;
  kv.k.data = m.k.data();
  kv.v.data = m.v.data();
  m.plan = plan_of(kv);
  m.workspace = device_memory(m.plan.workspace_bytes);
  return m;
}

/// What changes from step to step.
struct step_contents {
  std::vector<uint16_t> new_k, new_v, q;
  std::vector<int32_t> table, prefix_table, length, prefix_length, position;
  std::vector<int64_t> slot;
};

std::vector<uint16_t> random_rows(size_t n, int32_t type, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> out(n);
  for (uint16_t& x : out) x = type == KVC_F16 ? to_f16(normal(random)).bits : to_bf16(normal(random)).bits;
  return out;
}

/// Lengths grow by more and more; from time to time the tables are dealt again, and one sequence is absent.
step_contents contents_of(int32_t step, int32_t type, std::mt19937& random) {
  step_contents c;
  c.new_k = random_rows(size_t{sequences} * kv_heads * dim, type, random);
  c.new_v = random_rows(size_t{sequences} * kv_heads * dim, type, random);
  c.q = random_rows(size_t{sequences} * q_heads * dim, type, random);
  std::vector<int32_t> id(blocks);
  std::iota(id.begin(), id.end(), 0);
  std::mt19937 deal(static_cast<uint32_t>(step / 5));
  std::shuffle(id.begin(), id.end(), deal);
  size_t next = 0;
  std::vector<int32_t> prefix(id.begin(), id.begin() + prefix_columns);
  next += prefix_columns;
  for (int32_t s = 0; s < sequences; ++s) {
    const bool absent = step % 7 == 3 && s == step % sequences;
    const int32_t length = absent ? 0 : std::min(1 + step * (s + 1) * 5, columns * block);
    c.length.push_back(length);
    c.prefix_length.push_back(absent ? 0 : prefix_columns * block);
    c.position.push_back(std::max(length - 1, 0));
    for (int32_t i = 0; i < columns; ++i) {
      c.table.push_back(absent || i * block >= length ? -1 : id[next++]);
    }
    for (const int32_t p : prefix) c.prefix_table.push_back(absent ? -1 : p);
    const int32_t last = length - 1;
    c.slot.push_back(
        absent ? -1 : int64_t{c.table[size_t(s) * columns + size_t(last / block)]} * block + last % block);
  }
  return c;
}

void put(const step_memory& m, const step_contents& c, const device_stream& s) {
  m.new_k.put(c.new_k, s);
  m.new_v.put(c.new_v, s);
  m.q.put(c.q, s);
  m.table.put(c.table, s);
  m.prefix_table.put(c.prefix_table, s);
  m.length.put(c.length, s);
  m.prefix_length.put(c.prefix_length, s);
  m.position.put(c.position, s);
  m.slot.put(c.slot, s);
}

kvc_rows rows_of(const void* data, int32_t type, int32_t heads) {
  return {data, type, heads, dim, 0, int64_t{2} * dim * heads, int64_t{2} * dim};
}
kvc_out out_of(const device_array<uint16_t>& o, const device_array<float>& lse) {
  kvc_out out{};
  out.struct_size = sizeof out;
  out.type = KVC_F32;
  out.heads = q_heads;
  out.dim = dim;
  out.o = o.data();
  out.row_stride = int64_t{4} * dim * q_heads;
  out.head_stride = int64_t{4} * dim;
  out.lse2 = lse.data();
  return out;
}

void queue_attend(const step_memory& m, const device_array<int32_t>& table, int32_t table_columns,
                  const device_array<int32_t>& length, bool causal, const kvc_out& out,
                  const device_stream& s) {
  kvc_batch batch{};
  batch.struct_size = sizeof batch;
  batch.n = sequences;
  batch.table = table.data();
  batch.table_columns = table_columns;
  batch.kv_len = length.data();
  batch.q_pos = m.position.data();
  kvc_softmax softmax{};
  softmax.struct_size = sizeof softmax;
  softmax.scale = 1 / std::sqrt(float{dim});
  softmax.causal = causal ? 1 : 0;
  const kvc_rows q = rows_of(m.q.data(), m.layer.k.type, q_heads);
  kvc_error e{};
  check(kvc_cuda_attend(&m.plan, &m.layer, &batch, &q, &softmax, &out,
                        {m.workspace.data(), m.workspace.size()}, s.get(), &e),
        e, "attend");
}

void queue_step(const step_memory& m, const device_stream& s) {
  kvc_append a{};
  a.struct_size = sizeof a;
  a.rows = sequences;
  a.k = rows_of(m.new_k.data(), m.layer.k.type, kv_heads);
  a.v = rows_of(m.new_v.data(), m.layer.k.type, kv_heads);
  a.slot = m.slot.data();
  kvc_error e{};
  check(kvc_cuda_append(&m.layer, &a, s.get(), &e), e, "append");
  const kvc_out parts[] = {out_of(m.part0, m.lse0), out_of(m.part1, m.lse1)};
  queue_attend(m, m.prefix_table, prefix_columns, m.prefix_length, false, parts[0], s);
  queue_attend(m, m.table, columns, m.length, true, parts[1], s);
  const kvc_out out = out_of(m.out, m.lse);
  check(kvc_cuda_merge(parts, 2, sequences, m.sink.data(), &out, s.get(), &e), e, "merge");
}

/// Bits of everything a step wrote.
struct step_result {
  std::vector<uint16_t> o, k, v;
  std::vector<float> lse;
  bool same(const step_result& b) const {
    return o == b.o && k == b.k && v == b.v &&
           std::memcmp(lse.data(), b.lse.data(), lse.size() * sizeof(float)) == 0;
  }
};
step_result result_of(const step_memory& m, const device_stream& s) {
  return {m.out.get(s), m.k.get(s), m.v.get(s), m.lse.get(s)};
}
void poison(const step_memory& m, const device_stream& s) {
  m.out.put(std::vector<uint16_t>(m.out.size(), 0x7fff), s);
  m.lse.put(std::vector<float>(m.lse.size(), NAN), s);
}

bool finite_or_absent(const step_result& r, const step_contents& c) {
  for (size_t i = 0; i < r.lse.size(); ++i) {
    const bool absent = c.length[i / q_heads] == 0;
    // An absent sequence has the sink alone.
    if (!std::isfinite(r.lse[i])) return false;
    for (size_t d = 0; d < size_t{dim}; ++d) {
      float v = 0;
      std::memcpy(&v, r.o.data() + (i * dim + d) * 2, sizeof v);
      if (!std::isfinite(v) || (absent && v != 0)) return false;
    }
  }
  return true;
}

/// Answers how many steps went wrong.
int replay_steps(int32_t type, const char* name) {
  const device_stream stream;
  std::mt19937 random(11);
  const step_memory m = make_step(type, stream);
  const std::vector<uint16_t> k = random_rows(m.k.size(), type, random),
                              v = random_rows(m.v.size(), type, random);
  const auto restore = [&](const step_result& to) {
    m.k.put(to.k, stream);
    m.v.put(to.v, stream);
    poison(m, stream);
  };
  step_result before{{}, k, v, {}};
  restore(before);
  // Once without a graph: kernels are loaded when they are first started, which a capture does not allow.
  put(m, contents_of(1, type, random), stream);
  queue_step(m, stream);
  stream.wait();
  const device_graph graph(stream, [&] { queue_step(m, stream); });
  int wrong = 0, alike = 0;
  std::vector<uint16_t> last;
  for (int32_t step = 0; step < steps; ++step) {
    const step_contents c = contents_of(step, type, random);
    put(m, c, stream);
    restore(before);
    queue_step(m, stream);
    const step_result plain = result_of(m, stream);
    restore(before);
    graph.launch(stream);
    const step_result replayed = result_of(m, stream);
    const bool ok = replayed.same(plain) && finite_or_absent(replayed, c);
    if (!ok) std::printf("%s, step %d: a replay differs from plain calls, or is not finite\n", name, step);
    wrong += ok ? 0 : 1;
    alike += replayed.o == last ? 1 : 0;
    last = replayed.o;
    before = replayed;
  }
  if (alike != 0) std::printf("%s: %d steps gave what the step before gave\n", name, alike);
  std::printf("%s: %d steps of %zu launches replayed, %d splits, %d wrong\n", name, steps, graph.nodes(),
              m.plan.splits, wrong);
  return wrong + alike;
}

}  // namespace
}  // namespace kvcache::gpu_check

int main() {
  using namespace kvcache::gpu_check;
  return on_a_gpu([] { return replay_steps(KVC_F16, "f16") + replay_steps(KVC_BF16, "bf16") == 0 ? 0 : 1; });
}
