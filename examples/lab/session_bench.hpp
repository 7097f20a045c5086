// SPDX-License-Identifier: Apache-2.0
#pragma once

// The example engine on the library's paged cache, as the lab's bench. Policies are text (`full`,
// `h2o:heavy=64,recent=64`, ... as parse_policy reads it) or one of the controls the lab brings along:
//
//   random:capacity=160,seed=7     so many tokens per head, chosen by lot

#include <memory>
#include <string>

#include "program.hpp"
#include "score.hpp"
#include "session.hpp"

namespace lab {

/// Reads a policy or a control. Fails: usage "bad_policy", naming the key and what is allowed.
engine::result<kvcache::retention> parse_lab_policy(const std::string& text);

/// Checks the text and writes it in full. Fails: usage "bad_policy", naming the key and what is allowed.
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
  void each(int n, const std::function<void(int)>& body) override {
    parts_.pool.parallel_for(n, [&](int i, int) { body(i); });
  }
  engine::result<std::unique_ptr<subject>> open(const std::string& policy, mode how, int max_tokens) override;

 private:
  const engine::common_options& options_;
  engine::loaded& parts_;
  int batch_;
  int room_ = 0;  ///< tokens of the longest text that cache_ takes
  std::shared_ptr<engine::session_cache> cache_;
};

}  // namespace lab
