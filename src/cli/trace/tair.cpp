// SPDX-License-Identifier: Apache-2.0
// Event log of Tair's cache manager, one JSON object per event. A prefix lookup (GetCacheLocation) is a
// request; what is written afterwards has events of its own, which are none.
#include "trace/formats.hpp"

namespace kvcache::cli {
namespace {

enum field : int { type, trigger_time_us, keys, query_type };

struct counts {
  std::int64_t writes = 0, other_queries = 0;
};

void read_event(scanner& in, trace_builder& out, time_order& order, counts& left_out) {
  const std::int64_t line = in.line();
  request_facts facts;
  seen_fields seen;
  bool is_lookup = false, is_prefix = true;
  out.begin();
  in.object("event", [&](std::string_view name) {
    if (name == "type") {
      seen.once(in, type, "type");
      is_lookup = in.text("type") == "GetCacheLocation";
    } else if (name == "trigger_time_us") {
      seen.once(in, trigger_time_us, "trigger_time_us");
      facts.time_us = in.time_us("trigger_time_us", 1);
    } else if (name == "keys") {
      seen.once(in, keys, "keys");
      read_blocks(in, out, "keys");
    } else if (name == "query_type") {
      seen.once(in, query_type, "query_type");
      is_prefix = in.text("query_type") == "prefix_match";
    } else {
      in.skip();
    }
  });
  if (!seen.has(type)) in.fail_at(line, "missing_field", "type", "");
  if (!is_lookup || !is_prefix) {
    out.cancel();
    ++(is_lookup ? left_out.other_queries : left_out.writes);
    return;
  }
  if (!seen.has(trigger_time_us)) in.fail_at(line, "missing_field", "trigger_time_us", "");
  if (!seen.has(keys)) in.fail_at(line, "missing_field", "keys", "");
  order.check(in, line, "trigger_time_us", facts.time_us);
  out.end(facts);
}

}  // namespace

void read_tair(scanner& in, trace_builder& out) {
  out.start_file(in, "tair");
  out.assume_block_tokens(16);
  time_order order;
  counts left_out;
  each_row(in, [&] { read_event(in, out, order, left_out); });
  if (left_out.writes > 0) {
    out.note("Lookups are the requests; " + std::to_string(left_out.writes) +
             " other events were passed over.");
  }
  if (left_out.other_queries > 0) {
    out.note(std::to_string(left_out.other_queries) + " lookups that do not ask for a prefix were left out.");
  }
}

}  // namespace kvcache::cli
