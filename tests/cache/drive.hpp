// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the operations of a script on a machine.
#include "machine.hpp"
#include "traits.hpp"

namespace kvcache::test {

// Instantiated once, in machine.cpp.
extern template class machine<lru_cache>;
extern template class machine<lfu_cache>;
extern template class machine<dynamic>;
extern template class machine<failing_lru>;
extern template class machine<failing_lfu>;

/// Returns what is wrong, with the number of the operation, or nothing. `done` counts operations; `trail`
/// gets what could be seen after each.
template <class Traits>
std::string drive(machine<Traits>& m, std::span<const uint8_t> ops, int64_t* done = nullptr,
                  std::vector<uint64_t>* trail = nullptr) {
  const rules& r = m.model().bounds();
  for (int64_t i = 0; ops.size() >= operation::encoded_bytes; ++i) {
    operation o = decode(ops, r.sequences, r.max_tokens);
    ops = ops.subspan(operation::encoded_bytes);
    if (o.pick % 32 != 0) o.s = m.live_near(o.s);  // the others find out what a closed handle answers
    if (const std::string why = m.apply(o); !why.empty()) {
      return "operation " + std::to_string(i) + " (" + describe(o) + "): " + why;
    }
    if (done != nullptr) ++*done;
    if (trail != nullptr) trail->push_back(m.observe());
  }
  return {};
}

}  // namespace kvcache::test
