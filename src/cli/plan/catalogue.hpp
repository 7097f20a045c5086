// SPDX-License-Identifier: Apache-2.0
#pragma once

// Models by name. The facts are those of each model's own configuration file (`config.json` beside its
// weights); what its authors state as number of parameters stands beside them and is compared with what the
// facts give.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/architecture.hpp"

namespace kvcache::cli {

/// All models, families together.
std::span<const architecture> catalogue();

/// The model of that name; letters of either case, with or without punctuation, vendor ("meta-llama/") and
/// endings such as -Instruct, -hf. Null if there is none.
const architecture* find_model(std::string_view name);

/// Names like `name`, the nearest first; at most three, none if nothing is near.
std::vector<std::string> near_names(std::string_view name);

}  // namespace kvcache::cli
