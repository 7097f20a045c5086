// SPDX-License-Identifier: Apache-2.0
#pragma once

// The options of `kvcache replay`, as they were written and as they are meant.

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "replay/study.hpp"

namespace kvcache::cli {

/// As they were written; read when the command runs, so that errors are ours.
struct replay_arguments {
  std::vector<std::string> files;
  std::string policies = "lru", capacities, ttls, workers = "1", routes = "round_robin", seed, sample;
  std::string plot, html, model, kv = "f16", block, ids = "automatic", session_gap = "0";
  bool curve = false, no_optimum = false;
};

/// Reads them. Fails: error (usage) naming option, value and what would be right. Capacities are checked
/// here as far as that goes without the trace.
study_request read_arguments(const CLI::App& app, const replay_arguments& o);

}  // namespace kvcache::cli
