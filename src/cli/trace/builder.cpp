// SPDX-License-Identifier: Apache-2.0
#include "trace/builder.hpp"

#include <algorithm>

namespace kvcache::cli {
namespace {

std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

constexpr std::int64_t latest_us = std::int64_t{1} << 60;

std::string number(std::int64_t n) {
  return std::to_string(n);
}

}  // namespace

void trace_builder::forget_ids() {
  ids_.new_scope();
  sessions_.new_scope();
}

void trace_builder::start_file(const scanner& from, const char* format) {
  if (!names_.empty() && out_.format != format) {
    throw error(failure::bad_input, "mixed_formats", "format", std::string(format) + " after " + out_.format,
                from.file());
  }
  out_.format = format;
  if (options_.ids == id_scope::per_file && !names_.empty()) forget_ids();
  evidence_.emplace_back();
  names_.push_back(from.file());
}

void trace_builder::start_session(bool own_ids) {
  if (own_ids && options_.ids != id_scope::shared && sessions_begun_ > 0) forget_ids();
  ++sessions_begun_;
}

void trace_builder::shift(const scanner& in, std::int64_t from, std::int64_t by_us) {
  for (auto r = static_cast<std::size_t>(from); r < out_.requests.size(); ++r) {
    std::int64_t& time = out_.requests[r].time_us;
    if (by_us > latest_us - time)
      in.fail("out_of_range", "t", number(time) + " us, later by " + number(by_us) + " us");
    time += by_us;
  }
}

std::int32_t trace_builder::number_in(id_table& table, const scanned_id& id) {
  switch (id.is) {
    case scanned_id::kind::integer:
      return table.of(id.integer);
    case scanned_id::kind::large:
      return table.of_unsigned(id.large);
    case scanned_id::kind::decimal:
      return table.of_bytes(id.text, id_table::kind::decimal);
    case scanned_id::kind::text:
      break;
  }
  return table.of_bytes(id.text, id_table::kind::text);
}

std::int32_t trace_builder::number_of(const scanned_id& id) {
  return number_in(ids_, id);
}
std::int32_t trace_builder::session_of(const scanned_id& id) {
  return number_in(sessions_, id);
}

/// How many units from `from` on came before in the same request. Numbers rise along a new path of chained
/// ids, so nearly always one look is enough.
std::int64_t trace_builder::repeated(std::size_t from) {
  const auto begin = out_.units.begin() + static_cast<std::ptrdiff_t>(from);
  const auto not_rising = [](std::int32_t a, std::int32_t b) { return a >= b; };
  if (std::adjacent_find(begin, out_.units.end(), not_rising) == out_.units.end()) return 0;
  scratch_.assign(begin, out_.units.end());
  std::sort(scratch_.begin(), scratch_.end());
  return scratch_.end() - std::unique(scratch_.begin(), scratch_.end());
}

void trace_builder::end(const request_facts& facts) {
  request r;
  r.time_us = facts.time_us;
  r.input_tokens = facts.input_tokens;
  r.output_tokens = facts.output_tokens;
  r.first = static_cast<std::int64_t>(first_);
  r.count = static_cast<std::int32_t>(out_.units.size() - first_);
  r.session = facts.session;
  out_.repeated_ids += repeated(first_);
  if (!facts.has_blocks) ++without_blocks_;
  if (facts.input_tokens < 0) ++without_length_;
  if (facts.has_blocks && facts.input_tokens >= 0) evidence_.back().add(facts.input_tokens, r.count);
  out_.requests.push_back(r);
}

void trace_builder::block_tokens_are(scanner& from, std::int64_t line, std::int32_t tokens) {
  if (stated_ != 0 && stated_ != tokens) {
    from.fail_at(line, "bad_value", "block size", number(tokens) + ", " + number(stated_) + " before");
  }
  if (options_.block_tokens != 0 && options_.block_tokens != tokens) {
    from.fail_at(line, "bad_value", "block size",
                 number(tokens) + ", " + number(options_.block_tokens) + " asked for");
  }
  stated_ = tokens;
}

trace trace_builder::finish() {
  out_.distinct = ids_.size();
  decide_block_tokens();
  fill_lengths();
  if (sessions_begun_ > 1) {
    note("Sessions count time from their own start: " + number(sessions_begun_) +
         (options_.session_gap_us == 0 ? " of them start together."
                                       : " of them start " + number(options_.session_gap_us) + " us apart."));
  }
  merge_by_time();
  return std::move(out_);
}

/// Files of two block sizes make no trace, even where each alone is clear.
void trace_builder::check_files_agree() const {
  std::int32_t before = 0;
  for (std::size_t f = 0; f < evidence_.size(); ++f) {
    const block_evidence::answer one = evidence_[f].decide(assumed_);
    if (!one.certain) continue;
    if (before != 0 && before != one.tokens) {
      throw error(failure::bad_input, "bad_value", "block size",
                  number(one.tokens) + ", " + number(before) + " before", names_[f]);
    }
    before = one.tokens;
  }
}

void trace_builder::decide_block_tokens() {
  const std::int64_t all = requests();
  if (without_blocks_ == all) {
    if (all > 0) note("The file holds lengths and times only: nothing is known of what the requests share.");
    return;
  }
  if (without_blocks_ > 0) {
    note(number(without_blocks_) + " of " + number(all) + " requests do not say which blocks they have.");
  }
  if (stated_ != 0 || options_.block_tokens != 0) {
    out_.block_tokens = stated_ != 0 ? stated_ : options_.block_tokens;
    return;
  }
  check_files_agree();
  block_evidence joint;
  for (const block_evidence& e : evidence_) joint.add(e);
  const block_evidence::answer found = joint.decide(assumed_);
  out_.block_tokens = found.tokens != 0 && joint.any() ? found.tokens : assumed_;
  const std::string taken = number(out_.block_tokens) + " are taken";
  if (!joint.any()) {
    note("The file does not say how many tokens a block has: " + taken + ".");
  } else if (found.tokens == 0) {
    note("Lengths and numbers of blocks fit no block size: " + taken + ".");
  } else if (!found.certain) {
    note("Lengths fit blocks of " + number(found.least) + " to " + number(found.most) + " tokens: " + taken +
         ".");
  }
}

void trace_builder::fill_lengths() {
  if (without_length_ == 0) return;
  for (request& r : out_.requests) {
    if (r.input_tokens < 0) r.input_tokens = std::int64_t{r.count} * out_.block_tokens;
  }
  const std::string who = without_length_ == requests()
                              ? std::string("Requests do not say how long they are: ")
                              : number(without_length_) + " of " + number(requests()) +
                                    " requests do not say how long they are: ";
  note(who + "what their blocks hold is taken.");
}

void trace_builder::merge_by_time() {
  std::vector<request>& all = out_.requests;
  const auto earlier = [](const request& a, const request& b) { return a.time_us < b.time_us; };
  const bool merged = !std::is_sorted(all.begin(), all.end(), earlier);
  if (merged) std::stable_sort(all.begin(), all.end(), earlier);
  if (!all.empty()) {
    const std::int64_t start = all.front().time_us;
    for (request& r : all) r.time_us -= start;
  }
  renumber();
}

/// Numbers ids and sessions in the order in which the requests now stand; ids of requests that were given up
/// lose their numbers.
void trace_builder::renumber() {
  std::vector<std::int32_t> of_unit(static_cast<std::size_t>(out_.distinct), -1);
  std::int32_t next = 0;
  for (const request& r : out_.requests) {
    for (std::int64_t i = r.first; i < r.first + r.count; ++i) {
      std::int32_t& unit = out_.units[static_cast<std::size_t>(i)];
      std::int32_t& mine = of_unit[static_cast<std::size_t>(unit)];
      if (mine < 0) mine = next++;
      unit = mine;
    }
  }
  out_.distinct = next;
  // Sessions with an id of their own are 0 and up, the others -2 and down.
  std::vector<std::int32_t> named(static_cast<std::size_t>(sessions_.size()), -1);
  std::vector<std::int32_t> nameless(static_cast<std::size_t>(sessions_begun_), -1);
  next = 0;
  for (request& r : out_.requests) {
    if (r.session == -1) continue;
    std::int32_t& mine = r.session >= 0 ? named[static_cast<std::size_t>(r.session)]
                                        : nameless[static_cast<std::size_t>(-2 - r.session)];
    if (mine < 0) mine = next++;
    r.session = mine;
  }
}

void block_evidence::add(std::int64_t tokens, std::int64_t blocks) {
  ++rows_;
  if (blocks > 0) {
    up_.at_least(divide_up(tokens, blocks));
    down_.at_most(tokens / blocks);
    loose_.at_most(tokens / blocks);
  }
  if (blocks > 1) up_.at_most(divide_up(tokens, blocks - 1) - 1);
  if (blocks == 0 && tokens > 0) up_.at_most(0);
  if (blocks == 1 && tokens == 0) up_.at_most(0);
  down_.at_least(tokens / (blocks + 1) + 1);
  loose_.at_least(divide_up(tokens, blocks + 1));
}

void block_evidence::add(const block_evidence& other) {
  rows_ += other.rows_;
  const auto meet = [](range& a, const range& b) {
    a.at_least(b.least);
    a.at_most(b.most);
  };
  meet(up_, other.up_);
  meet(down_, other.down_);
  meet(loose_, other.loose_);
}

block_evidence::answer block_evidence::decide(std::int32_t usual) const {
  for (const range& r : {up_, down_, loose_}) {
    if (r.least > r.most) continue;
    answer out{0, r.least == r.most, r.least, r.most};
    std::int64_t size = r.least <= usual && usual <= r.most ? usual : 1;
    while (size < r.least) size *= 2;
    if (size > r.most) size = r.least;  // no power of two agrees
    out.tokens = static_cast<std::int32_t>(size);
    return out;
  }
  return {};
}

}  // namespace kvcache::cli
