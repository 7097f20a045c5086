// SPDX-License-Identifier: Apache-2.0
#pragma once
// Opens private members to the model tests: they compare the whole state of a cache, and nobody else should
// be able to. Explicit instantiation may name private members; the instantiated class keeps the pointer.
#include <cstddef>
#include <memory>
#include <span>

#include "kvcache/cache.hpp"

namespace kvcache::test {

template <class Traits>
struct inside {
  static inline std::unique_ptr<detail::core<Traits>> basic_cache<Traits>::*core = nullptr;
  static detail::core<Traits>& of(basic_cache<Traits>& c) { return *(c.*core); }
};

template <class Traits, auto Member>
struct expose_core {
  struct at_start {
    at_start() { inside<Traits>::core = Member; }
  };
  static inline at_start run;
};

/// Bytes of the scope table that a vacant entry may leave behind: a key that nobody refers to.
struct scope_bytes {
  using reader = std::span<const std::byte> (*)(const scope_table&);
  static inline reader keys = nullptr;
  static inline reader hashes = nullptr;
};

template <auto Keys, auto Hashes>
struct expose_scopes {
  struct at_start {
    at_start() {
      scope_bytes::keys = [](const scope_table& t) { return std::as_bytes((t.*Keys).view()); };
      scope_bytes::hashes = [](const scope_table& t) { return std::as_bytes((t.*Hashes).view()); };
    }
  };
  static inline at_start run;
};

}  // namespace kvcache::test
