// SPDX-License-Identifier: Apache-2.0
#pragma once
// Watches contract violations for one scope instead of trapping on them.
#include <cstdint>

#include "kvcache/core/config.hpp"

namespace kvcache::test {

class violations {
 public:
  violations() : before_(set_violation_handler(&keep_going)), start_(contract_violations()) {}
  ~violations() { (void)set_violation_handler(before_); }
  violations(const violations&) = delete;
  violations& operator=(const violations&) = delete;

  /// Violations since this object was made or last asked.
  uint64_t take() {
    const uint64_t seen = contract_violations() - start_;
    start_ += seen;
    return seen;
  }

 private:
  static void keep_going(const char*, const char*, int) noexcept {}
  violation_handler before_;
  uint64_t start_;
};

}  // namespace kvcache::test
