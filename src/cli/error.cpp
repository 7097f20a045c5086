// SPDX-License-Identifier: Apache-2.0
#include "error.hpp"

namespace kvcache::cli {

error::error(failure kind_of, std::string code_of, std::string field_of, std::string value_of,
             std::string file_of, std::int64_t line_of)
    : kind(kind_of),
      code(std::move(code_of)),
      field(std::move(field_of)),
      value(std::move(value_of)),
      file(std::move(file_of)),
      line(line_of) {
  constexpr std::size_t longest = 120;
  if (value.size() > longest) value = value.substr(0, longest) + "...";
  if (!file.empty()) text_ = file + (line >= 0 ? ":" + std::to_string(line) : "") + ": ";
  text_ += field + (value.empty() ? "" : " is " + value) + ": " + code;
}

}  // namespace kvcache::cli
