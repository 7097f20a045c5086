// SPDX-License-Identifier: Apache-2.0
// Any text as the name of a format or of a policy: what is read is written as text that reads the same, what
// is not read is answered with what is allowed.
#include <cstdint>
#include <string>
#include <string_view>

#include "error.hpp"
#include "expect.hpp"
#include "kvcache/evict/parse.hpp"
#include "kvcache/quant/parse.hpp"
#include "kvcache/retain/parse.hpp"
#include "units.hpp"

namespace {

template <class Parse>
void check(std::string_view text, Parse parse) {
  const auto first = parse(text);
  if (!first.ok()) {
    KVCACHE_FUZZ_EXPECT(first.allowed[0] != 0 && first.allowed[sizeof first.allowed - 1] == 0);
    return;
  }
  char written[512];
  const std::int32_t length = to_text(first.value, written);
  KVCACHE_FUZZ_EXPECT(length > 0 && length < 512);
  const std::string once(written, static_cast<std::size_t>(length));
  const auto second = parse(std::string_view(once));
  KVCACHE_FUZZ_EXPECT(second.ok());
  const std::int32_t again = to_text(second.value, written);
  KVCACHE_FUZZ_EXPECT(once == std::string_view(written, static_cast<std::size_t>(again)));
}

template <class Parse>
void check_option(std::string_view text, Parse parse) {
  try {
    parse("--option", text);
  } catch (const kvcache::cli::error& e) {
    KVCACHE_FUZZ_EXPECT(e.kind == kvcache::cli::failure::usage && !e.code.empty());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  check(text, [](std::string_view t) { return kvcache::parse_format(t); });
  check(text, [](std::string_view t) { return kvcache::parse_retention(t); });
  check(text, [](std::string_view t) { return kvcache::parse_eviction(t); });
  check_option(text, kvcache::cli::parse_bytes);
  check_option(text, kvcache::cli::parse_bandwidth);
  check_option(text, kvcache::cli::parse_tokens);
  check_option(text, kvcache::cli::parse_amount);
  check_option(text, kvcache::cli::parse_capacity);
  check_option(text, kvcache::cli::split_list);
  return 0;
}
