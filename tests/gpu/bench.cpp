// SPDX-License-Identifier: Apache-2.0
#include "gpu/bench.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvcache/attend/data_plane.hpp"
#include "kvcache/core/numeric.hpp"

namespace kvcache::gpu_check {
namespace {

int32_t attribute(cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, 0), "attribute");
  return value;
}

void check_launch(int code, const char* what) {
  check(static_cast<cudaError_t>(code), what);
}

std::string version_text(int v) {
  return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
}

/// Scales of a plane of codes: 2^-5, minima -1/2.
void fill_scales(const kvc_kv& layer, const kvc_plane& p, int32_t dim, kvc_stream stream) {
  if (p.scale == nullptr) return;
  const bool shared = p.scale_head_stride == 0;
  int32_t count = 1;
  if (p.scale_kind == KVC_SCALE_CHANNEL) count = dim * ((layer.block + p.scale_group - 1) / p.scale_group);
  if (p.scale_kind == KVC_SCALE_TOKEN) count = layer.block * ((dim + p.scale_group - 1) / p.scale_group);
  const int32_t heads = shared ? 1 : layer.kv_heads;
  const auto fill = [&](void* to, float value) {
    if (to == nullptr) return;
    check_launch(queue_fill_cells(to, layer.blocks, p.scale_block_stride, heads, p.scale_head_stride, count,
                                  to_f16(value).bits, stream),
                 "fill scales");
  };
  fill(p.scale, 0x1p-5f);
  fill(p.zero, -0.5f);
}

void fill_planes(bench& b, const attend_case& c, const kvc_kv& layer, size_t bytes) {
  const content what = c.stored.format != nullptr  ? content::codes
                       : c.stored.type == KVC_BF16 ? content::bf16
                                                   : content::f16;
  check_launch(queue_fill(b.pool.data(), bytes, what, 1, b.stream.get()), "fill");
  fill_scales(layer, layer.k, c.dim, b.stream.get());
  fill_scales(layer, layer.v, c.dim, b.stream.get());
}

kvc_rows rows_at(const void* data, int32_t type, int32_t heads, int32_t dim) {
  return {data, type, heads, dim, 0, int64_t{2} * dim * heads, int64_t{2} * dim};
}

device_memory filled_rows(bench& b, const attend_case& c, int64_t values, uint32_t seed) {
  device_memory rows(static_cast<size_t>(values) * 2);
  check_launch(queue_fill(rows.data(), rows.size(), c.stored.type == KVC_BF16 ? content::bf16 : content::f16,
                          seed, b.stream.get()),
               "fill");
  return rows;
}

}  // namespace

bench::bench(const bench_options& o) : options(o) {
  multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  cache_bytes_ = static_cast<size_t>(attribute(cudaDevAttrL2CacheSize));
  other_ = device_memory(std::max(size_t{3} * cache_bytes_ / 16 * 16, size_t{1} << 20));
  check_launch(queue_fill(other_.data(), other_.size(), content::f16, 2, stream.get()), "fill");
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "memory");
  const auto want = static_cast<size_t>(double(free) * options.memory_part);
  pool = device_memory(want / 4096 * 4096);
  check_launch(queue_fill(pool.data(), pool.size(), content::f16, 1, stream.get()), "fill");
  stream.wait();
}

void bench::forget_cache() {
  check_launch(queue_read(other_.data(), other_.size(), {4, 4}, multiprocessors, never_.data(), stream.get()),
               "read");
}

void bench::warm_up() {
  for (int32_t i = 0; i < std::max(10000 / options.shrink, 1); ++i) forget_cache();
  stream.wait();
}

double bench::read_ceiling(int64_t bytes) {
  const int64_t wanted =
      std::min<int64_t>((bytes + 15) / 16 * 16, static_cast<int64_t>(pool.size()) / 16 * 16);
  if (const auto known = ceilings_.find(wanted); known != ceilings_.end()) return known->second;
  double best = 0;
  for (const read_shape& shape : read_shapes) {
    const double median = spread_of(timed([&] {
                            check_launch(queue_read(pool.data(), static_cast<size_t>(wanted), shape,
                                                    multiprocessors, never_.data(), stream.get()),
                                         "read");
                          })).median;
    if (best == 0 || median < best) best = median;
  }
  return ceilings_[wanted] = best;
}

bool bench::late() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count() > options.seconds;
}

double bench::clock_now() {
  const device_array<uint64_t> passed(2);
  check_launch(queue_clock(passed.data(), 2000, stream.get()), "clock");
  const std::vector<uint64_t> read = passed.get(stream);
  return read[1] == 0 ? 0 : double(read[0]) / double(read[1]) * 1000;
}

std::vector<field> bench::card() const {
  cudaDeviceProp properties{};
  int driver = 0, runtime = 0;
  check(cudaGetDeviceProperties(&properties, 0), "device");
  check(cudaDriverGetVersion(&driver), "driver");
  check(cudaRuntimeGetVersion(&runtime), "runtime");
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "memory");
  return {{"card", properties.name},
          {"multiprocessors", multiprocessors},
          {"memory GB", double(total) / 1e9},
          {"L2 MB", double(cache_bytes_) / 1e6},
          {"SM MHz at most", attribute(cudaDevAttrClockRate) / 1000},
          {"memory MHz", attribute(cudaDevAttrMemoryClockRate) / 1000},
          {"driver's CUDA", version_text(driver)},
          {"CUDA", version_text(runtime)}};
}

attend_case shrunk(attend_case c, int32_t shrink) {
  if (shrink <= 1) return c;
  const auto part = [&](int32_t n) { return std::max(n / shrink / c.block, 1) * c.block; };
  if (c.rows > 1) c.rows = std::min(part(c.rows), 32);
  c.tokens = std::max(std::min(part(c.tokens), 64), c.rows);
  c.batch = std::min(c.batch, 2);
  return c;
}

prepared prepare(bench& b, const attend_case& c) {
  prepared out;
  const auto blocks = static_cast<int32_t>(blocks_of(c));
  const layer_or_reason described = describe_layer(c, blocks, b.pool.data());
  const plan_or_reason planned =
      described.reason.empty() ? plan_case(c, described.layer, b.multiprocessors) : plan_or_reason{};
  out.reason = described.reason + planned.reason;
  if (out.reason.empty() && described.bytes > static_cast<int64_t>(b.pool.size())) {
    out.reason = "needs more memory than is free";
  }
  out.layer = described.layer;
  out.plan = planned.plan;
  if (out.reason.empty()) fill_planes(b, c, out.layer, static_cast<size_t>(described.bytes));
  return out;
}

attend_call::attend_call(bench& b, const attend_case& c, const kvc_kv& layer, const kvc_plan& plan)
    : case_(c), layer_(layer), plan_(plan) {
  const int32_t columns = (c.tokens + c.block - 1) / c.block, q_heads = measured_kv_heads * c.group;
  std::vector<int32_t> table(size_t(c.batch) * size_t(columns)), start, position;
  std::vector<int64_t> slot;
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(7));
  for (int32_t s = 0; s < c.batch; ++s) {
    start.push_back(s * c.rows);
    for (int32_t r = 0; r < c.rows; ++r) position.push_back(c.tokens - c.rows + r);
    const int32_t last = c.tokens - 1;
    slot.push_back(int64_t{table[size_t(s) * size_t(columns) + size_t(last / c.block)]} * c.block +
                   last % c.block);
  }
  start.push_back(c.batch * c.rows);
  table_ = device_array<int32_t>(table, b.stream);
  length_ = device_array<int32_t>(std::vector<int32_t>(size_t(c.batch), c.tokens), b.stream);
  q_start_ = device_array<int32_t>(start, b.stream);
  q_pos_ = device_array<int32_t>(position, b.stream);
  slot_ = device_array<int64_t>(slot, b.stream);
  const int64_t q_values = int64_t{c.batch} * c.rows * q_heads * c.dim;
  q_ = filled_rows(b, c, q_values, 3);
  new_rows_ = filled_rows(b, c, int64_t{c.batch} * measured_kv_heads * c.dim, 4);
  out_ = device_memory(static_cast<size_t>(q_values) * 2);
  workspace_ = device_memory(plan.workspace_bytes);
}

void attend_call::append(bench& b) const {
  kvc_append a{};
  a.struct_size = sizeof a;
  a.rows = case_.batch;
  a.k = a.v = rows_at(new_rows_.data(), case_.stored.type, measured_kv_heads, case_.dim);
  a.slot = slot_.data();
  kvc_error e{};
  check(kvc_cuda_append(&layer_, &a, b.stream.get(), &e), e, "append");
}

void attend_call::attend(bench& b) const {
  const int32_t q_heads = measured_kv_heads * case_.group;
  kvc_batch batch{};
  batch.struct_size = sizeof batch;
  batch.n = case_.batch;
  batch.table = table_.data();
  batch.table_columns = (case_.tokens + case_.block - 1) / case_.block;
  batch.kv_len = length_.data();
  batch.q_start = case_.rows > 1 ? q_start_.data() : nullptr;
  batch.q_pos = q_pos_.data();
  kvc_softmax softmax{};
  softmax.struct_size = sizeof softmax;
  softmax.scale = 1 / std::sqrt(float(case_.dim));
  softmax.causal = 1;
  const kvc_rows q = rows_at(q_.data(), case_.stored.type, q_heads, case_.dim);
  kvc_out out{};
  out.struct_size = sizeof out;
  out.type = case_.stored.type;
  out.heads = q_heads;
  out.dim = case_.dim;
  out.o = out_.data();
  out.row_stride = q.row_stride;
  out.head_stride = q.head_stride;
  kvc_error e{};
  check(kvc_cuda_attend(&plan_, &layer_, &batch, &q, &softmax, &out, {workspace_.data(), workspace_.size()},
                        b.stream.get(), &e),
        e, "attend");
}

bool attend_call::plausible(bench& b) const {
  std::vector<uint16_t> read(out_.size() / 2);
  check(cudaMemcpyAsync(read.data(), out_.data(), out_.size(), cudaMemcpyDeviceToHost, b.stream.get()),
        "copy");
  b.stream.wait();
  bool any = false;
  for (const uint16_t u : read) {
    const float v = case_.stored.type == KVC_BF16 ? to_float(bf16{u}) : to_float(f16{u});
    if (!std::isfinite(v)) return false;
    any = any || v != 0;
  }
  return any;
}

}  // namespace kvcache::gpu_check
