// SPDX-License-Identifier: Apache-2.0
#pragma once
// Complexity by counting: an eviction policy that counts its calls, and an index that counts hashes.
#include "scenarios/fixture.hpp"

namespace kvcache::test {

struct calls {
  int64_t enter = 0, leave = 0, victim = 0, hash = 0;
  int64_t all() const { return enter + leave + victim; }
};
inline calls counted;

template <class E>
class counting_eviction {
 public:
  status create(int32_t nodes, int32_t lanes) noexcept { return policy_.create(nodes, lanes); }
  bool monotone() const noexcept { return policy_.monotone(); }
  void enter(node_id r, int32_t lane, const node_meta& m) noexcept {
    ++counted.enter;
    last_stamp = m.last;
    policy_.enter(r, lane, m);
  }
  void leave(node_id r, int32_t lane) noexcept {
    ++counted.leave;
    policy_.leave(r, lane);
  }
  node_id victim(int32_t lane) const noexcept {
    ++counted.victim;
    return policy_.victim(lane);
  }

  static inline uint64_t last_stamp = 0;  ///< logical time of the newest release

 private:
  E policy_;
};
struct counting_hash {
  uint32_t operator()(int32_t scope, node_id parent, std::span<const token_id> t) const noexcept {
    ++counted.hash;
    return unit_hash{}(scope, parent, t);
  }
};
template <class E>
struct counting_traits : serving {
  using eviction_type = counting_eviction<E>;
  using index_type = basic_radix_tree<counting_hash>;
};

}  // namespace kvcache::test
