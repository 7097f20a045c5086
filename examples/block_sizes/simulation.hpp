// SPDX-License-Identifier: Apache-2.0
#pragma once

// Serves a day of requests with the control plane alone, and counts. One token of each running request per
// step; when what happens does not depend on the block size, so runs can be compared request by request.
//
//   admit ── open ──> extend (whole prompt) ──> commit ──> extend 1, extend 1, ... ──> commit, close
//                        measured in every step, all sequences open

#include <algorithm>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "day.hpp"
#include "error.hpp"
#include "kvcache/blocks/contiguous.hpp"
#include "kvcache/cache.hpp"

namespace block_sizes {

// An 8B model with grouped heads: 128 KiB per token in 16 bit.
inline constexpr kvcache::model_shape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};

/// The baseline: the same cache with an allocator that hands out whole regions.
struct reserving : kvcache::serving {
  using allocator_type = kvcache::contiguous;
};

/// Sums over the run.
struct outcome {
  std::string name;
  int block = 0;
  std::int64_t steps = 0;
  double set_aside = 0;  ///< slots x steps
  double empty = 0;      ///< slots x steps in which no token is stored
  std::int64_t peak_blocks = 0;
  std::int64_t peak_entries = 0;  ///< of all open block tables
  std::int64_t reused = 0;
  std::int64_t could_reuse = 0;  ///< with blocks of one token
  std::int64_t nodes = 0;
  std::int64_t wrong_hits = 0;
  bool sound = false;  ///< counters and structure, checked by the cache itself

  double used_percent() const { return 100 * (1 - empty / set_aside); }
  double lost_percent() const {
    return could_reuse == 0
               ? 0
               : 100.0 * static_cast<double>(could_reuse - reused) / static_cast<double>(could_reuse);
  }
};

inline engine::error to_error(const kvcache::status& s) {
  return engine::cannot_run(kvcache::to_text(s.code), s.field, std::to_string(s.value));
}

/// Serves all jobs, `batch` at a time, from blocks of `block` tokens. No text may be longer than `region`.
template <class Traits>
class simulation {
 public:
  using cache = kvcache::basic_cache<Traits>;
  static constexpr bool shares = Traits::allocator_type::shareable;

  simulation(const std::vector<job>& jobs, int batch, int region, int block)
      : jobs_(jobs), batch_(batch), region_(region) {
    out_.block = block;
    out_.name = shares ? std::to_string(block) : "region";
  }

  engine::result<outcome> run() {
    std::int64_t blocks = std::int64_t{batch_} * kvcache::ceil_div(region_, out_.block);
    if (shares) {
      // Room for all that is ever sent, so that nothing is evicted and every loss is the block size's.
      for (const job& j : jobs_) blocks += static_cast<std::int64_t>(j.text.size()) / out_.block + 1;
    }
    const kvcache::group_config group[] = {{.shape = kvcache::group_of(shape),
                                            .block_size = out_.block,
                                            .total = kvcache::blocks{static_cast<std::int32_t>(blocks)},
                                            .reserve = shares ? 0 : region_}};
    auto made = cache::create({.groups = group, .max_sequences = batch_, .max_sequence_tokens = region_});
    if (!made) return to_error(made.error());
    cache_ = std::move(*made);
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      if (jobs_[i].after < 0) ready_.push_back(i);
    }
    while (!ready_.empty() || !running_.empty()) {
      if (kvcache::status s = step(); !s) return to_error(s);
    }
    const kvcache::stats s = cache_.count();
    out_.nodes = static_cast<std::int64_t>(s.nodes);
    out_.sound = cache_.check_invariants() == nullptr && s.sequences_live == 0 && s.blocks_used == 0 &&
                 s.blocks_cached + s.blocks_free == s.blocks_total && s.nodes_evicted == 0;
    return out_;
  }

 private:
  struct live {
    std::size_t job;
    typename cache::sequence sequence;
  };

  kvcache::status step() {
    while (static_cast<int>(running_.size()) < batch_ && !ready_.empty()) {
      if (kvcache::status s = admit(ready_.front()); !s) return s;
      ready_.pop_front();
    }
    for (live& r : running_) {
      const bool prefilled = r.sequence.held() >= jobs_[r.job].prompt;
      const auto room = r.sequence.extend(prefilled ? 1 : jobs_[r.job].prompt - r.sequence.held());
      if (!room) return room.error();
    }
    // Here an engine runs cache_.commands() and the model. Now the step's tokens are "computed".
    measure();
    cache_.end_step();
    ++out_.steps;
    for (live& r : running_) {
      const job& j = jobs_[r.job];
      if (r.sequence.held() == j.prompt || done(r)) {
        if (const auto s = r.sequence.commit(text_of(r)); !s) return s.error();
        published_.push_back(text_of(r));
      }
      if (!done(r)) continue;
      for (std::size_t i = 0; i < jobs_.size(); ++i) {
        if (jobs_[i].after == static_cast<int>(r.job)) ready_.push_back(i);
      }
    }
    running_.erase(std::remove_if(running_.begin(), running_.end(), [&](const live& r) { return done(r); }),
                   running_.end());
    return {};
  }

  bool done(const live& r) const { return r.sequence.held() == static_cast<int>(jobs_[r.job].text.size()); }
  std::span<const token_id> text_of(const live& r) const {
    return std::span(jobs_[r.job].text).first(static_cast<std::size_t>(r.sequence.held()));
  }

  kvcache::status admit(std::size_t i) {
    const job& j = jobs_[i];
    const auto prompt = std::span(j.text).first(static_cast<std::size_t>(j.prompt));
    auto opened = cache_.open(prompt, kvcache::scope::shared());
    if (!opened) return opened.error();
    if (shares) {
      const std::int64_t known = oracle(prompt);
      out_.could_reuse += known;
      out_.reused += opened->reused();
      out_.wrong_hits += opened->reused() != known / out_.block * out_.block;
    }
    running_.push_back({i, std::move(*opened)});
    return {};
  }

  /// The longest prefix of `prompt` that is also one of what was published so far, token by token. At least
  /// one token of a prompt is always computed.
  std::int64_t oracle(std::span<const token_id> prompt) const {
    std::int64_t longest = 0;
    for (const auto& text : published_) {
      const std::size_t most = std::min(text.size(), prompt.size() - 1);
      const auto end = prompt.begin() + static_cast<std::ptrdiff_t>(most);
      longest = std::max<std::int64_t>(
          longest, std::mismatch(prompt.begin(), end, text.begin()).first - prompt.begin());
    }
    return longest;
  }

  void measure() {
    const auto used = static_cast<std::int64_t>(cache_.count().blocks_used);
    std::int64_t entries = 0;
    for (const live& r : running_) {
      const auto table = static_cast<std::int64_t>(r.sequence.table().size());
      entries += table;
      out_.empty += static_cast<double>(table * out_.block - r.sequence.held());
    }
    out_.set_aside += static_cast<double>(used * out_.block);
    out_.peak_blocks = std::max(out_.peak_blocks, used);
    out_.peak_entries = std::max(out_.peak_entries, entries);
  }

  const std::vector<job>& jobs_;
  int batch_;
  int region_;  // tokens of the longest text that a server has to expect
  outcome out_;
  cache cache_;
  std::deque<std::size_t> ready_;
  std::vector<live> running_;
  std::vector<std::span<const token_id>> published_;
};

}  // namespace block_sizes
