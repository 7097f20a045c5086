// SPDX-License-Identifier: Apache-2.0
#pragma once

// The example engine on the library's paged cache, as the lab's bench. Policies are text (`full`,
// `h2o:heavy=64,recent=64`, `kv4`, ... as parse_cache_policy reads it) or one of the controls the lab brings
// along:
//
//   random:capacity=160,seed=7     so many tokens per head, chosen by lot
//
// Where a format packs blocks, the text has planes of its own: it is computed anew, not forked.

#include <memory>
#include <string>

#include "program.hpp"
#include "score.hpp"
#include "session.hpp"

namespace lab {

/// Reads a policy, a format, both, or a control. Fails: usage "bad_policy" or "bad_format", naming the key
/// and what is allowed.
engine::result<engine::cache_policy> parse_lab_policy(const std::string& text);

/// Checks the text and writes it in full. Fails: as parse_lab_policy.
engine::result<std::string> check_policy(const std::string& text);

/// A session per text, one cache for all. The model must outlive the bench.
class session_bench : public bench {
 public:
  /// `batch`: texts that share each step in which answers are fed; the others are forks that go another way.
  session_bench(const engine::common_options& options, engine::loaded& parts, int batch)
      : options_(options), parts_(parts), batch_(batch) {}

  int vocabulary() const override { return parts_.model->shape().vocabulary; }
  std::size_t values_per_token() const override;
  std::size_t bytes_per_token() const override {
    return values_per_token() * (options_.type == "f32" ? 4 : 2);
  }
  int block_tokens() const override { return options_.block_size; }
  bool forks(const std::string& policy) const override;
  double sealed_bits(const std::string& policy) const override;
  void each(int n, const std::function<void(int)>& body) override {
    parts_.pool.parallel_for(n, [&](int i, int) { body(i); });
  }
  engine::result<std::unique_ptr<subject>> open(const std::string& policy, mode how, int max_tokens) override;

 private:
  // Memory of texts that are stored in one way.
  struct room {
    kvcache::kv_format format{};
    bool deferred = false;
    int tokens = 0;  ///< of the longest text
    std::shared_ptr<engine::session_cache> cache;
  };
  engine::result<std::shared_ptr<engine::session_cache>> room_for(const kvcache::kv_format& format,
                                                                  bool deferred, int max_tokens);

  const engine::common_options& options_;
  engine::loaded& parts_;
  int batch_;
  room exact_, packed_;  ///< the latter for the last format asked for
};

}  // namespace lab
