// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a policy names its settings in text: a table of keys beside the policy itself, from which reading,
// printing and messages about wrong text are made (parse.hpp).
//
//   static constexpr const char* name = "h2o";
//   static constexpr policy_key<h2o> keys[] = {{"heavy", &h2o::heavy, 1}, {"recent", &h2o::recent, 1}};
#include <cstdint>

namespace kvcache {

/// One setting of policy `R`. A key without a least value that differs from `required` has a default: the
/// member's.
template <class R>
struct policy_key {
  const char* name = "";         ///< as written in text
  int32_t R::*member = nullptr;  ///< where it is stored
  int32_t least = 0;             ///< smallest value allowed
  bool required = false;         ///< text must give it
  const char* words = nullptr;   ///< "max|avg": the value is one of these words, stored as its index
};

}  // namespace kvcache
