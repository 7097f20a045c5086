// SPDX-License-Identifier: Apache-2.0
#include "scheduler.hpp"

#include <algorithm>
#include <tuple>

namespace engine {

/// A request on its way. `out.text` is the prompt and what was generated so far; its last token is never
/// written before the next one is asked for, so something is always left to compute.
struct scheduler::request {
  answer out;
  age place{-1, 0};
  int slot = -1;
  int written = 0;  ///< tokens in the cache while it is open
  int known = 0;    ///< tokens that were computed or reused at least once
  bool branched = false;
  splitmix64 random{0};

  int size() const { return static_cast<int>(out.text.size()); }
  int left() const { return size() - written; }
  bool decoding() const { return size() > out.prompt_tokens && left() == 1; }
  bool wants_logits() const { return out.from->max_new > 0; }
  /// Sequences it needs at the same time, up to the point where its samples part.
  int places(int batch) const {
    return out.sample == 0 && !branched ? std::min(out.from->samples, batch) : 1;
  }
  std::span<const token_id> written_text() const {
    return std::span(out.text).first(static_cast<std::size_t>(written));
  }
};

std::int64_t most_tokens(const job& from, std::size_t turn) {
  std::size_t tokens = from.prompt.size() + static_cast<std::size_t>(from.max_new);
  for (std::size_t i = 0; i < turn; ++i) {
    tokens += 1 + from.follow_ups[i].size() + static_cast<std::size_t>(from.max_new);
  }
  return static_cast<std::int64_t>(tokens);
}

std::uint64_t chain(std::uint64_t so_far, std::uint64_t step_fingerprint) {
  for (int byte = 0; byte < 8; ++byte) {
    so_far = (so_far ^ ((step_fingerprint >> (8 * byte)) & 0xFFu)) * 0x100000001B3u;
  }
  return so_far;
}

scheduler::scheduler(llama_model& model, cache_kind& cache, std::span<const job> jobs,
                     scheduler_options options)
    : model_(model), cache_(cache), jobs_(jobs), options_(std::move(options)) {
  for (const job& from : jobs_) {
    pending_.emplace(from.arrival, &make_request(from, 0, 0, from.prompt));
    for (std::size_t turn = 0; turn <= from.follow_ups.size(); ++turn) {
      progress_.answers_expected += from.samples;
      progress_.tokens_expected += from.samples * most_tokens(from, turn);
    }
  }
}

scheduler::~scheduler() {
  for (const auto& [place, r] : running_) cache_.close(r->slot);
}

scheduler::request& scheduler::make_request(const job& from, int turn, int sample,
                                            std::vector<token_id> prompt) {
  request& r = *requests_.emplace_back(std::make_unique<request>());
  r.out.from = &from;
  r.out.turn = turn;
  r.out.sample = sample;
  r.out.prompt_tokens = static_cast<int>(prompt.size());
  r.out.text = std::move(prompt);
  r.out.fnv = chain_start;
  r.random = splitmix64(from.how.seed + static_cast<std::uint64_t>(sample));
  return r;
}

status scheduler::run(const std::function<void()>& after_step) {
  while (!done()) {
    if (status s = step(); !s) return s;
    if (after_step) after_step();
  }
  return {};
}

status scheduler::step() {
  arrive();
  plan_.clear();
  left_ = options_.chunk;
  preempted_now_ = false;
  if (status s = plan_running(true); !s) return s;
  if (status s = plan_running(false); !s) return s;
  if (status s = admit(); !s) return s;
  if (!plan_.empty()) {
    if (status s = execute(); !s) return s;
  }
  ++now_;
  ++totals_.steps;
  return {};
}

// Nothing to do until the next arrival: time jumps there.
void scheduler::arrive() {
  if (running_.empty() && waiting_.empty() && !pending_.empty())
    now_ = std::max(now_, pending_.begin()->first);
  while (!pending_.empty() && pending_.begin()->first <= now_) {
    request& r = *pending_.begin()->second;
    pending_.erase(pending_.begin());
    r.place = {next_ticket_++, r.out.sample};
    totals_.asked += r.out.prompt_tokens;
    waiting_.emplace(r.place, &r);
  }
}

int scheduler::places_taken() const {
  int places = 0;
  for (const auto& [place, r] : running_) places += r->places(options_.batch);
  return places;
}

// Rows for the running requests that are decoding, or for those that are not, the oldest first. A request
// may be preempted while the others are planned, hence the copy.
status scheduler::plan_running(bool decoding) {
  std::vector<request*> candidates;
  for (const auto& [place, r] : running_) {
    if (r->decoding() == decoding) candidates.push_back(r);
  }
  for (request* r : candidates) {
    if (r->slot < 0 || left_ == 0) continue;
    const auto rows = make_room(*r, std::min(left_, r->left()));
    if (!rows) return rows.error();
    if (*rows == 0) continue;
    plan_.push_back({r, *rows});
    left_ -= *rows;
  }
  return {};
}

// Room for a step of at most `rows` tokens, at the cost of younger requests. Returns how many; 0: r itself
// had to go.
result<int> scheduler::make_room(request& r, int rows) {
  while (true) {
    const auto room = cache_.extend(r.slot, rows);
    if (room || room.error().code != "out_of_blocks") return room;
    if (running_.size() == 1) {
      cache_.close(r.slot);
      running_.erase(r.place);
      refuse(r);
      return 0;
    }
    request& youngest = *running_.rbegin()->second;
    if (status p = preempt(youngest); !p) return p.error();
    if (&youngest == &r) return 0;
  }
}

// Gives up the sequence but not what was computed: once committed, open() finds it again unless the blocks
// were needed elsewhere meanwhile. The place in the queue is kept, so it is the next to be admitted.
status scheduler::preempt(request& r) {
  if (status s = cache_.commit(r.slot, r.written_text()); !s) return s;
  cache_.close(r.slot);
  running_.erase(r.place);
  std::erase_if(plan_, [&](const planned& p) { return p.who == &r; });
  r.slot = -1;
  waiting_.emplace(r.place, &r);
  ++r.out.preempted;
  ++totals_.preemptions;
  preempted_now_ = true;
  return {};
}

// Nobody else holds a block, and still there is no room.
void scheduler::refuse(request& r) {
  const job& from = *r.out.from;
  r.slot = -1;
  r.out.stop = "out_of_blocks";
  r.out.finish_step = now_;
  if (!failure_) {
    failure_ = cannot_run("out_of_blocks", "id", from.id);
    failure_->line = from.line;
  }
  const int answers = r.out.sample == 0 && !r.branched ? from.samples : 1;
  for (auto turn = static_cast<std::size_t>(r.out.turn); turn <= from.follow_ups.size(); ++turn) {
    progress_.tokens_expected -= answers * most_tokens(from, turn);
    progress_.answers_expected -= answers;
  }
  progress_.tokens_expected += r.out.reused + r.out.prefilled + static_cast<int>(r.out.ids().size());
}

// Waiting requests enter in order while rows are left: one that could not compute anything yet would look for
// its prefix too early, before those ahead of it have written theirs.
status scheduler::admit() {
  while (left_ > 0 && !preempted_now_ && !waiting_.empty()) {
    request& r = *waiting_.begin()->second;
    if (places_taken() + r.places(options_.batch) > options_.batch) break;
    const auto opened = cache_.resume(r.out.text, r.out.prompt_tokens, r.out.from->scope);
    if (!opened) return opened.error();
    const auto rows = cache_.extend(opened->slot, std::min(left_, r.size() - opened->reused));
    if (!rows) {
      cache_.close(opened->slot);
      if (rows.error().code != "out_of_blocks") return rows.error();
      if (!running_.empty()) break;
      waiting_.erase(r.place);
      refuse(r);
      continue;
    }
    waiting_.erase(r.place);
    running_.emplace(r.place, &r);
    r.slot = opened->slot;
    r.written = opened->reused;
    const int fresh = std::max(0, std::min(r.written, r.out.prompt_tokens) - r.known);
    r.out.reused += fresh;
    totals_.reused += fresh;
    r.known = std::max(r.known, r.written);
    plan_.push_back({&r, *rows});
    left_ -= *rows;
  }
  totals_.peak_running = std::max(totals_.peak_running, static_cast<int>(running_.size()));
  return {};
}

status scheduler::execute() {
  tokens_.clear();
  segments_.clear();
  wanted_.clear();
  for (const planned& p : plan_) {
    const request& r = *p.who;
    segments_.push_back({r.slot, r.written, p.rows});
    const auto from = r.out.text.begin() + r.written;
    tokens_.insert(tokens_.end(), from, from + p.rows);
    if (r.wants_logits() && p.rows == r.left()) wanted_.push_back(static_cast<int>(tokens_.size()) - 1);
  }
  const auto vocabulary = static_cast<std::size_t>(model_.shape().vocabulary);
  logits_.resize(wanted_.size() * vocabulary);
  if (status s = model_.forward(tokens_, segments_, wanted_, cache_.backend(), logits_); !s) return s;
  for (const planned& p : plan_) {
    if (status s = after_forward(p); !s) return s;
  }
  measure();
  std::size_t row = 0;
  for (const planned& p : plan_) {
    if (p.who->left() > 0) continue;
    std::span<const float> logits;
    if (p.who->wants_logits())
      logits = std::span<const float>(logits_).subspan(row++ * vocabulary, vocabulary);
    if (status s = give_logits(*p.who, logits); !s) return s;
  }
  return {};
}

// Counts the rows, and lets others find a prompt as soon as it is written.
status scheduler::after_forward(const planned& p) {
  request& r = *p.who;
  const bool prefill = !r.decoding();
  const int end = r.written + p.rows;
  const int again = std::clamp(r.known - r.written, 0, p.rows);
  const int first = std::max(r.known, r.written);
  const int prompt = std::max(0, std::min(end, r.out.prompt_tokens) - first);
  r.out.recomputed += again;
  r.out.prefilled += prompt;
  totals_.recomputed += again;
  totals_.prefilled += prompt;
  r.written = end;
  r.known = std::max(r.known, end);
  return prefill ? cache_.commit(r.slot, r.written_text()) : status();
}

void scheduler::measure() {
  const cache_bytes bytes = cache_.bytes();
  totals_.peak_blocks = std::max(totals_.peak_blocks, cache_.counts().blocks_used);
  totals_.peak_held = std::max(totals_.peak_held, bytes.held);
  totals_.peak_reserved = std::max(totals_.peak_reserved, bytes.reserved);
  totals_.held_steps += static_cast<double>(bytes.held);
  totals_.reserved_steps += static_cast<double>(bytes.reserved);
}

// All of r's text is written; `logits` predict what follows (empty when nothing is to be generated).
status scheduler::give_logits(request& r, std::span<const float> logits) {
  std::vector<request*> takers{&r};
  if (r.out.sample == 0 && !r.branched && r.out.from->samples > 1) {
    const auto children = branch(r);
    if (!children) return children.error();
    takers.insert(takers.end(), children->begin(), children->end());
  }
  const std::uint64_t hash = fingerprint(logits);
  for (request* taker : takers) {
    if (logits.empty()) {
      taker->out.stop = "length";
    } else {
      take_token(*taker, logits, hash);
    }
    if (*taker->out.stop != 0) {
      if (status s = finish(*taker); !s) return s;
    }
  }
  return {};
}

// The prompt is written: its other samples begin as forks of it. Where the cache cannot fork they queue up as
// requests of their own, just behind this one. Returns the forks.
result<std::vector<scheduler::request*>> scheduler::branch(request& r) {
  r.branched = true;
  const job& from = *r.out.from;
  std::vector<request*> forks;
  bool can_fork = true;
  for (int sample = 1; sample < from.samples; ++sample) {
    request& child = make_request(from, r.out.turn, sample, r.out.text);
    child.place = {r.place.first, sample};
    totals_.asked += child.out.prompt_tokens;
    can_fork = can_fork && static_cast<int>(running_.size()) < options_.batch;
    if (can_fork) {
      const auto slot = cache_.fork(r.slot);
      if (!slot && slot.error().code != "unsupported") return slot.error();
      can_fork = static_cast<bool>(slot);
      if (slot) child.slot = *slot;
    }
    if (!can_fork) {
      waiting_.emplace(child.place, &child);
      continue;
    }
    child.written = child.known = child.out.reused = child.out.prompt_tokens;
    totals_.reused += child.out.reused;
    running_.emplace(child.place, &child);
    forks.push_back(&child);
  }
  totals_.peak_running = std::max(totals_.peak_running, static_cast<int>(running_.size()));
  return forks;
}

void scheduler::take_token(request& r, std::span<const float> logits, std::uint64_t hash) {
  const token_id next = sample(logits, r.out.from->how.temperature, r.random);
  r.out.fnv = chain(r.out.fnv, hash);
  r.out.text.push_back(next);
  ++totals_.generated;
  if (r.out.first_token_step < 0) r.out.first_token_step = now_;
  if (options_.is_stop && options_.is_stop(next)) {
    r.out.stop = "eos";
  } else if (static_cast<int>(r.out.ids().size()) == r.out.from->max_new) {
    r.out.stop = "length";
  } else if (r.written >= model_.shape().kv.max_positions) {
    r.out.stop = "context";
  }
}

status scheduler::finish(request& r) {
  if (status s = cache_.commit(r.slot, r.written_text()); !s) return s;
  r.out.dropped = cache_.dropped(r.slot);
  totals_.dropped += r.out.dropped;
  cache_.close(r.slot);
  running_.erase(r.place);
  r.slot = -1;
  r.out.finish_step = now_;
  const job& from = *r.out.from;
  const auto turn = static_cast<std::size_t>(r.out.turn);
  progress_.tokens_expected -= most_tokens(from, turn) - r.size();
  ++progress_.answered;
  if (turn == from.follow_ups.size()) return {};
  std::vector<token_id> history = r.out.text;
  if (history.back() != from.end_of_turn) history.push_back(from.end_of_turn);
  history.insert(history.end(), from.follow_ups[turn].begin(), from.follow_ups[turn].end());
  pending_.emplace(now_ + 1, &make_request(from, r.out.turn + 1, 0, std::move(history)));
  return {};
}

std::vector<const answer*> scheduler::answers() const {
  std::vector<const answer*> all;
  for (const auto& r : requests_) all.push_back(&r->out);
  std::sort(all.begin(), all.end(), [](const answer* a, const answer* b) {
    return std::tie(a->from, a->turn, a->sample) < std::tie(b->from, b->turn, b->sample);
  });
  return all;
}

serve_progress scheduler::progress() const {
  serve_progress p = progress_;
  p.tokens_done = totals_.reused + totals_.prefilled + totals_.generated;
  p.running = running_.size();
  p.waiting = waiting_.size();
  return p;
}

}  // namespace engine
