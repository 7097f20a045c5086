// SPDX-License-Identifier: Apache-2.0
#include "session_kind.hpp"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace engine {
namespace {

class session_kind final : public cache_kind {
 public:
  session_kind(llama_model& model, dropping how, const cache_config& config,
               std::unique_ptr<session_cache> cache)
      : model_(model), how_(std::move(how)), config_(config), cache_(std::move(cache)) {
    how_.policy = in_blocks(how_.policy, config);
    blocks_ = cache_->counts().blocks_total;
    texts_.resize(static_cast<std::size_t>(config.max_sequences));
  }

  std::string_view name() const override { return "sessions"; }
  kv_backend& backend() override { return cache_->backend(); }
  result<opened_sequence> open(std::span<const token_id> prompt, const cache_scope& scope) override {
    return resume(prompt, static_cast<int>(prompt.size()), scope);
  }
  result<opened_sequence> resume(std::span<const token_id> text, int prompt,
                                 const cache_scope& scope) override;
  result<int> extend(int slot, int tokens) override;
  status commit(int slot, std::span<const token_id> text) override;
  result<int> fork(int slot) override;
  void close(int slot) override { texts_[static_cast<std::size_t>(slot)].reset(); }
  int length(int slot) const override { return at(slot).text.position(); }
  int dropped(int slot) const override { return at(slot).text.dropped(); }
  cache_bytes bytes() const override { return cache_->bytes(); }
  cache_counts counts() const override { return cache_->counts(); }
  void read(int slot, int layer, int position, float* k, float* v) const override {
    at(slot).text.read(layer, position, k, v);
  }

 private:
  struct open_text {
    session text;
    int prompt = 0;
    bool whole = true;    // oneshot: the prompt has not been compressed
    bool shares = false;  // its prefix, with others
  };

  open_text& at(int slot) { return *texts_[static_cast<std::size_t>(slot)]; }
  const open_text& at(int slot) const { return *texts_[static_cast<std::size_t>(slot)]; }
  bool may_share(int prompt) const;
  status settle(open_text& t);
  int keep(open_text t);

  llama_model& model_;
  dropping how_;
  cache_config config_;
  std::unique_ptr<session_cache> cache_;
  std::int64_t blocks_ = 0;
  std::vector<std::optional<open_text>> texts_;  // by slot
};

// Whether the pool has room for a text as it is before its first drop, and for a copy of what stays.
bool session_kind::may_share(int prompt) const {
  if (how_.mode == drop_mode::out_of_blocks) return how_.policy.policy.get<kvcache::keep_all>() != nullptr;
  const auto drops_at = [&](int held) {
    return how_.policy.policy
               .plan({.held = held,
                      .incoming = 0,
                      .unit = config_.block_size,
                      .prefill_end = how_.mode == drop_mode::oneshot})
               .form != kvcache::drop_form::nothing;
  };
  int longest = prompt;
  if (how_.mode == drop_mode::stream) {
    longest = 1;
    while (longest < config_.max_tokens && !drops_at(longest)) ++longest;
  }
  if (!drops_at(longest)) return true;
  const int blocks = (longest + config_.block_size - 1) / config_.block_size;
  return blocks_ > 2 * std::int64_t{blocks};
}

result<opened_sequence> session_kind::resume(std::span<const token_id> text, int prompt,
                                             const cache_scope& scope) {
  if (text.empty()) return bad_input("bad_value", "prompt", "empty");
  if (text.size() > static_cast<std::size_t>(config_.max_tokens))
    return bad_input("too_long", "prompt.tokens", std::to_string(text.size()));
  // Once the prompt is complete, tokens may go: what was written behind it is no prefix any more.
  if (how_.mode == drop_mode::oneshot) text = text.first(static_cast<std::size_t>(prompt));
  session_options with;
  with.mode = how_.mode;
  with.scope = scope;
  const bool shares = !config_.deferred && may_share(prompt);  // deferred: what is shared is packed by others
  if (shares) with.prompt = text;
  auto made = session::create(model_, *cache_, how_.policy, with);
  if (!made) return made.error();
  const int reused = made->reused();
  return opened_sequence{keep({std::move(*made), prompt, true, shares}), reused};
}

int session_kind::keep(open_text t) {
  const int slot = t.text.slot();
  texts_[static_cast<std::size_t>(slot)] = std::move(t);
  return slot;
}

status session_kind::settle(open_text& t) {
  if (how_.mode == drop_mode::oneshot && t.whole && t.text.position() >= t.prompt) {
    if (status done = t.text.compress(); !done) return done;
    t.whole = false;
  }
  return t.text.settle();
}

// What is due goes here and not behind the step, so that the scheduler can answer if there is no room for it,
// and commit what is still whole.
result<int> session_kind::extend(int slot, int tokens) {
  open_text& t = at(slot);
  if (status done = settle(t); !done) return done.error();
  if (how_.mode == drop_mode::oneshot && t.whole) tokens = std::min(tokens, t.prompt - t.text.position());
  return t.text.extend(tokens);
}

status session_kind::commit(int slot, std::span<const token_id> text) {
  if (!at(slot).shares) return {};
  const auto done = at(slot).text.commit(text);
  return done ? status() : status(done.error());
}

// Dropping first saves a copy of what goes; if there is no room for it, both will do it.
result<int> session_kind::fork(int slot) {
  open_text& t = at(slot);
  (void)settle(t);
  auto copy = t.text.fork();
  if (!copy) return copy.error();
  return keep({std::move(*copy), t.prompt, t.whole, t.shares});
}

}  // namespace

result<std::unique_ptr<cache_kind>> make_session_kind(llama_model& model, const dropping& how,
                                                      const cache_config& config) {
  if (config.eviction != "lru") return cannot_run("unsupported", "eviction", config.eviction);
  if (status fit = check_together(how.policy, how.mode, config); !fit) return fit.error();
  auto cache = session_cache::create(config);
  if (!cache) return cache.error();
  return std::unique_ptr<cache_kind>(std::make_unique<session_kind>(model, how, config, std::move(*cache)));
}

}  // namespace engine
