// SPDX-License-Identifier: Apache-2.0
// One JSON object per request: timestamp (ms), input_length, output_length, hash_ids, maybe session_id. The
// traces of Qwen-Bailian are the same in seconds; a request there names the one before it in its chat.
#include <vector>

#include "trace/formats.hpp"

namespace kvcache::cli {
namespace {

enum field : int { timestamp, input_length, output_length, hash_ids, session_id, chat_id, parent_chat_id };

class requests_reader {
 public:
  requests_reader(scanner& in, trace_builder& out, std::int64_t unit_us)
      : in_(in), out_(out), unit_us_(unit_us) {}

  void read() {
    each_row(in_, [&] { read_row(); });
  }

 private:
  /// Members that may be missing may also be null.
  void read_row() {
    const std::int64_t line = in_.line();
    facts_ = {};
    facts_.has_blocks = false;
    seen_ = {};
    chat_ = parent_ = -1;
    out_.begin();
    in_.object("request", [&](std::string_view name) {
      if (name == "timestamp") {
        seen_.once(in_, timestamp, "timestamp");
        facts_.time_us = in_.time_us("timestamp", unit_us_);
      } else if (name == "hash_ids") {
        seen_.once(in_, hash_ids, "hash_ids");
        if (in_.take_null()) return;
        facts_.has_blocks = true;
        read_blocks(in_, out_, "hash_ids");
      } else {
        read_member(name);
      }
    });
    if (!seen_.has(timestamp)) in_.fail_at(line, "missing_field", "timestamp", "");
    if (!facts_.has_blocks && facts_.input_tokens < 0) in_.fail_at(line, "missing_field", "hash_ids", "");
    order_.check(in_, line, "timestamp", facts_.time_us);
    if (chat_ >= 0) facts_.session = session_of_chat();
    out_.end(facts_);
  }

  void read_member(std::string_view name) {
    if (name == "input_length") {
      seen_.once(in_, input_length, "input_length");
      if (!in_.take_null()) facts_.input_tokens = in_.count("input_length", trace_builder::most_tokens);
    } else if (name == "output_length") {
      seen_.once(in_, output_length, "output_length");
      if (!in_.take_null()) facts_.output_tokens = in_.count("output_length", trace_builder::most_tokens);
    } else if (name == "session_id") {
      seen_.once(in_, session_id, "session_id");
      if (!in_.take_null()) facts_.session = out_.session_of(in_.id("session_id"));
    } else if (name == "chat_id") {
      seen_.once(in_, chat_id, "chat_id");
      if (!in_.take_null()) chat_ = out_.session_of(in_.id("chat_id"));
    } else if (name == "parent_chat_id") {
      seen_.once(in_, parent_chat_id, "parent_chat_id");
      if (in_.take_null()) return;
      const scanned_id id = in_.id("parent_chat_id");
      if (id.is != scanned_id::kind::integer || id.integer >= 0) parent_ = out_.session_of(id);
    } else {
      in_.skip();
    }
  }

  /// The first request of the chat stands for it.
  std::int32_t session_of_chat() {
    const auto highest = static_cast<std::size_t>(chat_ > parent_ ? chat_ : parent_);
    while (root_.size() <= highest) root_.push_back(static_cast<std::int32_t>(root_.size()));
    if (parent_ >= 0) root_[static_cast<std::size_t>(chat_)] = root_[static_cast<std::size_t>(parent_)];
    return root_[static_cast<std::size_t>(chat_)];
  }

  scanner& in_;
  trace_builder& out_;
  std::int64_t unit_us_;
  request_facts facts_;
  seen_fields seen_;
  time_order order_;
  std::int32_t chat_ = -1, parent_ = -1;
  std::vector<std::int32_t> root_;
};

}  // namespace

void read_mooncake(scanner& in, trace_builder& out) {
  out.start_file(in, "mooncake");
  requests_reader(in, out, 1000).read();
}

void read_bailian(scanner& in, trace_builder& out) {
  out.start_file(in, "bailian");
  out.assume_block_tokens(16);
  requests_reader(in, out, 1'000'000).read();
}

}  // namespace kvcache::cli
