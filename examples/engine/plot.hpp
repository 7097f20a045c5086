// SPDX-License-Identifier: Apache-2.0
#pragma once

// A line plot as an SVG document: axes from zero with round ticks, lines named where they end.

#include <span>
#include <string>
#include <vector>

namespace engine {

/// One line: values at x = 1, 2, 3, ...
struct plot_line {
  std::string name;
  std::string colour;        ///< as SVG has it: "#0072b2"
  std::vector<double> y;     ///< not negative
  std::vector<bool> hollow;  ///< points drawn as rings; empty: none
};

struct plot_text {
  std::string title;
  std::string x;
  std::string y;
  std::string note;  ///< below the plot; may be empty
};

/// Requires: at least one line with at least one point.
std::string svg_plot(const plot_text& text, std::span<const plot_line> lines);

}  // namespace engine
