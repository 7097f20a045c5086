// SPDX-License-Identifier: Apache-2.0
#include "session_bench.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "kvcache/quant/sizes.hpp"
#include "observed.hpp"
#include "packed_blocks.hpp"
#include "random_choice.hpp"

namespace lab {
namespace {

using engine::result;
using engine::session;

// Prefilled text, a copy under a policy, and a copy of that for an option of a forced choice.
constexpr int texts_at_a_time = 3;

class session_subject : public subject {
 public:
  session_subject(std::shared_ptr<engine::session_cache> cache, session held, mode how, int batch,
                  const engine::model_shape& shape)
      : cache_(std::move(cache)),
        session_(std::move(held)),
        mode_(how),
        batch_(batch),
        vocabulary_(shape.vocabulary),
        heads_(static_cast<std::size_t>(shape.kv.layers) * static_cast<std::size_t>(shape.kv.kv_heads)) {}

  engine::status feed(std::span<const token_id> tokens, std::vector<float>* rows) override {
    if (tokens.empty()) return {};
    if (rows != nullptr && batch_ > 1) return feed_among_others(tokens, *rows);
    auto logits = session_.feed(tokens, rows != nullptr ? engine::observe::all : engine::observe::last);
    if (!logits) return logits.error();
    if (rows != nullptr) *rows = std::move(*logits);
    return {};
  }
  engine::status compress() override { return session_.compress(); }

  result<std::unique_ptr<subject>> fork(const std::string& policy) override {
    if (policy.empty()) return made(session_.fork());
    const auto parsed = parse_lab_policy(policy);
    if (!parsed) return parsed.error();
    if (!shelf_) shelf_ = std::make_shared<observation_shelf>(heads_);
    return made(session_.fork_as(shelf_->share(parsed->keep), engine::drop_mode::oneshot));
  }

  std::size_t bytes_held() const override { return session_.bytes_held(); }
  std::size_t bytes_full() const override { return session_.bytes_full(); }
  std::size_t values_held() const override { return session_.values_kept(); }
  std::size_t bytes_state() const override {
    return mode_ == mode::stream ? session_.bytes_state() : 0;  // a policy that has acted remembers nothing
  }

  /// A fork of `from`.
  session_subject(const session_subject& from, session held)
      : cache_(from.cache_),
        shelf_(from.shelf_),
        session_(std::move(held)),
        mode_(from.mode_),
        batch_(from.batch_),
        vocabulary_(from.vocabulary_),
        heads_(from.heads_) {}

 private:
  result<std::unique_ptr<subject>> made(result<session> forked) const {
    if (!forked) return forked.error();
    auto out = std::make_unique<session_subject>(*this, std::move(*forked));
    return std::unique_ptr<subject>(std::move(out));
  }

  // Token by token, in steps shared with forks of this text that go on with other tokens.
  engine::status feed_among_others(std::span<const token_id> tokens, std::vector<float>& rows) {
    std::vector<session> others;
    std::vector<session*> all = {&session_};
    others.reserve(static_cast<std::size_t>(batch_ - 1));
    for (int i = 1; i < batch_; ++i) {
      auto forked = session_.fork();
      if (!forked) return forked.error();
      others.push_back(std::move(*forked));
      all.push_back(&others.back());
    }
    std::vector<float> logits;
    std::vector<token_id> step(all.size());
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      for (std::size_t i = 0; i < all.size(); ++i) step[i] = tokens[(row + i) % tokens.size()];
      if (auto s = session::advance(all, step, logits); !s) return s;
      rows.insert(rows.end(), logits.begin(), logits.begin() + vocabulary_);
    }
    return {};
  }

  std::shared_ptr<engine::session_cache> cache_;
  std::shared_ptr<observation_shelf> shelf_;  ///< of this text and its forks
  session session_;
  mode mode_;
  int batch_;
  int vocabulary_;
  std::size_t heads_;  ///< kv heads of all layers
};

}  // namespace

result<engine::cache_policy> parse_lab_policy(const std::string& text) {
  random_choice lot;
  unsigned long long seed = 0;
  int used = 0;
  const int found = std::sscanf(text.c_str(), "random:capacity=%d,seed=%llu%n", &lot.capacity, &seed, &used);
  if (found == 2 && used == static_cast<int>(text.size()) && lot.capacity > 0) {
    lot.seed = seed;
    engine::cache_policy out;
    out.keep.policy = lot;
    return out;
  }
  auto parsed = engine::parse_cache_policy(text);
  if (parsed) return parsed;
  engine::error e = parsed.error();
  e.kind = engine::failure::usage;
  return e;
}

result<std::string> check_policy(const std::string& text) {
  const auto parsed = parse_lab_policy(text);
  if (!parsed) return parsed.error();
  return text.rfind("random:", 0) == 0 ? text : engine::policy_text(*parsed);
}

bool session_bench::forks(const std::string& policy) const {
  const auto parsed = parse_lab_policy(policy);
  return !parsed || !parsed->packs();
}

// At 1,024 tokens, as figures of formats are compared.
double session_bench::sealed_bits(const std::string& policy) const {
  constexpr int tokens = 1024;
  const auto parsed = parse_lab_policy(policy);
  if (!parsed || !parsed->packs()) return 0;
  engine::cache_config config;
  config.shape = parts_.model->shape().kv;
  config.type = engine::kv_type_of(options_.type);
  return kvcache::bits_per_value(parsed->format, engine::group_of(config), options_.block_size, tokens);
}

std::size_t session_bench::values_per_token() const {
  const engine::kv_shape& shape = parts_.model->shape().kv;
  return std::size_t(2) * static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.kv_heads) *
         static_cast<std::size_t>(shape.head_dim);
}

result<std::unique_ptr<subject>> session_bench::open(const std::string& policy, mode how, int max_tokens) {
  const auto parsed = parse_lab_policy(policy);
  if (!parsed) return parsed.error();
  if (max_tokens > parts_.model->shape().kv.max_positions)
    return engine::bad_input("too_long", "trial.tokens", std::to_string(max_tokens));
  const bool packs = parsed->packs();
  const auto cache =
      room_for(packs ? parsed->format : kvcache::kv_format{}, packs && how == mode::oneshot, max_tokens);
  if (!cache) return cache.error();
  engine::session_options options;
  options.mode = how == mode::stream ? engine::drop_mode::stream : engine::drop_mode::oneshot;
  options.chunk = options_.chunk;
  options.remember = how == mode::oneshot && !packs;
  auto opened = session::create(*parts_.model, **cache, parsed->keep, options);
  if (!opened) return opened.error();
  return std::unique_ptr<subject>(
      std::make_unique<session_subject>(*cache, std::move(*opened), how, batch_, parts_.model->shape()));
}

result<std::shared_ptr<engine::session_cache>> session_bench::room_for(const kvcache::kv_format& format,
                                                                       bool deferred, int max_tokens) {
  room& at = kvcache::lossy(format) ? packed_ : exact_;
  if (at.cache && max_tokens <= at.tokens && at.format == format && at.deferred == deferred) return at.cache;
  engine::cache_config config;
  config.shape = parts_.model->shape().kv;
  config.type = engine::kv_type_of(options_.type);
  config.block_size = options_.block_size;
  config.max_sequences = texts_at_a_time + batch_ - 1;
  config.max_tokens = max_tokens;
  config.pool = &parts_.pool;
  config.step_tokens = std::max(options_.chunk, batch_);
  config.deferred = deferred;
  if (kvcache::lossy(format)) config.formats = {format};
  at = {};
  auto made = engine::session_cache::create(config);
  if (!made) return made.error();
  at = {format, deferred, max_tokens, std::move(*made)};
  return at.cache;
}

}  // namespace lab
