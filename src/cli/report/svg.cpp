// SPDX-License-Identifier: Apache-2.0
#include "report/svg.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "output.hpp"

namespace kvcache::cli {
namespace {

// After Okabe and Ito, "Color Universal Design" (2008): told apart with any kind of colour vision.
constexpr std::array light{"#0072b2", "#c04f00", "#007a59", "#a0457a",
                           "#8f6200", "#2b7fa8", "#7a5195", "#5f5f00"};
constexpr std::array dark{"#4fa8e0", "#ff8f4d", "#2fd0a0", "#e59ac4",
                          "#f0b429", "#8ad0f7", "#c2a5e8", "#d8d84a"};
constexpr int colours = static_cast<int>(light.size());

constexpr double letter = 6.7;  // of text of 12 px, on average
constexpr double line_height = 16;

std::string number(double x) {
  std::string out = number_text(x, 1);
  if (out.ends_with(".0")) out.resize(out.size() - 2);
  return out == "-0" ? "0" : out;
}

std::string colour_class(int colour) {
  if (colour < 0) return "faint";
  return colour == 0 ? "plain" : concat({"c", std::to_string((colour - 1) % colours + 1)});
}

double width_of(std::string_view text) {
  std::size_t letters = 0;
  for (const char c : text) letters += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return letter * static_cast<double>(letters);
}

std::string element(const char* kind, const std::string& attributes) {
  return concat({"<", kind, " ", attributes, "/>\n"});
}

std::string text_at(double x, double y, const char* anchor, const std::string& text, const char* more = "") {
  return concat({"<text x=\"", number(x), "\" y=\"", number(y), "\" text-anchor=\"", anchor, "\"", more, ">",
                 escaped(text), "</text>\n"});
}

std::string segment(double x1, double y1, double x2, double y2, const std::string& classes) {
  return element("line", concat({"x1=\"", number(x1), "\" y1=\"", number(y1), "\" x2=\"", number(x2),
                                 "\" y2=\"", number(y2), "\" class=\"", classes, "\""}));
}

std::string begin(const std::string& title, double width, double height, const drawing& how) {
  const std::string w = number(width), h = number(height);
  std::string out =
      concat({"<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", w, " ", h, "\" width=\"", w,
              "\" height=\"", h, "\" role=\"img\" class=\"plot\">\n<title>", escaped(title), "</title>\n"});
  if (how.own_style) {
    out += concat({"<style>\n", svg_style(), "</style>\n",
                   element("rect", "width=\"100%\" height=\"100%\" class=\"ground\"")});
  }
  return out;
}

// Marks differ in form, so that colour is not all there is.
std::string mark(double x, double y, int colour) {
  const std::string c = concat({"class=\"", colour_class(colour), " mark\""});
  const auto at = [](double px, double py) { return concat({number(px), ",", number(py), " "}); };
  switch ((colour + std::max(colour - 1, 0) / colours) % 4) {
    case 1:
      return element("circle", concat({"cx=\"", number(x), "\" cy=\"", number(y), "\" r=\"4\" ", c}));
    case 2:
      return element("rect", concat({"x=\"", number(x - 3.5), "\" y=\"", number(y - 3.5),
                                     "\" width=\"7\" height=\"7\" ", c}));
    case 3:
      return element("polygon",
                     concat({"points=\"", at(x, y - 5), at(x + 5, y + 4), at(x - 5, y + 4), "\" ", c}));
    default:
      return element("polygon",
                     concat({"points=\"", at(x, y - 5), at(x + 5, y), at(x, y + 5), at(x - 5, y), "\" ", c}));
  }
}

struct label {
  double y;  ///< where its line ends
  const svg_line* of;
};

class line_drawing {
 public:
  line_drawing(const line_chart& chart, const drawing& how);
  std::string text();

 private:
  double x(double value) const {
    const double share = chart_.logarithmic
                             ? std::log(value / chart_.from) / std::log(chart_.to / chart_.from)
                             : (value - chart_.from) / (chart_.to - chart_.from);
    return left_ + std::clamp(share, 0.0, 1.0) * (right_ - left_);
  }
  double y(double value) const {
    return bottom_ - std::clamp(value / top_value_, 0.0, 1.0) * (bottom_ - top_);
  }
  std::string axes() const;
  std::string ticks() const;
  std::string line(const svg_line& l) const;
  /// A mark alone that stands far from the right: its label stands at it.
  bool alone(const svg_line& l) const {
    return beside_ && !l.name.empty() && l.points.size() == 1 &&
           x(l.points[0].x) + width_of(l.name) < right_ - 20;
  }
  std::string labels() const;
  std::string legend() const;

  const line_chart& chart_;
  const drawing& how_;
  double step_, top_value_;
  double left_ = 44, right_, top_ = 34, bottom_, height_;
  bool beside_;  ///< labels stand beside the lines' ends
};

line_drawing::line_drawing(const line_chart& chart, const drawing& how)
    : chart_(chart),
      how_(how),
      step_(round_step(std::max(chart.most, 1e-9), 6)),
      top_value_(step_ * std::ceil(std::max(chart.most, 1e-9) / step_ - 1e-9)) {
  double longest = 0, named = 0;
  for (const svg_line& l : chart.lines) {
    longest = std::max(longest, width_of(l.name));
    named += l.name.empty() ? 0 : 1;
  }
  beside_ = longest + 34 < 0.36 * how.width;
  right_ = how.width - (beside_ ? longest + 34 : 14);
  bottom_ = how.height - 62;
  height_ = how.height + (beside_ ? 0 : line_height * named + 8);
}

std::string line_drawing::axes() const {
  std::string out = text_at(left_ - 36, top_ - 14, "start", chart_.y_title, " class=\"strong\"");
  for (double v = 0; v <= top_value_ * 1.0001; v += step_) {
    out += segment(left_, y(v), right_, y(v), v == 0 ? "axis" : "grid");
    out += text_at(left_ - 6, y(v) + 4, "end", number_text(v, step_ < 1 ? 1 : 0));
  }
  return out + text_at((left_ + right_) / 2, how_.height - 10, "middle", chart_.x_title, " class=\"strong\"");
}

// As many as there is room for, evenly.
std::string line_drawing::ticks() const {
  double widest = 20;
  for (const svg_tick& t : chart_.ticks) widest = std::max({widest, width_of(t.text), width_of(t.second)});
  const double room = (right_ - left_) / std::max<double>(1, static_cast<double>(chart_.ticks.size()));
  const auto every = static_cast<std::size_t>(std::max(1.0, std::ceil((widest + 12) / std::max(room, 1.0))));
  std::string out;
  for (std::size_t i = 0; i < chart_.ticks.size(); i += every) {
    const svg_tick& t = chart_.ticks[i];
    out += segment(x(t.x), bottom_, x(t.x), bottom_ + 4, "axis");
    out += text_at(x(t.x), bottom_ + 18, "middle", t.text);
    if (!t.second.empty()) out += text_at(x(t.x), bottom_ + 33, "middle", t.second, " class=\"soft\"");
  }
  return out;
}

std::string line_drawing::line(const svg_line& l) const {
  std::string out;
  if (l.joined && l.points.size() > 1) {
    out += "<polyline points=\"";
    for (const svg_point& p : l.points) out += concat({number(x(p.x)), ",", number(y(p.y)), " "});
    out += concat({"\" class=\"", colour_class(l.colour), l.dashed ? " line dashed" : " line", "\"/>\n"});
  }
  if (l.marked) {
    for (const svg_point& p : l.points) out += mark(x(p.x), y(p.y), l.colour);
  }
  if (alone(l)) {
    out += text_at(x(l.points[0].x) + 9, y(l.points[0].y) + 4, "start", l.name,
                   concat({" class=\"", colour_class(l.colour), " name\""}).c_str());
  }
  return out;
}

// Beside the ends of the lines, moved apart where they would lie on each other.
std::string line_drawing::labels() const {
  std::vector<label> all;
  for (const svg_line& l : chart_.lines) {
    if (!l.points.empty() && !l.name.empty() && !alone(l)) all.push_back({y(l.points.back().y), &l});
  }
  std::stable_sort(all.begin(), all.end(), [](const label& a, const label& b) { return a.y < b.y; });
  std::vector<double> at;
  for (const label& l : all) {
    at.push_back(std::max(l.y, at.empty() ? top_ : at.back() + line_height));
  }
  double limit = bottom_ + 4;
  for (std::size_t i = at.size(); i-- > 0; limit -= line_height) at[i] = std::min(at[i], limit);
  std::string out;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const svg_line& l = *all[i].of;
    const std::string c = colour_class(l.colour);
    out += segment(x(l.points.back().x) + 6, all[i].y, right_ + 22, at[i], c + " lead");
    out += text_at(right_ + 26, at[i] + 4, "start", l.name, concat({" class=\"", c, " name\""}).c_str());
  }
  return out;
}

// Under the drawing, where there is no room beside it.
std::string line_drawing::legend() const {
  std::string out;
  double at = how_.height + 8;
  for (const svg_line& l : chart_.lines) {
    if (l.name.empty()) continue;
    const std::string c = colour_class(l.colour);
    if (l.joined)
      out += segment(left_, at - 4, left_ + 26, at - 4, c + (l.dashed ? " line dashed" : " line"));
    if (l.marked) out += mark(left_ + 13, at - 4, l.colour);
    out += text_at(left_ + 34, at, "start", l.name, concat({" class=\"", c, " name\""}).c_str());
    at += line_height;
  }
  return out;
}

std::string line_drawing::text() {
  std::string out = begin(chart_.title, how_.width, height_, how_) + axes() + ticks();
  for (const svg_line& l : chart_.lines) out += line(l);
  out += beside_ ? labels() : legend();
  return out + "</svg>\n";
}

// ---- bars

constexpr double bar_height = 16, bar_step = 24;

class bar_drawing {
 public:
  bar_drawing(const bar_chart& chart, const drawing& how);
  std::string text() const;

 private:
  double x(double value) const { return left_ + value / top_value_ * (right_ - left_); }
  std::string legend() const;
  std::string axis() const;
  std::string bar(const bar_chart::bar& b, double at) const;

  const bar_chart& chart_;
  const drawing& how_;
  double step_, top_value_;
  double left_, right_, top_, pitch_;
  bool above_;  ///< names stand above their bars
};

bar_drawing::bar_drawing(const bar_chart& chart, const drawing& how)
    : chart_(chart),
      how_(how),
      step_(round_step(std::max(chart.most, 1e-9), 5)),
      top_value_(step_ * std::ceil(std::max(chart.most, 1e-9) / step_ - 1e-9)) {
  double longest = 0, behind = 0;
  for (const bar_chart::bar& b : chart.bars) {
    longest = std::max(longest, width_of(b.name));
    behind = std::max(behind, width_of(b.text));
  }
  above_ = longest > 0.4 * how.width;
  left_ = above_ ? 10 : longest + 14;
  right_ = how.width - behind - 16;
  pitch_ = bar_step + (above_ ? line_height : 0);
  top_ = chart.parts.size() > 1 ? 12 + line_height * static_cast<double>(chart.parts.size()) : 12;
}

std::string bar_drawing::legend() const {
  if (chart_.parts.size() < 2) return {};
  std::string out;
  double at = 14;
  for (const bar_chart::part& p : chart_.parts) {
    out += element("rect", concat({"x=\"10\" y=\"", number(at - 10), "\" width=\"12\" height=\"12\" class=\"",
                                   colour_class(p.colour), " fill\""}));
    out += text_at(28, at, "start", p.name);
    at += line_height;
  }
  return out;
}

std::string bar_drawing::axis() const {
  const double bottom = top_ + pitch_ * static_cast<double>(chart_.bars.size());
  const double label = width_of(number_text(top_value_, 0)) + 10;
  const double step = std::max(1.0, std::ceil(label / (x(step_) - x(0)))) * step_;
  std::string out;
  for (double v = 0; v <= top_value_ * 1.0001; v += step) {
    out += segment(x(v), top_, x(v), bottom, v == 0 ? "axis" : "grid");
    out += text_at(x(v), bottom + 16, "middle", number_text(v, step_ < 1 ? 1 : 0));
  }
  return out + text_at(above_ ? how_.width / 2 : (left_ + right_) / 2, bottom + 38, "middle", chart_.x_title,
                       " class=\"strong\"");
}

std::string bar_drawing::bar(const bar_chart::bar& b, double at) const {
  std::string out;
  double y = at + (bar_step - bar_height) / 2, from = 0;
  if (above_) {
    out += text_at(left_, at + 14, "start", b.name);
    y += line_height;
  } else {
    out += text_at(left_ - 8, y + 12, "end", b.name);
  }
  for (std::size_t i = 0; i < b.parts.size() && i < chart_.parts.size(); ++i) {
    const double part = std::max(b.parts[i], 0.0);
    if (part > 0) {
      out += element("rect", concat({"x=\"", number(x(from)), "\" y=\"", number(y), "\" width=\"",
                                     number(x(from + part) - x(from)), "\" height=\"", number(bar_height),
                                     "\" class=\"", colour_class(chart_.parts[i].colour), " fill\""}));
    }
    from += part;
  }
  if (!b.text.empty()) out += text_at(x(from) + 6, y + 12, "start", b.text);
  return out;
}

std::string bar_drawing::text() const {
  const double height = top_ + pitch_ * static_cast<double>(chart_.bars.size()) + 48;
  std::string out = begin(chart_.title, how_.width, height, how_) + legend() + axis();
  double at = top_;
  for (const bar_chart::bar& b : chart_.bars) {
    out += bar(b, at);
    at += pitch_;
  }
  return out + "</svg>\n";
}

// Bytes of the character of UTF-8 that begins here; 0: none that XML has.
std::size_t character(std::string_view text) {
  const auto at = [&](std::size_t i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i]));
  };
  const std::uint32_t first = at(0);
  if (first < 0x80) return first >= 0x20 || first == '\n' || first == '\t' ? 1 : 0;
  const std::size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  std::uint32_t code = first & (0xFFu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if ((at(i) & 0xC0) != 0x80) return 0;
    code = code << 6 | (at(i) & 0x3F);
  }
  constexpr std::uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
  const bool known =
      code >= least[length] && code <= 0x10FFFF && !surrogate && code != 0xFFFE && code != 0xFFFF;
  return known ? length : 0;
}

}  // namespace

std::string draw(const line_chart& chart, const drawing& how) {
  return line_drawing(chart, how).text();
}

std::string draw(const bar_chart& chart, const drawing& how) {
  return bar_drawing(chart, how).text();
}

std::string svg_style() {
  std::string out =
      ".plot{font:12px system-ui,sans-serif;--ink:#1b1f24;--soft:#59636e;--rule:#d8dee4;--paper:#ffffff}\n"
      ".plot text{fill:var(--ink)}.plot .soft{fill:var(--soft)}.plot .strong{font-weight:600}\n"
      ".plot .ground{fill:var(--paper)}.plot .axis{stroke:var(--soft)}.plot .grid{stroke:var(--rule)}\n"
      ".plot .line{fill:none;stroke:var(--c);stroke-width:2}.plot .dashed{stroke-dasharray:6 4}\n"
      ".plot .lead{stroke:var(--c);stroke-width:1;opacity:.5}.plot .mark,.plot .fill{fill:var(--c)}\n"
      ".plot .mark{stroke:var(--paper);stroke-width:1}.plot .name{fill:var(--c);font-weight:600}\n"
      ".plot .plain{--c:var(--ink)}.plot .faint{--c:var(--rule)}\n";
  std::string night;
  for (int i = 0; i < colours; ++i) {
    const std::string name = concat({".plot .c", std::to_string(i + 1), "{--c:"});
    out += concat({name, light[static_cast<std::size_t>(i)], "}"});
    night += concat({name, dark[static_cast<std::size_t>(i)], "}"});
  }
  return concat({out,
                 "\n@media (prefers-color-scheme:dark){.plot{--ink:#e6edf3;--soft:#9aa4af;--rule:#3a424b;"
                 "--paper:#14181d}\n",
                 night, "}\n"});
}

std::string escaped(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t length = character(text);
    const char c = text.front();
    if (length == 0) {
      out += "\xEF\xBF\xBD";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return out;
}

double round_step(double most, int count) {
  const double power = std::pow(10, std::floor(std::log10(most / count)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (most / (factor * power) <= count) return factor * power;
  }
  return 10 * power;
}

}  // namespace kvcache::cli
