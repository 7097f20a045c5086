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
  if (value.size() > longest) {
    value.resize(longest);
    value.append("...");
  }
  if (!file.empty()) {
    text_.append(file);
    if (line >= 0) text_.append(":").append(std::to_string(line));
    text_.append(": ");
  }
  text_.append(field);
  if (!value.empty()) text_.append(" is ").append(value);
  text_.append(": ").append(code);
}

error error::wanting(std::string what_is_right) && {
  wanted = std::move(what_is_right);
  text_.append(" (wanted: ").append(wanted).append(")");
  return std::move(*this);
}

}  // namespace kvcache::cli
