// SPDX-License-Identifier: Apache-2.0
// KV events as vLLM publishes them, as JSON lines: a batch as an array, a batch as an object, or one event
// per line. Events themselves are arrays by position or objects; both may end early or go on with fields that
// are not ours.
//
//   [ts, [event, ...], rank?]      {"ts": s, "events": [event, ...], "data_parallel_rank": r, "seq": n}
//   ["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium, lora_name, extra_keys, group_idx]
//   {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": h, "block_size": n, ...}
#include "trace/event_chains.hpp"
#include "trace/formats.hpp"

namespace kvcache::cli {
namespace {

constexpr std::int64_t most = std::int64_t{1} << 40;
constexpr std::int64_t largest_block = std::int64_t{1} << 20;

class events_reader {
 public:
  events_reader(scanner& in, trace_builder& out) : in_(in), out_(out), chains_(in, out) {}

  void read() {
    each_row(in_, [&] {
      line_ = in_.line();
      held_.clear();
      if (in_.peek() == '[') {
        read_array_batch();
      } else {
        read_object_row();
      }
    });
    chains_.finish();
  }

 private:
  void read_array_batch() {
    std::int64_t time_us = -1, rank = 0, fields = 0;
    in_.array("batch", [&](std::int64_t index) {
      ++fields;
      if (index == 0) time_us = in_.time_us("ts", 1'000'000);
      if (index == 1) read_events();
      if (index == 2 && !in_.take_null()) rank = in_.count("data_parallel_rank", most);
      if (index > 2) in_.skip();
    });
    if (fields < 2) in_.fail_at(line_, "missing_field", "events", "");
    pass_on(time_us, rank);
  }

  /// A batch, or an event alone. Members may stand in any order: events wait until the time is known.
  void read_object_row() {
    std::int64_t time_us = -1, rank = 0;
    bool batch = false;
    kv_event alone;
    bool typed = false;
    in_.object("batch", [&](std::string_view name) {
      if (name == "ts") {
        time_us = in_.time_us("ts", 1'000'000);
      } else if (name == "events") {
        batch = true;
        read_events();
      } else if (name == "data_parallel_rank") {
        if (!in_.take_null()) rank = in_.count("data_parallel_rank", most);
      } else if (name == "seq") {
        chains_.sequence(in_.count("seq", std::int64_t{1} << 62));
      } else {
        read_member(name, alone, typed);
      }
    });
    if (time_us < 0) in_.fail_at(line_, "missing_field", "ts", "");
    if (!batch) {
      if (!typed) in_.fail_at(line_, "missing_field", "type", "");
      held_.push_back(std::move(alone));
    }
    pass_on(time_us, rank);
  }

  void pass_on(std::int64_t time_us, std::int64_t rank) {
    chains_.batch(line_, time_us, rank);
    for (const kv_event& e : held_) chains_.add(line_, e);
  }

  void read_events() {
    in_.array("events", [&](std::int64_t) {
      kv_event e;
      if (in_.peek() == '[') {
        read_array_event(e);
      } else {
        bool typed = false;
        in_.object("event", [&](std::string_view name) { read_member(name, e, typed); });
        if (!typed) in_.fail_at(line_, "missing_field", "type", "");
      }
      held_.push_back(std::move(e));
    });
  }

  void read_array_event(kv_event& e) {
    std::int64_t fields = 0;
    in_.array("event", [&](std::int64_t index) {
      ++fields;
      if (index == 0) return read_type(e);
      if (e.is != kv_event::kind::stored) return in_.skip();
      switch (index) {
        case 1:
          return read_hashes(e);
        case 2:
          return read_parent(e);
        case 3:
          return count_tokens(e);
        case 4:
          return read_size(e);
        case 6:
          return read_medium(e);
        case 9:
          return read_group(e);
        default:
          return in_.skip();
      }
    });
    if (fields == 0) in_.fail_at(line_, "missing_field", "type", "");
    if (e.is == kv_event::kind::stored && fields < 2) in_.fail_at(line_, "missing_field", "block_hashes", "");
  }

  void read_member(std::string_view name, kv_event& e, bool& typed) {
    if (name == "type") {
      typed = true;
      read_type(e);
    } else if (name == "block_hashes") {
      read_hashes(e);
    } else if (name == "parent_block_hash" || name == "parent_hash") {
      read_parent(e);
    } else if (name == "token_ids") {
      count_tokens(e);
    } else if (name == "block_size") {
      read_size(e);
    } else if (name == "medium") {
      read_medium(e);
    } else if (name == "group_idx") {
      read_group(e);
    } else {
      in_.skip();
    }
  }

  void read_type(kv_event& e) {
    e.is = in_.text("type") == "BlockStored" ? kv_event::kind::stored : kv_event::kind::other;
  }
  void read_hashes(kv_event& e) {
    if (in_.take_null()) return;
    scanned_id small;
    in_.ids(
        "block_hashes",
        [&](std::uint32_t id) {
          small.integer = id;
          e.blocks.push_back(out_.number_of(small));
        },
        [&](const scanned_id& id) { e.blocks.push_back(out_.number_of(id)); });
  }
  void read_parent(kv_event& e) {
    if (!in_.take_null()) e.parent = out_.number_of(in_.id("parent_block_hash"));
  }
  void count_tokens(kv_event& e) {
    if (in_.take_null()) return;
    e.tokens = 0;
    in_.ids(
        "token_ids", [&](std::uint32_t) { ++e.tokens; }, [&](const scanned_id&) { ++e.tokens; });
  }
  void read_size(kv_event& e) {
    if (!in_.take_null()) e.block_tokens = in_.count("block_size", largest_block);
  }
  void read_medium(kv_event& e) {
    if (!in_.take_null()) e.on_device = in_.text("medium") == "GPU";
  }
  void read_group(kv_event& e) {
    if (!in_.take_null()) e.group = in_.count("group_idx", most);
  }

  scanner& in_;
  trace_builder& out_;
  event_chains chains_;
  std::vector<kv_event> held_;  // of the row being read
  std::int64_t line_ = 0;
};

}  // namespace

void read_kv_events(scanner& in, trace_builder& out) {
  out.start_file(in, "kv_events");
  events_reader(in, out).read();
}

}  // namespace kvcache::cli
