// SPDX-License-Identifier: Apache-2.0
#include "plot.hpp"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>

#include "example.hpp"

namespace engine {
namespace {

constexpr double left = 84;
constexpr double right = 590;
constexpr double top = 56;
constexpr double bottom = 380;
constexpr int width = 760;
constexpr int height = 460;

[[gnu::format(printf, 2, 3)]] void add(std::string& out, const char* format, ...) {
  char part[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(part, sizeof part, format, arguments);
  va_end(arguments);
  out += part;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else {
      out += c;
    }
  }
  return out;
}

// The smallest of 1, 2, 5, 10, 20, ... that divides `range` into at most `most` steps.
double round_step(double range, int most) {
  double power = std::pow(10.0, std::floor(std::log10(range / most)));
  for (;; power *= 10) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      if (range / (power * factor) <= most) return power * factor;
    }
  }
}

struct axes {
  double x_end, y_end;
  double x(double v) const { return left + (right - left) * v / x_end; }
  double y(double v) const { return bottom - (bottom - top) * v / y_end; }
};

void draw_axes(std::string& out, const plot_text& text, const axes& a) {
  const double y_step = round_step(a.y_end, 6);
  for (double v = 0; v <= a.y_end * 1.0001; v += y_step) {
    add(out, "<line x1=\"%g\" y1=\"%.1f\" x2=\"%g\" y2=\"%.1f\" stroke=\"#dddddd\"/>\n", left, a.y(v), right,
        a.y(v));
    add(out, "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", left - 8, a.y(v) + 4,
        thousands(std::llround(v)).c_str());
  }
  const double x_step = std::max(1.0, round_step(a.x_end, 10));
  for (double v = 0; v <= a.x_end * 1.0001; v += x_step) {
    add(out, "<line x1=\"%.1f\" y1=\"%g\" x2=\"%.1f\" y2=\"%g\" stroke=\"#333333\"/>\n", a.x(v), bottom,
        a.x(v), bottom + 5);
    add(out, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%.0f</text>\n", a.x(v), bottom + 20, v);
  }
  add(out, "<path d=\"M%g %gV%gH%g\" fill=\"none\" stroke=\"#333333\"/>\n", left, top, bottom, right);
  const double middle = (left + right) / 2;
  out += "<text x=\"" + std::to_string(width / 2) + "\" y=\"28\" text-anchor=\"middle\" font-size=\"16\">" +
         escaped(text.title) + "</text>\n";
  add(out, "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">", middle, bottom + 44);
  out += escaped(text.x) + "</text>\n";
  add(out, "<text transform=\"translate(20 %g) rotate(-90)\" text-anchor=\"middle\">", (top + bottom) / 2);
  out += escaped(text.y) + "</text>\n";
  add(out, "<text x=\"%g\" y=\"%d\" text-anchor=\"middle\" font-size=\"12\" fill=\"#555555\">", middle,
      height - 14);
  out += escaped(text.note) + "</text>\n";
}

void draw_line(std::string& out, const plot_line& line, const axes& a) {
  out += "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" + line.colour + "\" points=\"";
  for (std::size_t i = 0; i < line.y.size(); ++i)
    add(out, "%.1f,%.1f ", a.x(static_cast<double>(i + 1)), a.y(line.y[i]));
  out += "\"/>\n";
  for (std::size_t i = 0; i < line.y.size(); ++i) {
    const bool ring = i < line.hollow.size() && line.hollow[i];
    add(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" ", a.x(static_cast<double>(i + 1)), a.y(line.y[i]));
    out += "stroke=\"" + line.colour + "\" fill=\"" + (ring ? "#ffffff" : line.colour) + "\"/>\n";
  }
  add(out, "<text x=\"%.1f\" y=\"%.1f\" fill=\"", a.x(static_cast<double>(line.y.size())) + 12,
      a.y(line.y.back()) + 4);
  out += line.colour + "\">" + escaped(line.name) + "</text>\n";
}

}  // namespace

std::string svg_plot(const plot_text& text, std::span<const plot_line> lines) {
  axes a{1, 1};
  for (const plot_line& line : lines) {
    a.x_end = std::max(a.x_end, static_cast<double>(line.y.size()));
    a.y_end = std::max(a.y_end, *std::max_element(line.y.begin(), line.y.end()));
  }
  const double step = round_step(a.y_end, 6);
  a.y_end = std::ceil(a.y_end / step) * step;
  std::string out;
  add(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" ",
      width, height, width, height);
  out += "font-family=\"sans-serif\" font-size=\"13\" fill=\"#222222\">\n";
  out += "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n";
  draw_axes(out, text, a);
  for (const plot_line& line : lines) draw_line(out, line, a);
  return out + "</svg>\n";
}

}  // namespace engine
