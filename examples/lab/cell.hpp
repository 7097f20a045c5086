// SPDX-License-Identifier: Apache-2.0
#pragma once

// One policy in one task, and whether two such results may be compared.

#include <string>

#include "matrix.hpp"

namespace lab {

/// The document of one cell: figures with intervals, the gate, every setting, the trials. With `controls`
/// also no-context, window and random rows, and how the policy compares with them.
engine::result<engine::json> run_cell(const lab_options& options, const laboratory& lab,
                                      const std::string& policy, const std::string& task, int length,
                                      bool controls, bench& where);

/// Two cells' documents: the difference in the measure of their task. Fails: bad_input "not_comparable"
/// naming the first setting that differs; "bad_type" for a file that is no cell.
engine::result<engine::json> compare_cells(const engine::json& a, const engine::json& b);

}  // namespace lab
