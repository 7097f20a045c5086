// SPDX-License-Identifier: Apache-2.0
#pragma once

// KV events as they travel: msgpack payloads, one after the other in a file. They are turned into JSON lines,
// a payload a line, so that one reader serves both; the line of an error is then the number of the payload.

#include <memory>
#include <string_view>

#include "trace/source.hpp"

namespace kvcache::cli {

/// Whether a file that begins so holds msgpack payloads of events: arrays, which no text begins with.
bool is_msgpack(std::string_view front);

/// The same payloads as JSON lines. Byte strings become strings of hexadecimal digits.
std::unique_ptr<byte_source> json_of_msgpack(std::unique_ptr<byte_source> packed);

}  // namespace kvcache::cli
