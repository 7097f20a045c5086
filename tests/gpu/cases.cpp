// SPDX-License-Identifier: Apache-2.0
#include "gpu/cases.hpp"

#include <algorithm>

#include "kvcache/quant/format.hpp"
#include "kvcache/quant/parse.hpp"

namespace kvcache::gpu_check {
namespace {

constexpr int32_t batches[] = {1, 4, 16, 64, 256};
constexpr int32_t lengths[] = {1024, 4096, 16384, 65536, 131072};
constexpr int32_t groups[] = {1, 4, 8};
constexpr int32_t blocks[] = {16, 32, 64};
constexpr int32_t dims[] = {64, 128};

kv_format format_of(const storage& s) {
  return s.format == nullptr ? kv_format{} : parse_format(s.format).value;
}
/// Packed blocks have 32 tokens or more.
int32_t usual_block(const storage& s) {
  return s.format == nullptr ? 16 : 32;
}
group_shape shape_of(const attend_case& c) {
  return {.layers = 1,
          .kv_heads = measured_kv_heads,
          .head_dim_k = c.dim,
          .head_dim_v = c.dim,
          .type = static_cast<element>(c.stored.type),
          .v_aliases_k = false,
          .window = 0};
}

std::string reason_of(const kvc_error& e, const char* who) {
  return std::string("refused by ") + who + " (" + kvc_field_text(e.field) + ", " + std::to_string(e.value) +
         ")";
}

void add_point(std::vector<attend_case>& all, const storage& s, int32_t batch, int32_t tokens) {
  attend_case c{s, batch, tokens, 4, usual_block(s), 128, 1};
  all.push_back(c);
  for (const int32_t group : groups) {
    if (group != c.group) all.push_back({s, batch, tokens, group, c.block, 128, 1});
  }
  for (const int32_t block : blocks) {
    if (block != c.block) all.push_back({s, batch, tokens, c.group, block, 128, 1});
  }
  all.push_back({s, batch, tokens, c.group, c.block, 64, 1});
}

struct point {
  int32_t batch, tokens;
};
constexpr point points[] = {{64, 16384}, {16, 4096}, {4, 131072}};

std::vector<attend_case> every_case() {
  std::vector<attend_case> all;
  for (const storage& s : storages()) {
    for (const int32_t dim : dims) {
      for (const int32_t block : blocks) {
        for (const int32_t group : groups) {
          for (const int32_t batch : batches) {
            for (const int32_t tokens : lengths) all.push_back({s, batch, tokens, group, block, dim, 1});
          }
        }
      }
    }
  }
  return all;
}

}  // namespace

const std::vector<storage>& storages() {
  static const std::vector<storage> all{
      {"f16", KVC_F16, nullptr}, {"bf16", KVC_BF16, nullptr}, {"e4m3", KVC_F16, "e4m3"},
      {"int8", KVC_F16, "int8"}, {"int4", KVC_F16, "int4"},   {"K8V4", KVC_F16, "k8v4"},
  };
  return all;
}

std::vector<attend_case> decode_cases(bool full) {
  if (full) return every_case();
  std::vector<attend_case> all;
  for (const point& p : points) {
    for (const storage& s : storages()) add_point(all, s, p.batch, p.tokens);
  }
  for (const int32_t batch : batches) {
    for (const int32_t tokens : lengths) {
      const bool seen = std::any_of(std::begin(points), std::end(points),
                                    [&](const point& p) { return p.batch == batch && p.tokens == tokens; });
      if (seen) continue;
      for (const storage& s : storages()) all.push_back({s, batch, tokens, 4, usual_block(s), 128, 1});
    }
  }
  return all;
}

std::vector<attend_case> prefill_cases() {
  std::vector<attend_case> all;
  for (const storage& s : storages()) {
    for (const int32_t chunk : {512, 1024, 2048, 4096}) {
      all.push_back({s, 1, chunk, 4, usual_block(s), 128, chunk});
    }
    all.push_back({s, 1, 16384, 4, usual_block(s), 128, 512});
    all.push_back({s, 8, 2048, 4, usual_block(s), 128, 2048});
  }
  return all;
}

layer_or_reason describe_layer(const attend_case& c, int32_t n, void* memory) {
  kvc_planes p{};
  p.struct_size = sizeof p;
  p.layers = 1;
  p.kv_heads = measured_kv_heads;
  p.dim_k = p.dim_v = c.dim;
  p.type = c.stored.type;
  p.block = c.block;
  p.blocks = n;
  p.order = KVC_K_ROW_MAJOR;
  p.formats = c.stored.format != nullptr ? &c.stored.format : nullptr;
  p.n_formats = c.stored.format != nullptr ? 1 : 0;
  p.open_blocks = 1;
  layer_or_reason out;
  kvc_error e{};
  if (kvc_cpu_planes(&p, nullptr, &out.bytes, &e) != KVC_OK) {
    out.reason = reason_of(e, "planes");
    return out;
  }
  // Addresses only: nothing is read or written there.
  p.memory = {memory != nullptr ? memory : reinterpret_cast<void*>(uintptr_t{1} << 20), size_t(out.bytes)};
  if (kvc_cpu_planes(&p, &out.layer, nullptr, &e) != KVC_OK) out.reason = reason_of(e, "planes");
  return out;
}

int64_t blocks_of(const attend_case& c) {
  return int64_t{c.batch} * ((c.tokens + c.block - 1) / c.block);
}

int64_t kv_bytes(const attend_case& c) {
  const kv_format f = format_of(c.stored);
  const group_shape shape = shape_of(c);
  const int64_t block =
      layout_of(f.k, shape, c.block, true).bytes + layout_of(f.v, shape, c.block, false).bytes;
  // Of a block that is not full, its tokens' part: only whole blocks have scales of their own size.
  return int64_t{c.batch} * c.tokens * block / c.block;
}

double attend_flops(const attend_case& c) {
  const double behind = double(c.tokens) - c.rows, n = c.rows;
  const double pairs = n * behind + n * (n + 1) / 2;
  return 4.0 * c.dim * pairs * measured_kv_heads * c.group * c.batch;
}

plan_or_reason plan_case(const attend_case& c, const kvc_kv& layer, int32_t multiprocessors) {
  kvc_plan_in in{};
  in.struct_size = sizeof in;
  in.q_heads = measured_kv_heads * c.group;
  in.q_type = in.out_type = c.stored.type;
  in.n = c.batch;
  in.max_q = c.rows;
  in.max_kv = c.tokens;
  in.width = multiprocessors;
  in.kv = &layer;
  plan_or_reason out;
  out.plan.struct_size = sizeof out.plan;
  kvc_error e{};
  if (kvc_cuda_plan(&in, &out.plan, &e) != KVC_OK) out.reason = reason_of(e, "plan");
  return out;
}

}  // namespace kvcache::gpu_check
