// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the commands print: JSON for programs, tables and amounts for people, progress for those who wait.

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"

namespace kvcache::cli {

using json = nlohmann::ordered_json;

/// The document on one line: floats as %.9g (enough to get the same float32 back), not-a-number and
/// infinities as null, bytes that are not UTF-8 replaced by U+FFFD.
std::string to_text(const json& document);

/// {"schema": "kvcache.error.v1", "error": {code, field, value, file, line, and wanted where it is known}}
json to_json(const error& e);

/// The error for a terminal, on one line.
std::string describe(const error& e);

/// Text for a terminal: without control characters but line ends, as names may come from a hostile file.
std::string harmless(std::string text);

/// The parts one after the other.
std::string concat(std::initializer_list<std::string_view> parts);

/// "1,234,567"
std::string count_text(std::int64_t n);

/// `digits` behind the point.
std::string number_text(double x, int digits);

/// Both kinds of units, so that nobody takes one for the other: "42.95 GB = 40.00 GiB", "12 B".
std::string bytes_text(std::int64_t bytes);

/// Lines of cells under each other: the first column to the left, the others to the right.
class table {
 public:
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  /// Each line indented by `indent` blanks, two blanks between columns, no blanks at the end.
  std::string text(std::size_t indent = 2) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// Says on stderr how far something long is, at most five times a second: if stderr is a terminal, or if
/// asked for (--progress). Thread safety: one thread.
class progress {
 public:
  explicit progress(bool asked_for);
  progress(const progress&) = delete;
  progress& operator=(const progress&) = delete;
  ~progress() { finish(); }

  /// `total` 0: not known.
  void update(std::string_view what, std::int64_t done, std::int64_t total);
  /// Ends the line. Also done by the destructor; update may follow.
  void finish();

 private:
  bool shown_ = false;     ///< to be shown at all
  bool terminal_ = false;  ///< lines overwrite each other
  bool open_ = false;      ///< a line stands there
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace kvcache::cli
