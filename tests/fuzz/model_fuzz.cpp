// SPDX-License-Identifier: Apache-2.0
// Any bytes as a model: a GGUF file, a config.json, or the shape of a command line.
#include <cstdint>
#include <string>

#include "error.hpp"
#include "expect.hpp"
#include "plan/source.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvcache::cli;
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    model m;
    if (text.starts_with("GGUF")) {
      m = model_of_gguf({reinterpret_cast<const std::byte*>(data), size}, "FILE");
    } else if (text.starts_with("{")) {
      m = model_of_config(text, "FILE");
    } else {
      m = model_of_shape("--shape", text);
    }
    KVCACHE_FUZZ_EXPECT(!m.layers.empty());
  } catch (const error& e) {
    KVCACHE_FUZZ_EXPECT(e.kind == failure::bad_input || e.kind == failure::usage);
    KVCACHE_FUZZ_EXPECT(!e.code.empty() && !e.field.empty());
  }
  return 0;
}
