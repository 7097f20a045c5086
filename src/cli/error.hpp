// SPDX-License-Identifier: Apache-2.0
#pragma once

// Errors of the `kvcache` command. What a person hands in (command line, trace, model file) may be wrong;
// whoever finds it throws, `main` alone catches, prints and picks the exit code. Nothing of a result is
// printed before all of it is there.

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace kvcache::cli {

/// Exit codes, as those of the example programs.
enum class failure : int {
  cannot_run = 1,  ///< out of memory, a file that cannot be written
  usage = 2,       ///< wrong command line
  bad_input = 3,   ///< damaged or malformed trace, model file, configuration
};

/// What went wrong, for a person and for a program.
class error : public std::exception {
 public:
  error(failure kind, std::string code, std::string field, std::string value, std::string file = {},
        std::int64_t line = -1);

  /// One line for a person: "FILE:LINE: field is value: code (wanted: ...)".
  const char* what() const noexcept override { return text_.c_str(); }

  /// The same error, saying what would have been right.
  error wanting(std::string what_is_right) &&;

  failure kind;
  std::string code;    ///< stable short name: "truncated", "bad_value", "missing_field", "out_of_order", ...
  std::string field;   ///< the field that is wrong, e.g. "hash_ids[3]"
  std::string value;   ///< the value found there, as text; long ones cut
  std::string file;    ///< the file it was read from, may be empty
  std::int64_t line;   ///< line in that file from 1, -1 when there is none
  std::string wanted;  ///< what would be right there, may be empty

 private:
  std::string text_;
};

}  // namespace kvcache::cli
