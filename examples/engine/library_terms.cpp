// SPDX-License-Identifier: Apache-2.0
#include "library_terms.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "kvcache/core/numeric.hpp"

namespace engine {

error to_error(const kvcache::status& s) {
  return cannot_run(kvcache::to_text(s.code), s.field, std::to_string(s.value));
}

void require(const kvcache::status& s) {
  if (s) return;
  std::fprintf(stderr, "%s\n", describe(to_error(s)).c_str());
  std::abort();
}

kvcache::element element_of(kv_type type) {
  if (type == kv_type::f16) return kvcache::element::f16;
  if (type == kv_type::bf16) return kvcache::element::bf16;
  return kvcache::element::f32;
}

kvcache::scope scope_of(const cache_scope& s) {
  if (s.shared) return kvcache::scope::shared();
  const kvcache::scope own = kvcache::scope::tenant(s.tenant);
  return s.public_tokens == 0 ? own : kvcache::scope::shared().from(s.public_tokens, own);
}

float widen(const std::byte* at, kv_type type) {
  const auto read = [at](auto stored) {
    std::memcpy(&stored, at, sizeof stored);
    return kvcache::to_float(stored);
  };
  if (type == kv_type::f16) return read(kvcache::f16{});
  if (type == kv_type::bf16) return read(kvcache::bf16{});
  return read(float{});
}

std::byte* cell(const kvc_plane& plane, kvcache::block_id block, int head, int offset) {
  return static_cast<std::byte*>(plane.data) + plane.block_stride * kvcache::raw(block) +
         plane.head_stride * head + plane.token_stride * offset;
}

}  // namespace engine
