// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rows of measurements as JSON, for machines, and as Markdown tables, for docs/performance.md.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvcache::gpu_check {

/// A name with a number or a text.
struct field {
  std::string name;
  bool is_text = false;
  std::string text;
  double number = 0;

  field(std::string n, std::string t) : name(std::move(n)), is_text(true), text(std::move(t)) {}
  field(std::string n, const char* t) : field(std::move(n), std::string(t)) {}
  field(std::string n, double v) : name(std::move(n)), number(v) {}
  field(std::string n, int64_t v) : field(std::move(n), static_cast<double>(v)) {}
  field(std::string n, int32_t v) : field(std::move(n), static_cast<double>(v)) {}
};

/// One line of a table. `refused`: why there are no figures; empty where there are.
struct row {
  std::string table;
  std::vector<field> fields;
  std::string refused;
};

/// Of the decode rows with 2 GB of keys and values or more: which part of the read ceiling they reach, a line
/// per format, beside what is aimed at (f16 and bf16 0.9, 8-bit codes 0.8, others 0.7).
std::vector<row> targets_of(const std::vector<row>& rows);

/// 0 to 15 digits, the shortest text that gives the number again up to `digits`; whole numbers whole.
std::string number_text(double v, int digits);

/// Array of objects: what holds for all rows (card, clocks, driver, date), the table, the fields, the
/// refusal.
std::string json_of(const std::vector<field>& common, const std::vector<row>& rows);

/// A table per name in the order of first rows, its columns in the order of first fields. Rows that were
/// refused are counted below their table, by reason and by the value of their first field.
std::string markdown_of(const std::vector<field>& common, const std::vector<row>& rows);

/// Writes a file as a whole. False if that fails.
bool write_file(const std::string& path, const std::string& text);

}  // namespace kvcache::gpu_check
