// SPDX-License-Identifier: Apache-2.0
#pragma once

// A file that is there as a whole or not at all.

#include <string>

namespace kvcache::cli {

/// Tried beside its place before the work starts, so that a place which cannot be written is known at once;
/// written and moved there at the end. What stood there before stays until then, and a program that is
/// stopped meanwhile leaves nothing behind.
class output_file {
 public:
  /// Fails: error (cannot_run) naming `field` and the path where no file can be made, or something stands
  /// that is not a file.
  output_file(const char* field, const std::string& path);

  /// Writes all of it and puts it in place; signals that end the program wait for it. Fails: error
  /// (cannot_run); nothing is left behind then.
  void finish(const std::string& content) const;

  const std::string& path() const { return path_; }
  /// The same for every path to one file.
  const std::string& target() const { return target_; }

 private:
  struct temporary {
    std::string name;
    int file = -1;
    void remove() const;
  };
  temporary open() const;
  [[noreturn]] void fail(int code) const;
  [[noreturn]] void fail(const temporary& t, int code) const;

  const char* field_;
  std::string path_;    ///< as given
  std::string target_;  ///< behind links, from the root on
};

}  // namespace kvcache::cli
