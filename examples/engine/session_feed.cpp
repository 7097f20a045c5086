// SPDX-License-Identifier: Apache-2.0
// Tokens into a text: what is certain, what is drafted, and one token for each of a batch.
#include <algorithm>
#include <numeric>

#include "library_terms.hpp"
#include "session_state.hpp"

namespace engine {

// Rows until the next token after which the policy drops, at most `rows`.
int session_cache::parts::rows_until_drop(const kvcache::retention& what, int held, int rows) const {
  for (int r = 1; r < rows; ++r) {
    if (what.policy.plan({.held = held + r, .incoming = 0, .unit = config.block_size, .prefill_end = false})
            .form != drop_form::nothing)
      return r;
  }
  return rows;
}

// Room for a step of at most `tokens`, which ends where the policy drops. Every step of a text begins here
// and ends with settle(), or with the next prepare().
result<int> session_cache::parts::prepare(state& s, int tokens, bool draft) {
  if (s.drafting) return cannot_run("busy", "draft", std::to_string(s.drafted));
  if (status done = settle(s); !done) return done.error();
  const bool stream = s.options.mode == drop_mode::stream;
  return make_room(s, stream ? rows_until_drop(s.what, s.mean_held(), tokens) : tokens, draft);
}

result<int> session::extend(int tokens) {
  return state_->cache->prepare(*state_, tokens, false);
}

status session::settle() {
  return state_->cache->settle(*state_);
}

result<std::vector<float>> session::feed(std::span<const token_id> tokens, observe which) {
  state& s = *state_;
  const auto vocabulary = static_cast<std::size_t>(s.model->shape().vocabulary);
  std::vector<float> logits;
  if (which == observe::all) logits.reserve(tokens.size() * vocabulary);
  std::vector<int> wanted_rows;
  std::vector<float> step;
  while (!tokens.empty()) {
    const auto most = std::min<std::size_t>(tokens.size(), static_cast<std::size_t>(s.options.chunk));
    const auto rows = extend(static_cast<int>(most));
    if (!rows) return rows.error();
    wanted_rows.clear();
    for (int r = 0; r < *rows; ++r) {
      if (which == observe::all || static_cast<std::size_t>(r) + 1 == tokens.size()) wanted_rows.push_back(r);
    }
    step.resize(wanted_rows.size() * vocabulary);
    const step_segment segment{s.slot, s.position, *rows};
    const auto now = tokens.first(static_cast<std::size_t>(*rows));
    if (status done = s.model->forward(now, {&segment, 1}, wanted_rows, *s.cache, step); !done)
      return done.error();
    logits.insert(logits.end(), step.begin(), step.end());
    tokens = tokens.subspan(now.size());
    if (status done = settle(); !done) return done.error();
  }
  return logits;
}

status session::compress() {
  if (state_->drafting) return cannot_run("busy", "draft", std::to_string(state_->drafted));
  if (status done = state_->cache->drop(*state_, drop_reason::prompt_end); !done) return done;
  return state_->cache->pack(*state_);
}

result<std::vector<float>> session::draft(std::span<const token_id> tokens) {
  state& s = *state_;
  if (tokens.empty()) return bad_input("bad_value", "draft", "empty");
  const auto most = std::min<std::size_t>(tokens.size(), static_cast<std::size_t>(s.options.chunk));
  const auto rows = s.cache->prepare(s, static_cast<int>(most), true);
  if (!rows) return rows.error();
  if (*rows == 0) return std::vector<float>();
  std::vector<int> wanted_rows(static_cast<std::size_t>(*rows));
  std::iota(wanted_rows.begin(), wanted_rows.end(), 0);
  std::vector<float> logits(wanted_rows.size() * static_cast<std::size_t>(s.model->shape().vocabulary));
  s.drafting = true;
  s.drafted = *rows;
  s.pending.resize(static_cast<std::size_t>(s.cache->config.shape.layers));
  const step_segment segment{s.slot, s.position, *rows};
  if (status done =
          s.model->forward(tokens.first(wanted_rows.size()), {&segment, 1}, wanted_rows, *s.cache, logits);
      !done) {
    s.drafting = false;
    if (!s.split()) (void)s.whole.accept(0);
    for (auto& head : s.heads) (void)head.accept(0);
    return done.error();
  }
  return logits;
}

status session::accept(int n) {
  state& s = *state_;
  if (!s.drafting || n < 0 || n > s.drafted) return bad_input("bad_value", "accept", std::to_string(n));
  if (!s.split()) {
    // The first token may have taken a slot that the cache counts anew only now.
    if (auto done = s.whole.accept(std::max(0, n - (s.overwrites ? 1 : 0))); !done) return to_error(done);
    if (n > 0) s.cache->count_overwritten(s);
    s.overwrites = false;
  }
  for (auto& head : s.heads) {
    if (auto done = head.accept(n); !done) return to_error(done);
  }
  const auto gone = static_cast<std::size_t>(s.drafted - n);
  for (head_slots& head : s.tokens) head.take_back(static_cast<int>(gone));
  std::vector<int> positions(static_cast<std::size_t>(n));
  std::iota(positions.begin(), positions.end(), s.position);
  for (int layer = 0; n > 0 && s.seen.active() && layer < s.cache->config.shape.layers; ++layer) {
    const auto& rows = s.pending[static_cast<std::size_t>(layer)];
    s.seen.add(layer, {rows.q.data(), rows.lse2.data(), positions}, s.cache->keys_of(s, layer));
  }
  s.position += n;
  s.drafting = false;
  s.drafted = 0;
  s.due = s.options.mode == drop_mode::stream;
  return settle();
}

status session::advance(std::span<session* const> sessions, std::span<const token_id> tokens,
                        std::vector<float>& logits) {
  if (sessions.empty() || sessions.size() != tokens.size())
    return bad_input("bad_value", "sessions", std::to_string(sessions.size()));
  std::vector<step_segment> segments;
  std::vector<int> rows;
  for (session* one : sessions) {
    const state& s = *one->state_;
    if (const auto room = one->extend(1); !room) return room.error();
    segments.push_back({s.slot, s.position, 1});
    rows.push_back(static_cast<int>(rows.size()));
  }
  llama_model& model = *sessions.front()->state_->model;
  logits.resize(sessions.size() * static_cast<std::size_t>(model.shape().vocabulary));
  if (status done = model.forward(tokens, segments, rows, *sessions.front()->state_->cache, logits); !done)
    return done;
  for (session* one : sessions) {
    if (status done = one->settle(); !done) return done;
  }
  return {};
}

}  // namespace engine
