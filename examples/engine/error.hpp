// SPDX-License-Identifier: Apache-2.0
#pragma once

// Errors as values for the example engine. Whatever a caller hands in (model file, text, options, workload)
// may be wrong; the answer then names the field and the value, and says which exit code a program ends with.

#include <cassert>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace engine {

/// Exit code classes of the programs.
enum class failure : int {
  cannot_run = 1,  ///< out of blocks, out of memory, something this build does not support
  usage = 2,       ///< wrong command line
  bad_input = 3,   ///< damaged model file, bad token ids, malformed workload line
};

/// What went wrong, for a person and for a program.
struct error {
  failure kind = failure::bad_input;
  std::string code;        ///< stable short name: "truncated", "bad_value", "out_of_blocks", ...
  std::string field;       ///< the field that is wrong, e.g. "tensor_count"
  std::string value;       ///< the value found there, as text
  std::string file;        ///< the file it was read from, may be empty
  std::int64_t line = -1;  ///< line in that file, -1 when there is none
};

inline error bad_input(std::string code, std::string field, std::string value) {
  return {failure::bad_input, std::move(code), std::move(field), std::move(value), {}, -1};
}

inline error cannot_run(std::string code, std::string field, std::string value) {
  return {failure::cannot_run, std::move(code), std::move(field), std::move(value), {}, -1};
}

/// One line for a person.
std::string describe(const error& e);

/// Success, or the error.
class [[nodiscard]] status {
 public:
  status() = default;
  status(engine::error e) : error_(std::move(e)) {}

  explicit operator bool() const { return !error_.has_value(); }
  const engine::error& error() const {
    assert(error_);
    return *error_;
  }

 private:
  std::optional<engine::error> error_;
};

/// A value, or the error why there is none.
template <class T>
class [[nodiscard]] result {
 public:
  result(T value) : state_(std::move(value)) {}
  result(engine::error e) : state_(std::move(e)) {}

  explicit operator bool() const { return state_.index() == 0; }
  T& operator*() { return *value_address(); }
  const T& operator*() const { return *value_address(); }
  T* operator->() { return value_address(); }
  const T* operator->() const { return value_address(); }
  const engine::error& error() const {
    assert(state_.index() == 1);
    return *std::get_if<1>(&state_);
  }

 private:
  T* value_address() {
    assert(state_.index() == 0);
    return std::get_if<0>(&state_);
  }
  const T* value_address() const {
    assert(state_.index() == 0);
    return std::get_if<0>(&state_);
  }

  std::variant<T, engine::error> state_;
};

}  // namespace engine
