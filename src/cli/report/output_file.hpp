// SPDX-License-Identifier: Apache-2.0
#pragma once

// A file that is there as a whole or not at all.

#include <string>

namespace kvcache::cli {

/// Opened beside its place before the work starts, so that a place which cannot be written is known at once;
/// moved there when all of it is written. What stood there before stays until then.
class output_file {
 public:
  /// Fails: error (cannot_run) naming `field` and the path where no file can be made, or something stands
  /// that is not a file.
  output_file(const char* field, const std::string& path);
  output_file(output_file&& other) noexcept;
  output_file& operator=(output_file&&) = delete;
  ~output_file();

  /// Writes all of it and puts it in place. Fails: error (cannot_run); nothing is left behind then.
  void finish(const std::string& content);

  const std::string& path() const { return path_; }

 private:
  [[noreturn]] void fail(int code);

  const char* field_;
  std::string path_;    ///< as given
  std::string target_;  ///< behind links
  std::string temporary_;
  int file_ = -1;
};

}  // namespace kvcache::cli
