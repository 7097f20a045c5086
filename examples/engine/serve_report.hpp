// SPDX-License-Identifier: Apache-2.0
#pragma once

// What engine_serve reports of its runs: a document, a list of answers, and a table with a column per run.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "program.hpp"
#include "scheduler.hpp"

namespace engine {

/// A cache kind, what it was asked to do and how it went.
struct serving {
  std::string kind;
  int sequences = 0;
  std::optional<dropping> policy;
  std::unique_ptr<cache_kind> cache;
  std::unique_ptr<engine::scheduler> scheduler;
  cache_counts counts;  ///< at the end; the cache itself is gone by then
  double seconds = 0;

  std::size_t pool_bytes() const {
    return static_cast<std::size_t>(counts.blocks_total) * counts.block_bytes;
  }
};

json to_json(const serving& s, const tokenizer& text);

/// The answers in which the runs differ, as indices.
std::vector<std::size_t> differences(const std::vector<serving>& runs);

/// A line for each answer.
void print_answers(const serving& s, const tokenizer& text);

/// `different`: see differences().
void print_table(const std::vector<serving>& runs, const std::vector<std::size_t>& different);

}  // namespace engine
