// SPDX-License-Identifier: Apache-2.0
// What a file is, from its first bytes: the header of a CSV, or the names in the first JSON object as far as
// they can be seen.
#include <set>
#include <string>

#include "trace/formats.hpp"
#include "trace/source.hpp"

namespace kvcache::cli {
namespace {

std::set<std::string, std::less<>> names_in_first_object(std::string_view front) {
  std::set<std::string, std::less<>> names;
  const std::unique_ptr<byte_source> bytes = open_bytes(std::span(front.data(), front.size()), "");
  scanner in(*bytes);
  try {
    in.object("", [&](std::string_view name) {
      names.emplace(name);
      in.skip();
    });
  } catch (const error&) {
    // The object goes on behind what is seen, or is wrong: its reader will say.
  }
  return names;
}

}  // namespace

format_reader recognise(std::string_view front) {
  const std::size_t start = front.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos) return nullptr;
  const std::string_view first_line = front.substr(start, front.find('\n', start) - start);
  if (first_line.front() == '[') return read_kv_events;
  if (first_line.front() != '{') {
    return first_line.find("ContextTokens") != std::string_view::npos ? read_azure : nullptr;
  }
  const auto names = names_in_first_object(front);
  const auto has = [&](std::string_view name) { return names.contains(name); };
  if (has("hash_id_scope") || has("requests")) return read_weka;
  if (has("trigger_time_us")) return read_tair;
  if (has("events") || has("block_hashes") || (has("ts") && has("type"))) return read_kv_events;
  if (!has("hash_ids") && (has("tokens") || has("token_ids"))) return read_tokens;
  if (has("hash_ids") || has("input_length")) return has("chat_id") ? read_bailian : read_mooncake;
  if (has("timestamp")) return read_mooncake;
  return nullptr;
}

}  // namespace kvcache::cli
