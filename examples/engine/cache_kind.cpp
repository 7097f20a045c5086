// SPDX-License-Identifier: Apache-2.0
#include "cache_kind.hpp"

#include "library_cache.hpp"
#include "packed_blocks.hpp"
#include "reference_cache.hpp"

namespace engine {

std::string_view name_of(kv_type type) {
  if (type == kv_type::f16) return "f16";
  if (type == kv_type::bf16) return "bf16";
  return "f32";
}

result<opened_sequence> cache_kind::resume(std::span<const token_id> text, int, const cache_scope& scope) {
  return open(text, scope);
}

result<int> cache_kind::draft(int, int) {
  return cannot_run("unsupported", "draft", std::string(name()));
}

status cache_kind::accept(int, int) {
  return cannot_run("unsupported", "accept", std::string(name()));
}

result<int> cache_kind::assign(int, int) {
  return cannot_run("unsupported", "assign", std::string(name()));
}

std::span<const std::string_view> cache_kind_names() {
  static constexpr std::string_view names[] = {"reference", "contiguous", "paged"};
  return names;
}

result<std::unique_ptr<cache_kind>> make_cache(std::string_view kind, const cache_config& config) {
  const kv_shape& shape = config.shape;
  if (shape.head_dim < 2 || shape.head_dim % 2 != 0)
    return cannot_run("unsupported", "head_dim", std::to_string(shape.head_dim));
  if (config.max_sequences < 1)
    return cannot_run("bad_value", "max_sequences", std::to_string(config.max_sequences));
  if (config.max_tokens < 1) return cannot_run("bad_value", "max_tokens", std::to_string(config.max_tokens));
  if (is_packed(config) && kind != "paged")
    return cannot_run("unsupported", "formats", std::string(kind) + "; packed blocks need paged");
  if (kind == "reference") return std::unique_ptr<cache_kind>(std::make_unique<reference_cache>(config));
  if (kind == "contiguous" || kind == "paged") return make_library_cache(kind == "paged", config);
  return cannot_run("unsupported", "cache", std::string(kind));
}

}  // namespace engine
