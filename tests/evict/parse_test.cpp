// SPDX-License-Identifier: Apache-2.0
// Policies by text: what is read, what is written back, and what wrong text is told.
#include <catch2/catch.hpp>
#include <string>

#include "kvcache/evict/parse.hpp"

using namespace kvcache;

namespace {

std::string back(const eviction_choice& c) {
  char out[64];
  const int32_t n = to_text(c, out);
  REQUIRE(n == static_cast<int32_t>(std::string(out).size()));
  return out;
}
std::string wrong(const char* text) {
  const parsed_eviction p = parse_eviction(text);
  if (p.ok()) return "fine";
  return std::string(p.key) + "=" + std::string(p.text) + ": " + p.allowed;
}

}  // namespace

TEST_CASE("a policy is read with its settings, and written so that it is read alike", "[parse]") {
  const char* const texts[][2] = {{"lru", "lru"},
                                  {"lfu", "lfu"},
                                  {"fifo", "fifo"},
                                  {"slru", "slru"},
                                  {"ttl", "ttl:seconds=300"},
                                  {"ttl:60", "ttl:seconds=60"},
                                  {"ttl:seconds=0", "ttl:seconds=0"},
                                  {"priority", "priority"},
                                  {"gdsf", "gdsf:even=2048"},
                                  {"gdsf:0", "gdsf:even=0"},
                                  {"s3_fifo", "s3_fifo:small=10,uses=2"},
                                  {"s3_fifo:uses=1", "s3_fifo:small=10,uses=1"},
                                  {"s3_fifo:30,uses=3", "s3_fifo:small=30,uses=3"},
                                  {"two_q", "two_q:in=25,out=50"},
                                  {"two_q:out=80,in=10", "two_q:in=10,out=80"}};
  for (const auto& [text, full] : texts) {
    const parsed_eviction p = parse_eviction(text);
    INFO(text << ": " << p.allowed);
    REQUIRE(p.ok());
    CHECK(back(p.value) == full);
    CHECK(parse_eviction(full).value == p.value);
    any_eviction e = make_eviction(p.value);
    REQUIRE(e.holds());
    CHECK(e.create(4, 1));
  }
}

TEST_CASE("every policy that has a name is known by it", "[parse]") {
  int32_t n = 0;
  for (; eviction_name(n) != nullptr; ++n) {
    const std::string name = eviction_name(n);
    const parsed_eviction p = parse_eviction(name);
    REQUIRE(p.ok());
    CHECK(p.value.policy == n);
  }
  CHECK(n == 9);
  CHECK(eviction_name(-1) == nullptr);
  CHECK(std::string(eviction_name(eviction_choice{}.policy)) == "lru");
}

TEST_CASE("wrong text is told the key, what was found and what is allowed", "[parse]") {
  CHECK(wrong("mru") == "policy=mru: lru, lfu, fifo, slru, ttl, priority, gdsf, s3_fifo, two_q");
  CHECK(wrong("") == "policy=: lru, lfu, fifo, slru, ttl, priority, gdsf, s3_fifo, two_q");
  CHECK(wrong("LRU").find("policy=LRU") == 0);
  CHECK(wrong("lru ").find("policy=lru ") == 0);
  CHECK(wrong("ttl:") == "seconds=: a whole number from 0 to 2147483647");
  CHECK(wrong("ttl:-1") == "seconds=-1: a whole number from 0 to 2147483647");
  CHECK(wrong("ttl:99999999999") == "seconds=99999999999: a whole number from 0 to 2147483647");
  CHECK(wrong("ttl:minutes=5") == "minutes=5: seconds");
  CHECK(wrong("ttl:5s").find("seconds=5s: a whole number") == 0);
  CHECK(wrong("lru:5") == "5=5: no keys");
  CHECK(wrong("lru:") == "=: no keys");
  CHECK(wrong("s3_fifo:uses=4") == "uses=4: a whole number from 1 to 3");
  CHECK(wrong("s3_fifo:10,2") == "2=2: small, uses");
  CHECK(wrong("s3_fifo:10,small=20") == "small=20: once");
  CHECK(wrong("two_q:in=100") == "in=100: a whole number from 1 to 99");
  CHECK(wrong("two_q:in=25,") == "=: in, out");
}
