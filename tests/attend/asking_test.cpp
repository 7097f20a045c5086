// SPDX-License-Identifier: Apache-2.0
// Decode reads values in one order on Intel processors and in another elsewhere (src/simd_inner.hpp). Here
// both run on whatever machine this is.
#include <catch2/catch.hpp>
#include <numeric>

#include "../../src/kernel.hpp"
#include "world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

/// Says what it is told until it goes out of scope.
class pretended_maker {
 public:
  explicit pretended_maker(bool intel) : before_(detail::is_intel()) { detail::be_intel(intel); }
  ~pretended_maker() { detail::be_intel(before_); }
  pretended_maker(const pretended_maker&) = delete;
  pretended_maker& operator=(const pretended_maker&) = delete;

 private:
  bool before_;
};

}  // namespace

TEST_CASE("decode gives the scalar twin's bits in either order of asking memory", "[attend]") {
  std::mt19937 random(static_cast<uint32_t>(test_seed("asking", 12)));
  const auto all = targets();
  for (int64_t round = 0; round < effort(300); ++round) {
    geometry g;
    g.heads = pick(random, {1, 2, 3, 8});
    g.group = pick(random, {1, 2, 3, 4, 5, 6, 7, 8});
    // 72 and 136 are no multiples of any width: their last channels ask for nothing.
    g.dim_k = pick(random, {64, 80, 128, 256, 72, 136});
    g.dim_v = random() % 2 == 0 ? g.dim_k : pick(random, {64, 96, 128, 256, 72, 136});
    g.block = pick(random, {8, 16, 16, 32, 64, 128});
    g.type = pick(random, {element::f32, element::f16, element::bf16});
    g.order = pick(random, {k_order::transposed, k_order::transposed, k_order::row_major});
    // Several whole tiles, so that each has a next one; the last one is a part.
    const std::vector<int32_t> lengths{pick(random, {128, 130, 191, 192, 200, 321, 700})};
    world w(g, lengths, static_cast<uint32_t>(random()));
    w.append_all();
    kvc_softmax s = causal_softmax(0.125f);
    if (random() % 4 == 0) s.window = pick(random, {63, 64, 100, 130});
    const std::vector<query> qs{w.ask(0, {lengths[0] - 1})};
    call c;
    c.target = KVC_TARGET_SCALAR;
    INFO("round " << round << " dims " << g.dim_k << "/" << g.dim_v << " heads " << g.heads << "x" << g.group
                  << " block " << g.block << " type " << int(g.type) << " row-major " << int(g.order)
                  << " window " << s.window << " length " << lengths[0]);
    const answer twin = w.attend(qs, lengths, s, c);
    for (const int32_t t : all) {
      for (const bool intel : {false, true}) {
        INFO(kvc_target_text(t) << (intel ? ", as on Intel" : ", as elsewhere"));
        const pretended_maker maker(intel);
        c.target = t;
        c.width = pick(random, {1, 2, 7});
        REQUIRE(same_bits(w.attend(qs, lengths, s, c), twin));
      }
    }
  }
}
