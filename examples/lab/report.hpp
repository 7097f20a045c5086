// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a run showed: one JSON document with every setting, a table for people, and a plot of quality against
// the bytes really held.

#include <string>
#include <vector>

#include "matrix.hpp"

namespace lab {

/// Warnings a reader must see first: context shorter than asked, closed gates.
std::vector<std::string> warnings_of(const std::vector<matrix_group>& groups, const lab_options& options);

engine::result<engine::json> report_json(const std::vector<matrix_group>& groups,
                                         const std::vector<std::string>& warnings);

/// `report`: what report_json made.
std::string report_markdown(const engine::json& report);
std::string report_svg(const engine::json& report);

}  // namespace lab
