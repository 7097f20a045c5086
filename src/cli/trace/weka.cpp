// SPDX-License-Identifier: Apache-2.0
// One JSON object per session: block_size, hash_id_scope, requests[] with t (s), type, in, out, hash_ids. An
// element of type "subagent" holds requests of its own, whose t counts from the sub-agent's. Sub-agents use
// the ids of their session.
#include "trace/formats.hpp"

namespace kvcache::cli {
namespace {

enum field : int { time, kind, in_tokens, out_tokens, hash_ids, nested };

class session_reader {
 public:
  session_reader(scanner& in, trace_builder& out) : in_(in), out_(out) {}

  void read() {
    seen_fields seen;
    in_.object("session", [&](std::string_view name) {
      if (name == "requests") {
        seen.once(in_, 0, "requests");
        out_.start_session(local_);
        const std::int64_t from = out_.requests();
        read_list();
        out_.shift(in_, from, out_.session_start_us());
      } else if (name == "block_size") {
        seen.once(in_, 1, "block_size");
        const std::int64_t line = in_.line();
        if (in_.peek() == '0') in_.fail("out_of_range", "block_size", in_.excerpt());
        out_.block_tokens_are(in_, line, static_cast<std::int32_t>(in_.count("block_size", 1 << 20)));
      } else if (name == "hash_id_scope") {
        seen.once(in_, 2, "hash_id_scope");
        read_scope(seen.has(0));
      } else {
        in_.skip();
      }
    });
    if (!seen.has(0)) in_.fail("missing_field", "requests", "");
  }

 private:
  void read_scope(bool late) {
    const std::string_view scope = in_.text("hash_id_scope");
    local_ = scope != "global";
    if ((scope != "local" && scope != "global") || (late && !local_)) {
      in_.fail("bad_value", "hash_id_scope", std::string(scope) + (late ? " after the requests" : ""));
    }
  }

  void read_list() {
    time_order order;
    in_.array("requests", [&](std::int64_t) { read_element(order); });
  }

  void read_element(time_order& order) {
    in_.peek();
    const std::int64_t line = in_.line(), from = out_.requests();
    request_facts facts;
    facts.has_blocks = false;
    facts.session = out_.current_session();
    seen_fields seen;
    bool agent = false;
    out_.begin();
    in_.object("requests[]", [&](std::string_view name) { read_member(name, facts, seen, agent); });
    if (!seen.has(time)) in_.fail_at(line, "missing_field", "t", "");
    order.check(in_, line, "t", facts.time_us);
    if (agent && facts.has_blocks) in_.fail_at(line, "bad_value", "hash_ids", "of a subagent itself");
    if (agent || seen.has(nested)) {
      out_.shift(in_, from, facts.time_us);
      return;
    }
    if (!facts.has_blocks && facts.input_tokens < 0) in_.fail_at(line, "missing_field", "hash_ids", "");
    out_.end(facts);
  }

  void read_member(std::string_view name, request_facts& facts, seen_fields& seen, bool& agent) {
    if (name == "t") {
      seen.once(in_, time, "t");
      facts.time_us = in_.time_us("t", 1'000'000);
    } else if (name == "type") {
      seen.once(in_, kind, "type");
      agent = in_.text("type") == "subagent";
    } else if (name == "in") {
      seen.once(in_, in_tokens, "in");
      if (!in_.take_null()) facts.input_tokens = in_.count("in", trace_builder::most_tokens);
    } else if (name == "out") {
      seen.once(in_, out_tokens, "out");
      if (!in_.take_null()) facts.output_tokens = in_.count("out", trace_builder::most_tokens);
    } else if (name == "hash_ids") {
      seen.once(in_, hash_ids, "hash_ids");
      if (in_.take_null()) return;
      if (seen.has(nested)) in_.fail("bad_value", "hash_ids", "beside nested requests");
      facts.has_blocks = true;
      read_blocks(in_, out_, "hash_ids");
    } else if (name == "requests") {
      seen.once(in_, nested, "requests");
      if (facts.has_blocks) in_.fail("bad_value", "requests", "beside hash_ids");
      read_list();
    } else {
      in_.skip();
    }
  }

  scanner& in_;
  trace_builder& out_;
  bool local_ = true;
};

}  // namespace

void read_weka(scanner& in, trace_builder& out) {
  out.start_file(in, "weka");
  out.assume_block_tokens(64);
  while (!in.at_end()) session_reader(in, out).read();
}

}  // namespace kvcache::cli
