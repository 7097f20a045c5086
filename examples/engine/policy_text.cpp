// SPDX-License-Identifier: Apache-2.0
#include "policy_text.hpp"

#include <utility>

#include "kvcache/quant/parse.hpp"
#include "kvcache/retain/parse.hpp"

namespace engine {
namespace {

template <class Parsed>
error refusal(const char* code, const Parsed& read, std::string_view also = {}) {
  std::string found(read.text);
  found += "; allowed: ";
  found += read.allowed;
  found += also;
  return bad_input(code, std::string(read.key), std::move(found));
}

result<kvcache::kv_format> parse_format(std::string_view text) {
  const kvcache::parsed_format read = kvcache::parse_format(text);
  if (read.ok()) return read.value;
  return refusal("bad_format", read);
}

}  // namespace

result<kvcache::retention> parse_policy(std::string_view text) {
  const kvcache::parsed_retention read = kvcache::parse_retention(text);
  if (read.ok()) return read.value;
  return refusal("bad_policy", read);
}

std::string policy_text(const kvcache::retention& policy) {
  char text[256];
  return kvcache::to_text(policy, text) > 0 ? text : "custom";
}

result<cache_policy> parse_cache_policy(std::string_view text) {
  cache_policy out;
  const std::size_t plus = text.find('+');
  const kvcache::parsed_retention policy = kvcache::parse_retention(text.substr(0, plus));
  if (policy.ok()) out.keep = policy.value;
  if (plus == std::string_view::npos) {
    if (policy.ok()) return out;
    const kvcache::parsed_format format = kvcache::parse_format(text);
    out.format = format.value;
    if (format.ok()) return out;
    if (policy.key != "policy") return refusal("bad_policy", policy);
    if (format.key != "format") return refusal("bad_format", format);
    return refusal("bad_policy", policy, std::string("; or a format: ") + format.allowed);
  }
  if (!policy.ok()) return refusal("bad_policy", policy);
  const auto format = parse_format(text.substr(plus + 1));
  if (!format) return format.error();
  out.format = *format;
  return out;
}

std::string policy_text(const cache_policy& policy) {
  char text[256];
  (void)kvcache::to_text(policy.format, text);
  if (policy.format == kvcache::kv_format{}) return policy_text(policy.keep);
  if (policy.keep.policy.get<kvcache::keep_all>() != nullptr) return text;
  return policy_text(policy.keep) + "+" + text;
}

}  // namespace engine
