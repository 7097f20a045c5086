// SPDX-License-Identifier: Apache-2.0
// Stages: whatever order the commands of one stage run in, memory ends as if all ran one after the other.
#include "kvcache/blocks/command_list.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <string>
#include <vector>

#include "core/violations.hpp"
#include "support/environment.hpp"

using namespace kvcache;

namespace {

constexpr size_t packed = 0, open = 1;  // the two spaces of group 0

command_list made(std::vector<int32_t> spaces, int32_t capacity) {
  command_list c;
  REQUIRE(c.create(spaces, capacity));
  return c;
}
void copy(command_list& c, int32_t src, int32_t dst, int32_t tokens = 16) {
  c.add(KVC_OP_COPY, 0, packed, block_id{src}, packed, block_id{dst}, tokens);
}
void seal(command_list& c, int32_t src, int32_t dst) {
  c.add(KVC_OP_SEAL, 0, open, block_id{src}, packed, block_id{dst}, 16);
}
std::vector<int32_t> stages(const command_list& c) {
  std::vector<int32_t> s;
  for (const kvc_command& k : c.view()) s.push_back(k.stage);
  return s;
}

/// Memory in which a block is a list of values, one per token.
struct memory {
  std::vector<std::vector<std::vector<int64_t>>> space;
  memory(const std::vector<int32_t>& blocks, int32_t tokens) {
    int64_t value = 0;
    for (const int32_t n : blocks) {
      space.emplace_back(static_cast<size_t>(n), std::vector<int64_t>(static_cast<size_t>(tokens)));
      for (auto& b : space.back()) {
        for (int64_t& v : b) v = ++value;
      }
    }
  }
  void run(const kvc_command& k) {
    const size_t base = 2 * size_t{k.group};
    const size_t from = base + (k.op == KVC_OP_COPY_OPEN || k.op == KVC_OP_SEAL);
    const size_t to = base + (k.op == KVC_OP_COPY_OPEN);
    auto& dst = space[to][static_cast<size_t>(k.dst)];
    for (size_t t = 0; t < static_cast<size_t>(k.tokens); ++t) {
      switch (k.op) {
        case KVC_OP_ZERO:
          dst[t] = 0;
          break;
        case KVC_OP_ROTATE:
          dst[t] = dst[t] * 3 + k.arg;
          break;
        case KVC_OP_SEAL:
          dst[t] = space[from][static_cast<size_t>(k.src)][t] + 1000000;
          break;
        default:
          dst[t] = space[from][static_cast<size_t>(k.src)][t];
      }
    }
  }
};

void add_random(command_list& c, const std::vector<int32_t>& spaces, int32_t tokens,
                std::mt19937_64& random) {
  const auto any = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint64_t>(n)); };
  const int32_t group = any(static_cast<int32_t>(spaces.size()) / 2);
  const auto base = static_cast<size_t>(2 * group);
  const int32_t few = 1 + any(tokens);
  const auto pick = [&](size_t s) { return block_id{any(spaces[s])}; };
  switch (any(5)) {
    case 0:
      c.add(KVC_OP_ZERO, group, base, no_block, base, pick(base), few);
      break;
    case 1:
      c.add(KVC_OP_ROTATE, group, base, no_block, base, pick(base), few, any(100));
      break;
    case 2:
      c.add(KVC_OP_SEAL, group, base + 1, pick(base + 1), base, pick(base), few);
      break;
    default: {
      const size_t s = base + static_cast<size_t>(any(2));
      const block_id src = pick(s);
      block_id dst = pick(s);
      if (dst == src) dst = block_id{(raw(dst) + 1) % spaces[s]};
      c.add(s == base ? KVC_OP_COPY : KVC_OP_COPY_OPEN, group, s, src, s, dst, few);
    }
  }
}

}  // namespace

TEST_CASE("independent commands share one stage") {
  command_list c = made({8, 0}, 8);
  copy(c, 0, 1);
  copy(c, 2, 3);
  copy(c, 0, 4);  // two readers of one block do not wait for each other
  CHECK(stages(c) == std::vector<int32_t>{0, 0, 0});
  CHECK(c.stages() == 1);
}

TEST_CASE("a block that is freed and handed out as a target waits for its reader (B8)") {
  command_list c = made({8, 0}, 8);
  copy(c, 0, 1);  // X -> Y
  copy(c, 2, 0);  // Z -> X: write after read
  CHECK(stages(c) == std::vector<int32_t>{0, 1});
  copy(c, 0, 3);  // read after write
  copy(c, 4, 0);  // write after write and after read
  CHECK(stages(c) == std::vector<int32_t>{0, 1, 2, 3});
  copy(c, 5, 1);  // write after the write in stage 0
  CHECK(stages(c).back() == 1);
  CHECK(c.stages() == 4);
}

TEST_CASE("two writers of one recycled block keep their order (C14)") {
  command_list c = made({8, 8}, 8);
  seal(c, 0, 5);
  seal(c, 1, 5);
  CHECK(stages(c) == std::vector<int32_t>{0, 1});
}

TEST_CASE("equal ids of different spaces do not touch each other") {
  command_list c = made({4, 4, 4, 4}, 8);
  c.add(KVC_OP_COPY, 0, 0, block_id{1}, 0, block_id{2}, 8);
  c.add(KVC_OP_COPY_OPEN, 0, 1, block_id{2}, 1, block_id{1}, 8);
  c.add(KVC_OP_COPY, 1, 2, block_id{2}, 2, block_id{1}, 8);
  CHECK(c.stages() == 1);
  c.add(KVC_OP_SEAL, 0, 1, block_id{1}, 0, block_id{3}, 8);  // reads what the second one wrote
  CHECK(stages(c).back() == 1);
}

TEST_CASE("a command carries its operation, group, blocks, tokens and argument") {
  command_list c = made({4, 4}, 4);
  c.add(KVC_OP_ROTATE, 0, packed, no_block, packed, block_id{3}, 7, -16);
  seal(c, 2, 1);
  REQUIRE(c.size() == 2);
  const kvc_command a = c.view()[0];
  CHECK(a.op == KVC_OP_ROTATE);
  CHECK(a.src == 3);  // in place
  CHECK(a.dst == 3);
  CHECK(a.tokens == 7);
  CHECK(a.arg == -16);
  const kvc_command b = c.view()[1];
  CHECK(b.op == KVC_OP_SEAL);
  CHECK(b.src == 2);
  CHECK(b.dst == 1);
  CHECK(b.tokens == 16);
}

TEST_CASE("random commands run in random order inside each stage give the bytes of one after the other") {
  std::mt19937_64 random(test::test_seed("command_list", 99));
  const std::vector<int32_t> spaces{6, 3, 4, 2};
  constexpr int32_t tokens = 4;
  command_list c = made(spaces, 64);
  int32_t deepest = 0;
  for (int64_t round = 0; round < test::effort(3000); ++round) {
    c.clear();
    const auto n = static_cast<int32_t>(1 + random() % 64);
    for (int32_t i = 0; i < n; ++i) add_random(c, spaces, tokens, random);
    REQUIRE(c.size() == n);
    memory in_order(spaces, tokens);
    for (const kvc_command& k : c.view()) in_order.run(k);
    std::vector<kvc_command> shuffled(c.view().begin(), c.view().end());
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    std::stable_sort(shuffled.begin(), shuffled.end(), [](auto& a, auto& b) { return a.stage < b.stage; });
    memory by_stage(spaces, tokens);
    for (const kvc_command& k : shuffled) by_stage.run(k);
    REQUIRE(by_stage.space == in_order.space);
    int32_t last = 0;
    for (const kvc_command& k : shuffled) {
      REQUIRE(k.stage - last <= 1);  // no stage is empty
      last = k.stage;
    }
    REQUIRE(c.stages() == last + 1);
    deepest = std::max(deepest, c.stages());
  }
  CHECK(deepest > 5);
}

TEST_CASE("clearing forgets commands and hazards, many times over") {
  command_list c = made({4, 0}, 4);
  for (int i = 0; i < 100000; ++i) {
    copy(c, 0, 1);
    copy(c, 1, 2);
    REQUIRE(c.stages() == 2);
    c.clear();
    REQUIRE(c.size() == 0);
    REQUIRE(c.stages() == 0);
  }
  copy(c, 1, 0);
  CHECK(c.stages() == 1);
}

TEST_CASE("room says how many commands still fit, and one too many is refused") {
  command_list c = made({4, 0}, 2);
  CHECK(c.room(0));
  CHECK(c.room(2));
  CHECK_FALSE(c.room(3));
  copy(c, 0, 1);
  CHECK(c.room(1));
  CHECK_FALSE(c.room(2));
  copy(c, 0, 2);
  CHECK(c.room(0));
  CHECK_FALSE(c.room(1));
  CHECK_FALSE(c.room(INT32_MAX));
  test::violations watch;
  copy(c, 0, 3);
  CHECK(watch.take() == 1);
  CHECK(c.size() == 2);
  CHECK(c.stages() == 1);
}

TEST_CASE("the longest chain of dependent commands keeps all of its stages") {
  command_list c = made({2, 0}, command_list::max_capacity);
  for (int32_t i = 0; i < command_list::max_capacity; ++i) copy(c, i % 2, 1 - i % 2);
  CHECK(c.stages() == command_list::max_capacity);
  CHECK(c.view().back().stage == command_list::max_capacity - 1);
}

TEST_CASE("a capacity outside the range of stages is refused and the list unchanged") {
  command_list c = made({4, 0}, 2);
  copy(c, 0, 1);
  const std::vector<int32_t> spaces{9, 9};
  for (const int32_t n : {0, -1, command_list::max_capacity + 1, INT32_MAX}) {
    const status s = c.create(spaces, n);
    CHECK(s.code == errc::bad_argument);
    CHECK(std::string(s.field) == "max_commands");
    CHECK(s.value == n);
  }
  CHECK(c.size() == 1);
  CHECK(c.room(1));
  CHECK_FALSE(c.room(2));
}
