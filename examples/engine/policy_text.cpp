// SPDX-License-Identifier: Apache-2.0
#include "policy_text.hpp"

#include <utility>

#include "kvcache/retain/parse.hpp"

namespace engine {

result<kvcache::retention> parse_policy(std::string_view text) {
  const kvcache::parsed_retention read = kvcache::parse_retention(text);
  if (read.ok()) return read.value;
  std::string found(read.text);
  found += "; allowed: ";
  found += read.allowed;
  return bad_input("bad_policy", std::string(read.key), std::move(found));
}

std::string policy_text(const kvcache::retention& policy) {
  char text[256];
  return kvcache::to_text(policy, text) > 0 ? text : "custom";
}

}  // namespace engine
