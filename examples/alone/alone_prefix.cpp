// SPDX-License-Identifier: Apache-2.0
// The part prefix by itself: the tree, scopes, and an index of one's own. Regions are shown in
// docs/prefix.md.
#include <vector>

#include "expect.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/prefix/radix_tree.hpp"
#include "kvcache/prefix/scope.hpp"

namespace kvc = kvcache;

namespace {

kvc::status show_tree() {
  // [tree]
  kvc::radix_tree tree;
  if (auto s = tree.create(1000, 4); !s) return s;  // at most 1,000 nodes of 4 tokens
  const std::vector<kvc::token_id> text{1, 2, 3, 4, 5, 6, 7, 8, 9};
  const std::span<const kvc::token_id> t(text);
  const int32_t scope = 0;  // any number: equal scopes share
  const kvc::node_id first = tree.insert(scope, kvc::no_node, t.first(4)).node;
  tree.insert(scope, first, t.subspan(4, 4));
  std::vector<kvc::node_id> hit(8);
  const int32_t units = tree.match(scope, kvc::no_node, t, hit);       // 2: the ninth token fills no unit
  const int32_t others = tree.match(scope + 1, kvc::no_node, t, hit);  // 0: another scope
  // [tree]
  expect(units == 2 && others == 0, "whole units are found, in their own scope only");
  tree.erase(hit[0]);
  return {};
}

kvc::status show_scopes() {
  // [scopes]
  const auto everyone = kvc::scope::shared();                           // public prompts, a single user
  const auto acme = kvc::scope::tenant("acme");                         // only who has the same salt
  const auto tuned = kvc::scope::tenant("acme").adapter("support", 3);  // and the same adapter weights
  auto mixed = kvc::scope::shared();
  mixed.from(512, kvc::scope::tenant("acme"));  // public for 512 tokens, then private
  // [scopes]
  kvc::scope_table table;
  if (auto s = table.create(16, 0); !s) return s;
  auto a = table.acquire(everyone, 16), b = table.acquire(acme, 16), c = table.acquire(tuned, 16);
  auto d = table.acquire(mixed, 16);
  if (!a || !b || !c || !d) return kvc::errc::out_of_scopes;
  expect(a->id[0] != b->id[0] && b->id[0] != c->id[0], "scopes that differ in a part are different");
  expect(d->at(31) == a->id[0] && d->at(32) != a->id[0] && d->at(32) != b->id[0],
         "a scope that narrows shares its beginning, and what follows only with its like");
  return {};
}

// [own]
struct long_text_hash {  // for prompts whose units differ early: looks at four tokens instead of all
  uint32_t operator()(int32_t scope, kvc::node_id parent, std::span<const kvc::token_id> t) const noexcept {
    uint64_t h = kvc::mix64(uint64_t(uint32_t(kvc::raw(parent))) << 32 | uint32_t(scope));
    for (size_t i = 0; i < t.size() && i < 4; ++i) h = kvc::mix64(h ^ uint32_t(t[i]));
    return uint32_t(h);
  }
};
struct with_own_hash : kvc::serving {
  using index_type = kvc::basic_radix_tree<long_text_hash>;
};
struct without_sharing : kvc::serving {
  using index_type = kvc::no_index;  // the model that finds nothing
};
// [own]

template <class Traits>
int32_t reused_by_second() {
  auto cache = kvc::basic_cache<Traits>::create(
      {.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 8}, .capacity = kvc::kibibytes(64)});
  if (!cache) return -1;
  const std::vector<kvc::token_id> prompt(40, 5);
  for (int32_t round = 0;; ++round) {
    auto seq = cache->open(prompt, kvc::scope::shared());
    if (!seq) return -1;
    if (round == 1) return seq->reused();
    if (!seq->extend(40) || !seq->commit(prompt)) return -1;
  }
}

kvc::status show_own() {
  expect(reused_by_second<with_own_hash>() == 32, "a hash of one's own finds the same");
  expect(reused_by_second<without_sharing>() == 0, "without an index nothing is shared");
  return {};
}

}  // namespace

int main() {
  kvc::set_violation_handler(
      [](const char*, const char*, int) noexcept {});  // show_tree erases an inner node
  for (const auto show : {show_tree, show_scopes, show_own}) expect(bool(show()), "done");
  expect(kvc::contract_violations() == 1, "erasing an inner node is refused");
  return wrong;
}
