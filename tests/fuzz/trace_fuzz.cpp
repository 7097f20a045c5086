// SPDX-License-Identifier: Apache-2.0
// Any bytes as a trace: a trace whose every number is in order, or a refusal that says where.
#include <cstdint>

#include "error.hpp"
#include "expect.hpp"
#include "trace/read.hpp"

namespace {

using kvcache::cli::error;
using kvcache::cli::failure;
using kvcache::cli::trace;

void check_trace(const trace& t) {
  KVCACHE_FUZZ_EXPECT(!t.format.empty());
  KVCACHE_FUZZ_EXPECT(!t.requests.empty());
  KVCACHE_FUZZ_EXPECT(t.block_tokens >= 0);
  KVCACHE_FUZZ_EXPECT(t.units.empty() || t.block_tokens > 0);
  KVCACHE_FUZZ_EXPECT(t.requests.front().time_us == 0);
  std::int64_t last = 0, units = 0, repeated = 0;
  std::int32_t next = 0, sessions = 0;
  for (const kvcache::cli::request& r : t.requests) {
    KVCACHE_FUZZ_EXPECT(r.time_us >= last);
    last = r.time_us;
    KVCACHE_FUZZ_EXPECT(r.input_tokens >= 0 && r.output_tokens >= 0 && r.count >= 0 && r.first >= 0);
    KVCACHE_FUZZ_EXPECT(r.session >= -1 && r.session <= sessions);
    if (r.session == sessions) ++sessions;
    const auto ids = t.units_of(r);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      KVCACHE_FUZZ_EXPECT(ids[i] >= 0 && ids[i] <= next);
      if (ids[i] == next) ++next;
      bool before = false;
      for (std::size_t k = 0; k < i; ++k) before = before || ids[k] == ids[i];
      repeated += before ? 1 : 0;
    }
    units += r.count;
  }
  KVCACHE_FUZZ_EXPECT(next == t.distinct);
  KVCACHE_FUZZ_EXPECT(units == static_cast<std::int64_t>(t.units.size()));
  KVCACHE_FUZZ_EXPECT(repeated == t.repeated_ids);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    check_trace(kvcache::cli::read_trace_bytes({reinterpret_cast<const char*>(data), size}, "FILE"));
  } catch (const error& e) {
    KVCACHE_FUZZ_EXPECT(e.kind == failure::bad_input);
    KVCACHE_FUZZ_EXPECT(!e.code.empty() && !e.field.empty() && e.file == "FILE");
    for (const char c : std::string(e.what())) KVCACHE_FUZZ_EXPECT(c >= ' ' && c < 127);
  }
  return 0;
}
