// SPDX-License-Identifier: Apache-2.0
#include "searcher.hpp"

#include <algorithm>

#include "sampling.hpp"

namespace beams {

searcher::searcher(engine::llama_model& model, engine::cache_kind& cache, candidates choose, int width)
    : model_(model), cache_(cache), choose_(std::move(choose)), width_(static_cast<std::size_t>(width)) {}

searcher::~searcher() {
  for (const int slot : slots_) cache_.close(slot);
}

engine::result<outcome> searcher::run(std::span<const token_id> prompt, int depth, int chunk) {
  const auto opened = cache_.open(prompt, engine::cache_scope::everyone());
  if (!opened) return opened.error();
  slots_.push_back(opened->slot);
  beams_.emplace_back();
  // The prompt is computed once, by the only beam there is; the others are its children.
  const auto keep = [&](int, std::span<const float> row) { logits_.assign(row.begin(), row.end()); };
  const auto rest = prompt.subspan(static_cast<std::size_t>(opened->reused));
  if (auto s = engine::feed(model_, cache_, opened->slot, rest, chunk, engine::observe::last, keep); !s)
    return s.error();
  outcome out;
  out.first_logits = logits_;
  for (int at = 1; at <= depth; ++at) {
    step_cost cost;
    const std::int64_t copies = cache_.counts().copies;
    if (auto s = place(best_children(), cost); !s) return s.error();
    if (at < depth) {  // nobody asks what follows the last token
      if (auto s = write(); !s) return s.error();
    }
    cost.copies = cache_.counts().copies - copies;
    out.steps.push_back(cost);
  }
  out.blocks = cache_.counts().blocks_used;
  out.beams = beams_;
  std::sort(out.beams.begin(), out.beams.end(), better);
  return out;
}

// The next generation: the best `width` of all children of all beams.
std::vector<searcher::child> searcher::best_children() const {
  std::vector<child> all;
  for (std::size_t i = 0; i < beams_.size(); ++i) {
    const auto logits = engine::row_of(logits_, model_, i);
    const double log_sum = engine::log_sum_exp(logits);
    for (const token_id id : choose_(logits)) {
      child& c = all.emplace_back(child{beams_[i], i});
      c.text.ids.push_back(id);
      c.text.score += logits[static_cast<std::size_t>(id)] - log_sum;
    }
  }
  std::sort(all.begin(), all.end(), [](const child& a, const child& b) { return better(a.text, b.text); });
  if (all.size() > width_) all.erase(all.begin() + static_cast<std::ptrdiff_t>(width_), all.end());
  return all;
}

// Makes the sequences hold the next generation. The first child of a beam stays where its parent is, so a
// beam with children is never overwritten. Every other child takes over the sequence of a beam that died, or
// a new one while there are fewer beams than `width`.
engine::status searcher::place(const std::vector<child>& children, step_cost& cost) {
  std::vector<const child*> heir(beams_.size(), nullptr);
  std::vector<const child*> others;
  for (const child& c : children) {
    if (heir[c.parent] == nullptr) {
      heir[c.parent] = &c;
    } else {
      others.push_back(&c);
    }
  }
  for (const child* c : others) {
    const auto dead = std::find(heir.begin(), heir.end(), nullptr);
    if (dead == heir.end()) {
      const auto forked = cache_.fork(slots_[c->parent]);
      if (!forked) return forked.error();
      slots_.push_back(*forked);
      heir.push_back(c);
      continue;
    }
    const auto changed =
        cache_.assign(slots_[static_cast<std::size_t>(dead - heir.begin())], slots_[c->parent]);
    if (!changed) return changed.error();
    cost.entries += *changed;
    ++cost.reassigned;
    *dead = c;
  }
  beams_.clear();
  for (const child* c : heir) beams_.push_back(c->text);
  return {};
}

// The last token of every beam in one step. Where two beams still share their last block, the cache gives the
// first one that writes a copy of its own.
engine::status searcher::write() {
  std::vector<token_id> last;
  for (const beam& b : beams_) last.push_back(b.ids.back());
  return engine::advance(model_, cache_, slots_, last, logits_);
}

}  // namespace beams
