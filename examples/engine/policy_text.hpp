// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a cache keeps and how, as one line of text, the same in all programs:
//
//   h2o:heavy=64,recent=64                          a policy: which tokens stay (kvcache/retain/parse.hpp)
//   kv4                                             a format: how full blocks are packed
//   int4:k=channel,v=token,group=32,exempt=sinks                        (kvcache/quant/parse.hpp)
//   snapkv:capacity=256,window=32+kv8               both

#include <string>
#include <string_view>

#include "error.hpp"
#include "kvcache/quant/format.hpp"
#include "kvcache/retain/any_retention.hpp"

namespace engine {

/// Reads a policy (kvcache/retain/parse.hpp). Fails: bad_input "bad_policy" with the key as field; its value
/// says what was found and what is allowed.
result<kvcache::retention> parse_policy(std::string_view text);

/// The policy as text; "custom" for one that is not the library's.
std::string policy_text(const kvcache::retention& policy);

/// Which tokens stay, and how they are stored.
struct cache_policy {
  kvcache::retention keep;      ///< default: all
  kvcache::kv_format format{};  ///< default: as they were written

  /// Whether anything is rounded when a block is full.
  bool packs() const { return kvcache::lossy(format); }
};

/// Reads POLICY, FORMAT or POLICY+FORMAT. Fails: as parse_policy; "bad_format" with the key of a format.
result<cache_policy> parse_cache_policy(std::string_view text);

/// As parse_cache_policy reads it, with all settings.
std::string policy_text(const cache_policy& policy);

}  // namespace engine
