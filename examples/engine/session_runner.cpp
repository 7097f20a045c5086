// SPDX-License-Identifier: Apache-2.0
#include "session_runner.hpp"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

namespace engine {

std::string policy_text(const dropping& how) {
  return policy_text(cache_policy{how.policy, how.format});
}

result<kept_generation> generate(llama_model& model, session_cache& cache, const dropping& how,
                                 std::span<const token_id> prompt, const cache_scope& scope, kv_type type,
                                 const generation_options& options,
                                 const std::function<bool(token_id)>& is_stop,
                                 const std::function<void(token_id)>& on_token,
                                 const logits_observer& observer) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  session_options with;
  with.mode = how.mode;
  with.chunk = options.chunk;
  with.scope = scope;
  with.prompt = prompt;
  auto made = session::create(model, cache, how.policy, with);
  if (!made) return made.error();
  session s = std::move(*made);
  kept_generation out;
  out.reused = s.reused();
  out.prefilled = static_cast<int>(prompt.size()) - out.reused;
  std::vector<token_id> text(prompt.begin(), prompt.end());
  std::vector<float> last;
  const auto vocabulary = static_cast<std::size_t>(model.shape().vocabulary);
  const auto compute = [&](std::span<const token_id> tokens, observe which) -> status {
    const int first =
        which == observe::all ? s.position() : s.position() + static_cast<int>(tokens.size()) - 1;
    const auto logits = s.feed(tokens, which);
    if (!logits) return logits.error();
    const std::span<const float> rows(*logits);
    const std::size_t n = rows.size() / vocabulary;
    for (std::size_t i = 0; i < n; ++i) {
      if (options.which == observe::all || options.max_new > 0)
        observer(first + static_cast<int>(i), rows.subspan(i * vocabulary, vocabulary));
    }
    last.assign(rows.end() - static_cast<std::ptrdiff_t>(vocabulary), rows.end());
    return {};
  };
  if (status done = compute(prompt.subspan(static_cast<std::size_t>(out.reused)), options.which); !done)
    return done.error();
  if (how.mode == drop_mode::oneshot) {
    if (status done = s.compress(); !done) return done.error();
  }
  out.prefill_seconds = seconds();
  const auto advance = [&](token_id next) -> result<bool> {
    if (s.position() >= model.shape().kv.max_positions) return false;
    text.push_back(next);
    if (status done = compute({&next, 1}, observe::last); !done) return done.error();
    return true;
  };
  if (status done = choose_tokens(options, is_stop, on_token, last, advance, out); !done) return done.error();
  out.decode_seconds = seconds() - out.prefill_seconds;
  if (const auto indexed = s.commit(text); !indexed) return indexed.error();
  out.dropped = s.dropped();
  out.bytes = {s.values_kept() * (type == kv_type::f32 ? 4u : 2u), s.bytes_held()};
  return out;
}

result<std::vector<double>> score(llama_model& model, session_cache& cache, const dropping& how,
                                  std::span<const token_id> ids, int chunk) {
  session_options with;
  with.mode = drop_mode::stream;
  with.chunk = chunk;
  auto made = session::create(model, cache, how.policy, with);
  if (!made) return made.error();
  const auto vocabulary = static_cast<std::size_t>(model.shape().vocabulary);
  std::vector<double> nll;
  while (nll.size() + 1 < ids.size()) {
    const std::size_t first = nll.size();
    const std::size_t rows = std::min(ids.size() - 1 - first, static_cast<std::size_t>(chunk));
    const auto logits = made->feed(ids.subspan(first, rows));
    if (!logits) return logits.error();
    for (std::size_t row = 0; row < rows; ++row) {
      const auto at = std::span<const float>(*logits).subspan(row * vocabulary, vocabulary);
      nll.push_back(log_sum_exp(at) - double{at[static_cast<std::size_t>(ids[first + row + 1])]});
    }
  }
  return nll;
}

}  // namespace engine
