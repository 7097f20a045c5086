// SPDX-License-Identifier: Apache-2.0
#pragma once

// A bounded reader of GGUF model files (version 2 and 3, little-endian).
//
//   magic  version  tensor_count  key_count | keys | tensor table | padding | data
//
// The file is not trusted: every count, length and offset is compared with the bytes that are left before it
// is used, so the memory a damaged file can make us take is bounded by a small multiple of its own size. The
// whole table is checked when the file is opened; afterwards every tensor's bytes are known to lie inside the
// file.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "error.hpp"

namespace engine {

/// Tensor element formats this reader can dequantise. The numbers are those of the file format.
enum class tensor_type : std::uint32_t { f32 = 0, f16 = 1, q4_1 = 3, q8_0 = 8 };

/// One entry of the tensor table. `dims[0]` runs fastest: a matrix [in, out] is `out` rows of `in` values.
struct gguf_tensor {
  std::string name;
  tensor_type type = tensor_type::f32;
  int rank = 0;
  std::uint64_t dims[4] = {1, 1, 1, 1};
  std::span<const std::byte> bytes;  ///< inside the mapped file

  std::uint64_t row_length() const { return dims[0]; }
  std::uint64_t rows() const { return dims[1] * dims[2] * dims[3]; }
};

/// Writes row `row` of `tensor` to `out` (row_length() floats).
/// Requires: row < tensor.rows().
void dequantise_row(const gguf_tensor& tensor, std::uint64_t row, float* out);

/// An opened file: metadata by key, tensors by name. Owns the mapping; tensors point into it.
class gguf_file {
 public:
  /// Maps and checks the file at `path`.
  /// Fails: bad_input naming field and value.
  static result<gguf_file> open(const std::string& path);

  /// The same for bytes in memory, which must outlive the object.
  static result<gguf_file> from_bytes(std::span<const std::byte> bytes);

  gguf_file(gguf_file&&) noexcept;
  gguf_file& operator=(gguf_file&&) noexcept;
  ~gguf_file();

  bool has(std::string_view key) const;
  result<std::uint64_t> unsigned_value(std::string_view key) const;
  result<double> float_value(std::string_view key) const;
  result<std::string_view> string_value(std::string_view key) const;
  result<bool> bool_value(std::string_view key) const;
  result<std::vector<std::string_view>> string_array(std::string_view key) const;
  /// An array of any integer type, widened.
  result<std::vector<std::int64_t>> integer_array(std::string_view key) const;

  /// The tensor of that name, or null.
  const gguf_tensor* find(std::string_view name) const;
  std::span<const gguf_tensor> tensors() const { return tensors_; }
  /// Offset of the first byte behind the tensor table.
  std::uint64_t header_bytes() const { return header_bytes_; }
  const std::string& path() const { return path_; }

 private:
  class parser;
  struct mapping;
  /// A key's value: where its payload lies; arrays keep element type and count.
  struct value {
    std::uint32_t type = 0;
    std::uint32_t element_type = 0;
    std::uint64_t count = 0;
    std::uint64_t offset = 0;
  };

  gguf_file();
  result<value> lookup(std::string_view key, std::uint32_t type) const;

  std::unique_ptr<mapping> mapping_;
  std::span<const std::byte> bytes_;
  std::string path_;
  std::unordered_map<std::string, value> keys_;
  std::vector<gguf_tensor> tensors_;
  std::unordered_map<std::string, std::size_t> tensor_index_;
  std::uint64_t header_bytes_ = 0;
};

}  // namespace engine
