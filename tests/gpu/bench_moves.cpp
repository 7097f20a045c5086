// SPDX-License-Identifier: Apache-2.0
// Copy and gather commands beside cudaMemcpyAsync of the same bytes, and what the calls cost on the host.
#include <algorithm>
#include <chrono>
#include <numeric>

#include "gpu/bench.hpp"

namespace kvcache::gpu_check {
namespace {

constexpr int32_t layers = 8;

/// Layers one after another in the pool.
struct layer_stack {
  std::vector<kvc_kv> layer;
  int64_t block_bytes = 0;  ///< of one layer
  int64_t used = 0;
};
layer_stack stack_of(bench& b, int32_t block, int32_t blocks) {
  attend_case c{storages()[0], 1, block, 4, block, 128, 1};
  layer_stack out;
  for (int32_t l = 0; l < layers; ++l) {
    const layer_or_reason one = describe_layer(c, blocks, b.pool.data() + out.used);
    if (!one.reason.empty()) throw gpu_failure("layers of f16: " + one.reason);
    out.layer.push_back(one.layer);
    out.used += one.bytes;
  }
  out.block_bytes = kv_bytes(c);
  if (out.used > static_cast<int64_t>(b.pool.size()))
    throw gpu_failure("too little memory for command lists");
  return out;
}

void run_commands(bench& b, const layer_stack& s, const std::vector<kvc_command>& commands,
                  const std::vector<int32_t>& ids, const std::vector<kvc_keep>& keeps) {
  kvc_run run{};
  run.struct_size = sizeof run;
  run.layers = s.layer.data();
  run.n_layers = layers;
  run.commands = commands.data();
  run.n_commands = static_cast<int32_t>(commands.size());
  run.ids = ids.data();
  run.n_ids = static_cast<int32_t>(ids.size());
  run.keeps = keeps.data();
  run.n_keeps = static_cast<int32_t>(keeps.size());
  kvc_error e{};
  check(kvc_cuda_run(&run, b.stream.get(), &e), e, "run");
}

/// cudaMemcpyAsync from one end of the pool to the other.
double memcpy_us(bench& b, int64_t bytes) {
  const auto n = static_cast<size_t>(bytes);
  return spread_of(b.timed([&] {
           check(cudaMemcpyAsync(b.pool.data() + b.pool.size() / 2 / 256 * 256, b.pool.data(), n,
                                 cudaMemcpyDeviceToDevice, b.stream.get()),
                 "copy");
         }))
      .median;
}

row moved_row(bench& b, const char* what, int32_t block, int64_t bytes, const spread& us) {
  const double plain = memcpy_us(b, bytes);
  return {"Moves",
          {{"what", what},
           {"block", block},
           {"layers", layers},
           {"MB", double(bytes) / 1e6},
           {"us", us.median},
           {"us low", us.low},
           {"us high", us.high},
           {"GB/s read and written", gb_per_second(2 * double(bytes), us.median)},
           {"memcpy us", plain},
           {"of memcpy", us.median > 0 ? plain / us.median : 0}},
          {}};
}

row measure_copies(bench& b, int32_t block) {
  const int32_t copies = std::max(8192 / block / b.options.shrink, 1);
  const layer_stack s = stack_of(b, block, 2 * copies);
  std::vector<int32_t> id(size_t(2 * copies));
  std::iota(id.begin(), id.end(), 0);
  std::shuffle(id.begin(), id.end(), std::mt19937(5));
  std::vector<kvc_command> commands;
  for (int32_t i = 0; i < copies; ++i) {
    commands.push_back({KVC_OP_COPY, 0, 0, block, id[size_t(2 * i)], id[size_t(2 * i + 1)], 0});
  }
  const spread us = spread_of(b.timed([&] { run_commands(b, s, commands, {}, {}); }));
  return moved_row(b, "copy", block, int64_t{copies} * layers * s.block_bytes, us);
}

/// Every other slot of runs of blocks is kept.
row measure_gathers(bench& b, int32_t block) {
  const int32_t sequences = std::max(16 / b.options.shrink, 1);
  const int32_t n_src = std::max(1024 / block / b.options.shrink, 2) / 2 * 2, n_dst = n_src / 2;
  const int32_t tokens = n_dst * block, all = sequences * (n_src + n_dst);
  const layer_stack s = stack_of(b, block, all);
  std::vector<int32_t> id(size_t{static_cast<uint32_t>(all)}), ids, kept;
  std::iota(id.begin(), id.end(), 0);
  std::shuffle(id.begin(), id.end(), std::mt19937(6));
  for (int32_t t = 0; t < tokens; ++t) kept.push_back(2 * t);
  const device_array<int32_t> slots(kept, b.stream);
  std::vector<kvc_command> commands;
  size_t next = 0;
  for (int32_t i = 0; i < sequences; ++i) {
    commands.push_back({KVC_OP_GATHER, 0, 0, tokens, 0, 0, static_cast<int32_t>(ids.size())});
    for (const int32_t v : {n_src, n_dst, 0}) ids.push_back(v);
    for (int32_t k = 0; k < n_src + n_dst; ++k) ids.push_back(id[next++]);
  }
  const spread us = spread_of(b.timed([&] {
    run_commands(b, s, commands, ids, {kvc_keep{slots.data(), 0, 0}});
  }));
  return moved_row(b, "gather every other slot", block,
                   int64_t{sequences} * tokens * layers * s.block_bytes / block, us);
}

row measure_copy_ceiling(bench& b) {
  const auto bytes = static_cast<int64_t>(std::min(b.pool.size() / 2 / 256 * 256, size_t{2} << 30));
  const spread us = spread_of(b.timed([&] {
    check(static_cast<cudaError_t>(queue_copy(b.pool.data() + bytes, b.pool.data(), size_t(bytes),
                                              b.multiprocessors, b.stream.get())),
          "copy");
  }));
  row r = moved_row(b, "plain kernel", 0, bytes, us);
  r.fields[1] = {"block", "-"};
  r.fields[2] = {"layers", "-"};
  return r;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Microseconds that the host is busy with one call, of 100 that fit the queue of launches.
template <class Call>
spread host_us(bench& b, Call&& call) {
  const int32_t calls = std::max(100 / b.options.shrink, 1);
  std::vector<double> all;
  for (int32_t pass = 0; pass < b.options.times + 1; ++pass) {
    b.stream.wait();
    const double start = seconds_now();
    for (int32_t i = 0; i < calls; ++i) call();
    const double passed = seconds_now() - start;
    if (pass > 0) all.push_back(passed / calls * 1e6);
  }
  b.stream.wait();
  return spread_of(all);
}

template <class Call>
row host_row(bench& b, const char* what, Call&& call) {
  call();
  const device_graph graph(b.stream, call);
  const spread us = host_us(b, call);
  const spread replay = host_us(b, [&] { graph.launch(b.stream); });
  return {"Host",
          {{"what", what},
           {"launches", static_cast<int64_t>(graph.nodes())},
           {"us per call", us.median},
           {"us low", us.low},
           {"us high", us.high},
           {"us per replay of a graph", replay.median}},
          {}};
}

}  // namespace

std::vector<row> measure_moves(bench& b) {
  std::vector<row> rows{measure_copy_ceiling(b)};
  for (const int32_t block : {16, 64}) rows.push_back(measure_copies(b, block));
  for (const int32_t block : {16, 64}) rows.push_back(measure_gathers(b, block));
  return rows;
}

std::vector<row> measure_host(bench& b) {
  std::vector<row> rows;
  rows.push_back(host_row(b, "an empty kernel",
                          [&] { check(static_cast<cudaError_t>(queue_nothing(b.stream.get())), "launch"); }));
  for (const int32_t tokens : {128, 4096}) {
    const attend_case c = shrunk({storages()[0], 4, tokens, 4, 16, 128, 1}, b.options.shrink);
    const prepared p = prepare(b, c);
    if (!p.reason.empty()) throw gpu_failure("host: " + p.reason);
    const attend_call call(b, c, p.layer, p.plan);
    const std::string splits = ", " + std::to_string(p.plan.splits) + " splits";
    rows.push_back(host_row(b, ("attend" + splits).c_str(), [&] { call.attend(b); }));
    rows.push_back(host_row(b, ("append and attend" + splits).c_str(), [&] {
      call.append(b);
      call.attend(b);
    }));
  }
  return rows;
}

}  // namespace kvcache::gpu_check
