// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a study shows, as drawings.

#include <array>
#include <vector>

#include "replay/study.hpp"
#include "report/svg.hpp"

namespace kvcache::cli {

/// One drawing of a study.
struct plot {
  const char* file = "";  ///< name without ending
  std::string title;
  std::string caption;  ///< how to read it
  std::string wide;     ///< SVG for a page or a file
  std::string narrow;   ///< the same for a telephone; empty for files
};

/// The names of all of them, in order.
inline constexpr std::array plot_files{"hit_rate", "losses", "over_time", "reuse_distance"};

/// Every drawing: as files of their own, or for a page that has `svg_style`.
std::vector<plot> plots_of(const study& s, bool as_files);

}  // namespace kvcache::cli
