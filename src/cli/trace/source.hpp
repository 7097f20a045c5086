// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where the bytes of a trace come from: a file or memory, and around either the unpacking of zstd. Whoever
// reads sees unpacked bytes and learns only from an error that there was anything to unpack.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "error.hpp"

namespace kvcache::cli {

/// A stream of bytes that is read once, from front to back.
class byte_source {
 public:
  virtual ~byte_source() = default;

  /// Fills `to` from its front and says how many bytes; fewer than `room` only at the end.
  virtual std::size_t read(char* to, std::size_t room) = 0;

  /// For errors.
  const std::string& name() const { return name_; }

 protected:
  explicit byte_source(std::string name) : name_(std::move(name)) {}

 private:
  std::string name_;
};

/// A packed file that breaks off or is damaged: where, in lines of what could be unpacked, only its reader
/// knows.
struct broken_data : error {
  broken_data(error e, std::int64_t new_lines) : error(std::move(e)), lines(new_lines) {}
  error at_line(std::int64_t n) const { return {kind, code, field, value, file, n}; }
  std::int64_t lines;  ///< ends of lines that the failed read() did unpack
};

/// Told how many more bytes have been read, as they lie in the file.
using bytes_read_callback = std::function<void(std::size_t)>;

/// A file, unpacked if it is packed. Fails: `error` if there is no such file, or it is a folder.
std::unique_ptr<byte_source> open_file(const std::string& path, bytes_read_callback on_read);

/// The first `count` bytes (fewer if there are no more), which the source will still give.
std::string peek(std::unique_ptr<byte_source>& source, std::size_t count);

/// Bytes that outlive the source, unpacked if they are packed.
std::unique_ptr<byte_source> open_bytes(std::span<const char> bytes, const std::string& name);

}  // namespace kvcache::cli
