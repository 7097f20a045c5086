// SPDX-License-Identifier: Apache-2.0
// From layers to pools and the library's groups: formats, block sizes, bytes.
#include <algorithm>
#include <iterator>

#include "error.hpp"
#include "kvcache/cache/packed.hpp"
#include "kvcache/quant/parse.hpp"
#include "kvcache/quant/sizes.hpp"
#include "plan/plan.hpp"

namespace kvcache::cli {
namespace {

struct element_name {
  const char* name;
  element type;
};
constexpr element_name element_names[] = {
    {"f32", element::f32}, {"f16", element::f16}, {"bf16", element::bf16}};

pool pool_of(const layer& l, element type) {
  return {.kind = l.kind,
          .window = l.window,
          .shape = {.layers = 0,
                    .kv_heads = l.kv_heads,
                    .head_dim_k = l.head_dim_k,
                    .head_dim_v = l.head_dim_v,
                    .type = type,
                    .v_aliases_k = l.kind == layer_kind::latent}};
}

bool same_kind(const pool& a, const pool& b) {
  group_shape shape = a.shape;
  shape.layers = b.shape.layers;
  return a.kind == b.kind && a.window == b.window && shape == b.shape;
}

std::string text_of(const pool& p) {
  return std::to_string(p.shape.kv_heads) + " kv heads of " + std::to_string(p.shape.head_dim_k);
}

// What the library says of a format and a shape, in words of the command line.
[[noreturn]] void refuse(const status& s, const pool& p, const kv_choice& kv, const std::string& file) {
  const std::string field = s.field;
  if (p.shape.v_aliases_k && lossy(p.format)) {
    throw error(failure::cannot_run, "unsupported", "--kv", kv.text)
        .wanting("f32, f16 or bf16: the library does not pack latents (MLA)");
  }
  if (field == "block_size") {
    throw error(failure::usage, "bad_value", "--block", std::to_string(s.value))
        .wanting(lossy(p.format) ? "32, 64 or 128 for packed formats" : "a power of two up to 65536");
  }
  if (s.code == errc::unsupported) {
    throw error(failure::cannot_run, "unsupported", "--kv " + field, std::to_string(s.value))
        .wanting("a format for " + text_of(p));
  }
  const failure kind = file.empty() ? failure::usage : failure::bad_input;
  throw error(kind, "bad_value", field, std::to_string(s.value), file)
      .wanting("blocks of less than 2^31 values a layer");
}

// The presets rotate heads, which needs a power of two; the bytes are the same without.
kv_format fitting(const kv_choice& kv, const pool& p, bool& changed) {
  kv_format f = kv.format;
  if (!kv.preset || p.shape.v_aliases_k) return f;
  const auto fit = [&](side_format& side, std::int32_t dim) {
    if (!side.hadamard || is_power_of_two(dim)) return;
    side.hadamard = false;
    changed = true;
  };
  fit(f.k, p.shape.head_dim_k);
  fit(f.v, p.shape.head_dim_v);
  return f;
}

void complete(pool& p, const kv_choice& kv, std::int32_t block, const std::string& file, bool& changed) {
  p.format = fitting(kv, p, changed);
  p.block_size = block != 0 ? block : lossy(p.format) ? 64 : 16;
  const result<block_format> made = block_format_of({&p.format, 1}, p.shape, p.block_size);
  if (!made) refuse(made.error(), p, kv, file);
  p.block = *made;
}

// Of a sequence of `tokens`, what a pool holds at most.
std::int64_t held_tokens(const pool& p, std::int64_t tokens) {
  return p.window == 0 ? tokens : std::min<std::int64_t>(tokens, p.window);
}

std::int64_t pool_read_bytes(const pool& p, std::int64_t tokens) {
  const std::int64_t held = held_tokens(p, tokens);
  const std::int64_t exact = bytes_per_token(p.shape).count;
  if (!p.block.lossy) return times(held, exact, "--context");
  const std::int64_t sealed = sealed_blocks(p.format, p.block_size, tokens) * p.block_size;
  const std::int64_t packed = std::max<std::int64_t>(0, sealed - (tokens - held));
  const std::int64_t first = std::min<std::int64_t>(p.format.exempt, packed);
  return ceil_div(times(packed, p.block.block.count, "--context"), std::int64_t{p.block_size}) +
         times(held - packed + first, exact, "--context");
}

}  // namespace

std::int64_t times(std::int64_t a, std::int64_t b, const char* field) {
  std::int64_t out = 0;
  if (__builtin_mul_overflow(a, b, &out) || out >> 62 != 0) {
    throw error(failure::cannot_run, "too_large", field, std::to_string(a) + " x " + std::to_string(b));
  }
  return out;
}

kv_choice parse_kv(std::string_view option, std::string_view text) {
  kv_choice out;
  out.text = text;
  for (const element_name& e : element_names) {
    if (text != e.name) continue;
    out.type = e.type;
    return out;
  }
  const parsed_format read = parse_format(text);
  if (!read.ok()) {
    std::string value(text);
    if (read.key != "format") value = std::string(read.key) + "=" + std::string(read.text);
    throw error(failure::usage, "bad_value", std::string(option), value.empty() ? "empty" : std::move(value))
        .wanting(read.key == "format" ? std::string("f32, bf16, ") + read.allowed : read.allowed);
  }
  out.format = read.value;
  out.preset = find_preset(text) != nullptr;
  return out;
}

std::vector<pool> pools_of(const model& m, const kv_choice& kv, std::int32_t block,
                           std::vector<std::string>& notes) {
  std::vector<pool> pools;
  for (const layer& l : m.layers) {
    if (l.kind == layer_kind::none) continue;
    const pool made = pool_of(l, kv.type);
    auto at = std::find_if(pools.begin(), pools.end(), [&](const pool& p) { return same_kind(p, made); });
    if (at == pools.end()) at = pools.insert(pools.end(), made);
    ++at->shape.layers;
  }
  if (pools.empty())
    throw error(failure::bad_input, "nothing_cached", "layers", std::to_string(m.layers.size()), m.file);
  bool changed = false;
  for (pool& p : pools) complete(p, kv, block, m.file, changed);
  if (changed) {
    notes.push_back(kv.text + " is planned without its rotation of heads (hadamard=none), as a head of " +
                    std::to_string(pools[0].shape.head_dim_k) +
                    " is no power of two; the bytes are the same");
  }
  if (block == 0 && pools[0].block.lossy) {
    notes.emplace_back("packed blocks need 32 tokens or more: 64 are planned (--block says otherwise)");
  }
  return pools;
}

std::vector<group_config> groups_of(const std::vector<pool>& pools) {
  std::vector<pool> merged;
  for (pool p : pools) {
    p.window = 0;
    if (p.kind == layer_kind::window) p.kind = layer_kind::full;
    const auto at =
        std::find_if(merged.begin(), merged.end(), [&](const pool& q) { return same_kind(p, q); });
    if (at == merged.end()) {
      merged.push_back(p);
    } else {
      at->shape.layers += p.shape.layers;
    }
  }
  std::vector<group_config> groups;
  for (const pool& p : merged) {
    const auto set = packed_groups(p.shape, p.block_size, {&p.format, 1});
    if (!set)
      throw error(failure::cannot_run, "unsupported", set.error().field, std::to_string(set.error().value));
    groups.insert(groups.end(), set->span().begin(), set->span().end());
  }
  return groups;
}

std::int64_t read_bytes(const std::vector<pool>& pools, std::int32_t tokens) {
  std::int64_t sum = 0;
  for (const pool& p : pools) sum += pool_read_bytes(p, tokens);
  return times(sum, 1, "--context");
}

std::int64_t read_values(const std::vector<pool>& pools, std::int32_t tokens) {
  std::int64_t sum = 0;
  for (const pool& p : pools) {
    sum += times(values_per_token_layer(p.shape) * p.shape.layers, held_tokens(p, tokens), "--context");
  }
  return sum;
}

}  // namespace kvcache::cli
