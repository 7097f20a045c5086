// SPDX-License-Identifier: Apache-2.0
#include "runner.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>

namespace engine {

status feed(llama_model& model, cache_kind& cache, int slot, std::span<const token_id> tokens, int chunk,
            observe which, const logits_observer& observer) {
  const auto vocabulary = static_cast<std::size_t>(model.shape().vocabulary);
  std::vector<float> logits;
  std::vector<int> wanted;
  while (!tokens.empty()) {
    const int position = cache.length(slot);
    const auto room = cache.extend(
        slot, static_cast<int>(std::min<std::size_t>(tokens.size(), static_cast<std::size_t>(chunk))));
    if (!room) return room.error();
    const int rows = *room;
    if (which == observe::all) {
      wanted.resize(static_cast<std::size_t>(rows));
      std::iota(wanted.begin(), wanted.end(), 0);
    } else if (static_cast<std::size_t>(rows) == tokens.size()) {
      wanted.assign(1, rows - 1);
    }
    logits.resize(wanted.size() * vocabulary);
    const step_segment segment{slot, position, rows};
    if (status s = model.forward(tokens.first(static_cast<std::size_t>(rows)), {&segment, 1}, wanted,
                                 cache.backend(), logits);
        !s)
      return s;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      observer(position + wanted[i], std::span<const float>(logits).subspan(i * vocabulary, vocabulary));
    }
    tokens = tokens.subspan(static_cast<std::size_t>(rows));
  }
  return {};
}

status choose_tokens(const generation_options& options, const std::function<bool(token_id)>& is_stop,
                     const std::function<void(token_id)>& on_token, const std::vector<float>& last,
                     const std::function<result<bool>(token_id)>& advance, generation& out) {
  splitmix64 random(options.how.seed);
  out.stop = "length";
  for (int made = 1; made <= options.max_new; ++made) {
    const token_id next = sample(last, options.how.temperature, random);
    out.ids.push_back(next);
    on_token(next);
    if (options.stop_at_end && is_stop(next)) {
      out.stop = "eos";
      return {};
    }
    if (made == options.max_new) return {};
    const auto advanced = advance(next);
    if (!advanced) return advanced.error();
    if (!*advanced) {
      out.stop = "context";
      return {};
    }
  }
  return {};
}

result<generation> generate(llama_model& model, cache_kind& cache, std::span<const token_id> prompt,
                            const cache_scope& scope, const generation_options& options,
                            const std::function<bool(token_id)>& is_stop,
                            const std::function<void(token_id)>& on_token, const logits_observer& observer) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto opened = cache.open(prompt, scope);
  if (!opened) return opened.error();
  const open_slot sequence(cache, opened->slot);
  generation out;
  out.reused = opened->reused;
  out.prefilled = static_cast<int>(prompt.size()) - opened->reused;
  std::vector<token_id> text(prompt.begin(), prompt.end());
  std::vector<float> last;
  const int predicts = static_cast<int>(prompt.size()) - 1;  // first position that produces a token
  const auto keep = [&](int position, std::span<const float> logits) {
    if (options.which == observe::all || (position >= predicts && options.max_new > 0))
      observer(position, logits);
    if (position >= predicts) last.assign(logits.begin(), logits.end());
  };
  const auto compute = [&](std::span<const token_id> tokens, observe which) {
    return feed(model, cache, sequence.slot(), tokens, options.chunk, which, keep);
  };
  if (status s = compute(prompt.subspan(static_cast<std::size_t>(out.reused)), options.which); !s)
    return s.error();
  out.prefill_seconds = seconds();
  const auto advance = [&](token_id next) -> result<bool> {
    if (cache.length(sequence.slot()) >= model.shape().kv.max_positions) return false;
    text.push_back(next);
    if (status s = compute({&next, 1}, observe::last); !s) return s.error();
    return true;
  };
  if (status s = choose_tokens(options, is_stop, on_token, last, advance, out); !s) return s.error();
  out.decode_seconds = seconds() - out.prefill_seconds;
  if (status s = cache.commit(sequence.slot(), text); !s) return s.error();
  out.bytes = cache.bytes();
  return out;
}

result<std::vector<double>> score(llama_model& model, cache_kind& cache, std::span<const token_id> ids,
                                  int chunk) {
  const auto opened = cache.open(ids, cache_scope::only("score"));
  if (!opened) return opened.error();
  const open_slot sequence(cache, opened->slot);
  std::vector<double> nll;
  const auto observer = [&](int position, std::span<const float> logits) {
    const std::size_t target = static_cast<std::size_t>(position) + 1;
    if (target < ids.size())
      nll.push_back(log_sum_exp(logits) - logits[static_cast<std::size_t>(ids[target])]);
  };
  const std::span<const token_id> rest = ids.subspan(static_cast<std::size_t>(opened->reused));
  if (status s = feed(model, cache, sequence.slot(), rest, chunk, observe::all, observer); !s)
    return s.error();
  return nll;
}

}  // namespace engine
