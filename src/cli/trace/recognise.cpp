// SPDX-License-Identifier: Apache-2.0
#include "trace/formats.hpp"

namespace kvcache::cli {

format_reader recognise(std::string_view front) {
  if (front.find_first_not_of(" \t\r\n") == std::string_view::npos) return nullptr;
  return read_mooncake;
}

}  // namespace kvcache::cli
