// SPDX-License-Identifier: Apache-2.0
// Any bytes as a model: a GGUF file, a config.json, or the shape of a command line; and a plan for it.
#include <cstdint>
#include <string>

#include "error.hpp"
#include "expect.hpp"
#include "plan/plan.hpp"
#include "plan/source.hpp"

namespace {

// Whatever a file says, its plan is one without overflow, or an error.
void check_plan(const kvcache::cli::model& m) {
  using namespace kvcache::cli;
  for (const char* kv : {"f16", "kv4"}) {
    plan_request r{
        .subject = m, .kv = parse_kv("--kv", kv), .context = 100000, .batch = 50, .memory = 1LL << 40};
    try {
      const plan p = make_plan(std::move(r));
      KVCACHE_FUZZ_EXPECT(p.held.kv_bytes > 0 && p.held.max_batch >= 0 && p.kv_read > 0);
    } catch (const error& e) {
      KVCACHE_FUZZ_EXPECT(!e.code.empty() && !e.field.empty());
    }
  }
}

}  // namespace

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
    check_plan(m);
  } catch (const error& e) {
    KVCACHE_FUZZ_EXPECT(e.kind == failure::bad_input || e.kind == failure::usage);
    KVCACHE_FUZZ_EXPECT(!e.code.empty() && !e.field.empty());
  }
  return 0;
}
