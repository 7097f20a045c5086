// SPDX-License-Identifier: Apache-2.0
// One JSON object per request with its token ids. Only what the tokens say counts: a block is known by all of
// its tokens, and a last block that is not full is none, since no cache could share it.
#include <limits>
#include <vector>

#include "trace/formats.hpp"

namespace kvcache::cli {
namespace {

constexpr std::int32_t usual_block = 16;

enum field : int { tokens, timestamp, session_id, output_length };

class tokens_reader {
 public:
  tokens_reader(scanner& in, trace_builder& out)
      : in_(in),
        out_(out),
        size_(out.options().block_tokens != 0 ? out.options().block_tokens : usual_block) {}

  void read() {
    out_.start_file(in_, "tokens");
    out_.block_tokens_are(in_, 1, size_);
    each_row(in_, [&] { read_row(); });
    if (timed_ == 0)
      out_.note("The file gives no times: all requests stand at 0, in the order of their lines.");
  }

 private:
  void read_row() {
    const std::int64_t line = in_.line();
    request_facts facts;
    seen_fields seen;
    out_.begin();
    in_.object("request", [&](std::string_view name) {
      if (name == "tokens" || name == "token_ids") {
        seen.once(in_, tokens, "tokens");
        facts.input_tokens = read_tokens();
      } else if (name == "timestamp") {
        seen.once(in_, timestamp, "timestamp");
        facts.time_us = in_.time_us("timestamp", 1000);
      } else if (name == "session_id" || name == "session") {
        seen.once(in_, session_id, "session_id");
        if (!in_.take_null()) facts.session = out_.session_of(in_.id("session_id"));
      } else if (name == "output_length") {
        seen.once(in_, output_length, "output_length");
        if (!in_.take_null()) facts.output_tokens = in_.count("output_length", trace_builder::most_tokens);
      } else {
        in_.skip();
      }
    });
    if (!seen.has(tokens)) in_.fail_at(line, "missing_field", "tokens", "");
    if (timed_ < 0) timed_ = seen.has(timestamp) ? 1 : 0;
    if (seen.has(timestamp) != (timed_ == 1)) {
      in_.fail_at(line, timed_ == 1 ? "missing_field" : "bad_value", "timestamp",
                  timed_ == 1 ? "" : "there, but not in the first request");
    }
    order_.check(in_, line, "timestamp", facts.time_us);
    out_.end(facts);
  }

  /// Adds the full blocks; the number of all tokens.
  std::int64_t read_tokens() {
    std::int64_t count = 0;
    block_.clear();
    const auto add = [&](std::uint32_t token) {
      ++count;
      block_.push_back(token);
      if (static_cast<std::int32_t>(block_.size()) == size_) flush();
    };
    in_.ids("tokens", add, [&](const scanned_id& id) {
      const bool good = id.is == scanned_id::kind::integer && id.integer >= 0 &&
                        id.integer <= std::numeric_limits<std::uint32_t>::max();
      if (!good) refuse(id, count);
      add(static_cast<std::uint32_t>(id.integer));
    });
    return count;
  }

  void flush() {
    const std::size_t bytes = block_.size() * sizeof block_.front();
    out_.add_content({reinterpret_cast<const char*>(block_.data()), bytes});
    block_.clear();
    if (out_.too_long()) in_.fail("too_long", "tokens", std::to_string(out_.blocks_so_far()) + " blocks");
  }

  [[noreturn]] void refuse(const scanned_id& id, std::int64_t index) {
    const std::string field = "tokens[" + std::to_string(index) + "]";
    if (id.is == scanned_id::kind::text) in_.fail("bad_type", field, std::string(id.text));
    if (id.is == scanned_id::kind::integer) in_.fail("out_of_range", field, std::to_string(id.integer));
    if (id.is == scanned_id::kind::large) in_.fail("out_of_range", field, std::to_string(id.large));
    in_.fail("out_of_range", field, std::string(id.text));
  }

  scanner& in_;
  trace_builder& out_;
  std::int32_t size_;
  std::vector<std::uint32_t> block_;
  time_order order_;
  int timed_ = -1;  // whether requests have times; -1 before the first
};

}  // namespace

void read_tokens(scanner& in, trace_builder& out) {
  tokens_reader(in, out).read();
}

}  // namespace kvcache::cli
