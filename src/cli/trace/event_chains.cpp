// SPDX-License-Identifier: Apache-2.0
#include "trace/event_chains.hpp"

#include <algorithm>
#include <string>

namespace kvcache::cli {

void event_chains::batch(std::int64_t line, std::int64_t time_us, std::int64_t rank) {
  std::int64_t& last = last_time_.try_emplace(rank, 0).first->second;
  if (time_us < last) {
    in_.fail_at(line, "out_of_order", "ts",
                std::to_string(time_us) + " us, after " + std::to_string(last) + " us");
  }
  last = time_us;
  time_us_ = time_us;
}

void event_chains::sequence(std::int64_t number) {
  if (next_sequence_ >= 0 && number > next_sequence_) missing_batches_ += number - next_sequence_;
  next_sequence_ = number + 1;
}

void event_chains::check_size(std::int64_t line, const kv_event& event) {
  if (event.block_tokens < 0) {
    block_tokens_ = out_.options().block_tokens;
    if (block_tokens_ == 0) in_.fail_at(line, "missing_field", "block_size", "");
    return;
  }
  if (event.block_tokens == 0) in_.fail_at(line, "out_of_range", "block_size", "0");
  block_tokens_ = event.block_tokens;
  out_.block_tokens_are(in_, line, static_cast<std::int32_t>(event.block_tokens));
  const std::int64_t held = event.block_tokens * static_cast<std::int64_t>(event.blocks.size());
  if (event.tokens > 0 && event.tokens != held) {
    in_.fail_at(line, "bad_value", "token_ids",
                std::to_string(event.tokens) + " tokens for " + std::to_string(held));
  }
}

/// Notes what each block follows; false if that is not known.
bool event_chains::link(std::int64_t line, const kv_event& event) {
  const std::int32_t highest =
      std::max(event.parent, *std::max_element(event.blocks.begin(), event.blocks.end()));
  if (static_cast<std::size_t>(highest) >= parent_.size()) {
    parent_.resize(std::max<std::size_t>(static_cast<std::size_t>(highest) + 1, parent_.size() * 3 / 2),
                   unseen);
  }
  std::int32_t before = event.parent;
  if (before >= 0 && parent_[static_cast<std::size_t>(before)] == unseen) return false;
  for (const std::int32_t block : event.blocks) {
    std::int32_t& known = parent_[static_cast<std::size_t>(block)];
    // What follows is known already, so a block that is new cannot close a circle.
    if (known == unseen && block != before) known = before;
    if (known != before)
      in_.fail_at(line, "bad_value", "block_hashes", "a block that followed another one before");
    before = block;
  }
  return true;
}

void event_chains::add(std::int64_t line, const kv_event& event) {
  ++events_;
  if (event.is != kv_event::kind::stored || event.blocks.empty()) return;
  if (!event.on_device) return void(++elsewhere_);
  if (event.group != 0) return void(++other_groups_);
  ++stored_;
  check_size(line, event);
  if (!link(line, event)) return void(++orphans_);
  const auto found = event.parent < 0 ? open_.end() : open_.find(event.parent);
  std::size_t mine = requests_.size();
  if (found != open_.end() && time_us_ >= requests_[found->second].last_us &&
      time_us_ - requests_[found->second].last_us <= out_.options().store_gap_us) {
    mine = found->second;
    open_.erase(found);
  } else {
    requests_.push_back({time_us_, time_us_, 0});
  }
  requests_[mine].last_us = time_us_;
  requests_[mine].tip = event.blocks.back();
  open_[event.blocks.back()] = mine;
}

/// Adds one request: all blocks from the start of its text.
void event_chains::emit(const pending& p) {
  path_.clear();
  for (std::int32_t b = p.tip; b >= 0; b = parent_[static_cast<std::size_t>(b)]) {
    path_.push_back(b);
    if (static_cast<std::int64_t>(path_.size()) > trace_builder::most_blocks) {
      in_.fail("too_long", "block_hashes",
               "more than " + std::to_string(trace_builder::most_blocks) + " in one text");
    }
  }
  out_.begin();
  std::for_each(path_.rbegin(), path_.rend(), [&](std::int32_t b) { out_.add_unit(b); });
  request_facts facts;
  facts.time_us = p.start_us;
  facts.input_tokens = static_cast<std::int64_t>(path_.size()) * block_tokens_;
  out_.end(facts);
}

void event_chains::finish() {
  if (stored_ == 0) in_.fail("too_little", "BlockStored", "0 of " + std::to_string(events_) + " events");
  if (orphans_ * 2 > stored_) {
    in_.fail(
        "too_little", "parent_block_hash",
        "unknown in " + std::to_string(orphans_) + " of " + std::to_string(stored_) + " BlockStored events");
  }
  for (const pending& p : requests_) emit(p);
  add_notes();
}

void event_chains::add_notes() {
  const auto events = [](std::int64_t n) { return std::to_string(n) + " BlockStored events "; };
  out_.note(
      "Events tell of blocks that were filled: requests that were cached whole are missing, so the real hit "
      "rate "
      "is higher.");
  out_.note("Blocks filled while generating count as prompt, since events do not tell them apart.");
  if (orphans_ > 0) {
    out_.note(events(orphans_) +
              "were left out: what they follow was stored before the log began, or was lost.");
  }
  if (missing_batches_ > 0) out_.note(std::to_string(missing_batches_) + " batches are missing in the log.");
  if (elsewhere_ > 0) out_.note(events(elsewhere_) + "of lower tiers were passed over.");
  if (other_groups_ > 0) out_.note(events(other_groups_) + "of further groups of layers were passed over.");
}

}  // namespace kvcache::cli
