// SPDX-License-Identifier: Apache-2.0
// One JSON object per request: timestamp (ms), input_length, output_length, hash_ids, maybe session_id.
#include "trace/formats.hpp"

namespace kvcache::cli {
namespace {

enum field : int { timestamp, input_length, output_length, hash_ids, session_id };

/// Reads one request. Members that may be missing may also be null.
void read_row(scanner& in, trace_builder& out, time_order& order) {
  const std::int64_t line = in.line();
  request_facts facts;
  facts.has_blocks = false;
  seen_fields seen;
  out.begin();
  in.object("request", [&](std::string_view name) {
    if (name == "timestamp") {
      seen.once(in, timestamp, "timestamp");
      facts.time_us = in.time_us("timestamp", 1000);
    } else if (name == "input_length") {
      seen.once(in, input_length, "input_length");
      if (!in.take_null()) facts.input_tokens = in.count("input_length", trace_builder::most_tokens);
    } else if (name == "output_length") {
      seen.once(in, output_length, "output_length");
      if (!in.take_null()) facts.output_tokens = in.count("output_length", trace_builder::most_tokens);
    } else if (name == "hash_ids") {
      seen.once(in, hash_ids, "hash_ids");
      if (in.take_null()) return;
      facts.has_blocks = true;
      read_blocks(in, out, "hash_ids");
    } else if (name == "session_id") {
      seen.once(in, session_id, "session_id");
      if (!in.take_null()) facts.session = out.session_of(in.id("session_id"));
    } else {
      in.skip();
    }
  });
  if (!seen.has(timestamp)) in.fail_at(line, "missing_field", "timestamp", "");
  if (!facts.has_blocks && facts.input_tokens < 0) in.fail_at(line, "missing_field", "hash_ids", "");
  order.check(in, line, "timestamp", facts.time_us);
  out.end(facts);
}

}  // namespace

void read_mooncake(scanner& in, trace_builder& out) {
  out.start_file(in, "mooncake");
  time_order order;
  each_row(in, [&] { read_row(in, out, order); });
}

}  // namespace kvcache::cli
