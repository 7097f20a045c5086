// SPDX-License-Identifier: Apache-2.0
#include "error.hpp"

namespace engine {

std::string describe(const error& e) {
  std::string text = e.code;
  if (!e.field.empty()) text.append(": ").append(e.field);
  if (!e.value.empty()) text.append(" = ").append(e.value);
  if (!e.file.empty()) {
    text.append(" (").append(e.file);
    if (e.line >= 0) text.append(":").append(std::to_string(e.line));
    text += ")";
  }
  // Names may come from a hostile file; a terminal must not see its escape sequences.
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return text;
}

}  // namespace engine
