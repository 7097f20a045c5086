// SPDX-License-Identifier: Apache-2.0
#pragma once

// Two kinds of drawings as SVG: lines, and bars that are made of parts. Lines are
// labelled where they end, drawn in colours that colour-blind readers tell apart, and differ in marks too.
// Colours follow the reader's light or dark scheme. The same input gives the same bytes.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kvcache::cli {

/// How large, and whether the drawing brings its own style: it does as a file, and does not inside a page
/// that has `svg_style`.
struct drawing {
  double width = 760;
  double height = 420;
  bool own_style = true;
};

/// A point of a line. x > 0 where the axis is logarithmic.
struct svg_point {
  double x = 0, y = 0;
};

/// One line, or marks alone.
struct svg_line {
  std::string name;               ///< empty: it has no label
  std::vector<svg_point> points;  ///< x rising
  int colour = 0;                 ///< 0: that of text; from 1 on: of the palette
  bool joined = true;
  bool marked = true;
  bool dashed = false;
};

/// A label under the axis, of one or two lines.
struct svg_tick {
  double x = 0;
  std::string text, second;
};

/// Lines; y from 0.
struct line_chart {
  std::string title;            ///< what it shows, also for those who hear it
  std::string x_title;          ///< under the axis
  std::string y_title;          ///< above the axis
  double from = 1, to = 2;      ///< of x
  bool logarithmic = true;      ///< on x
  double most = 100;            ///< largest y
  std::vector<svg_tick> ticks;  ///< on x
  std::vector<svg_line> lines;
};

/// Bars from the left, made of parts.
struct bar_chart {
  struct part {
    std::string name;
    int colour = 1;  ///< as in svg_line; -1: faint
  };
  struct bar {
    std::string name;
    std::vector<double> parts;  ///< one for each in `parts`; none below 0
    std::string text;           ///< behind it
  };
  std::string title;
  std::string x_title;
  double most = 100;
  std::vector<part> parts;
  std::vector<bar> bars;
};

/// Draws lines.
std::string draw(const line_chart& chart, const drawing& how);
/// Draws bars, as high as they need.
std::string draw(const bar_chart& chart, const drawing& how);

/// The style that drawings need, for the <style> of a page.
std::string svg_style();

/// Text for XML: escaped, bytes that are not UTF-8 and characters that XML has not replaced by U+FFFD.
std::string escaped(std::string_view text);

/// A step for ticks: 1, 2 or 5 times a power of ten, at most `count` of them up to `most`.
double round_step(double most, int count);

}  // namespace kvcache::cli
