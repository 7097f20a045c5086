// SPDX-License-Identifier: Apache-2.0
#pragma once
// The part of machine that looks at everything after a call: slots, tables, tree, counters, events.
#include "machine.hpp"

namespace kvcache::test {

// --- data plane ---

// Whether nobody else reads the block.
template <class Traits>
bool machine<Traits>::owned(int32_t s, int32_t g, bool open, block_id b) {
  const auto& c = core();
  if (!open) return c.pool.pool(g).shares(b) == 1 && !c.pool.pool(g).indexed(b);
  for (int32_t i = 0; i < model_.bounds().sequences; ++i) {
    if (i == s || !at(i).live()) continue;
    const auto others = at(i).open_table(g);
    if (std::find(others.begin(), others.end(), b) != others.end()) return false;
  }
  return c.pool.open(g).shares(b) > 0;
}

template <class Traits>
std::string machine<Traits>::append(int32_t s) {
  auto& q = model_.at(s);
  for (; q.written < q.held(); ++q.written) {
    const int32_t t = q.written;
    for (int32_t g = 0; g < cache_.shape().groups; ++g) {
      const auto& x = model_.bounds().groups[static_cast<size_t>(g)];
      if (x.stored(t + 1) <= t) continue;
      const auto table = x.lossy ? at(s).open_table(g) : at(s).table(g);
      const auto column = static_cast<size_t>(t / x.block_size);
      if (column >= table.size()) return "a slot that was handed out is not in the table";
      if (table[column] == no_block) return "a token has no open block to be written to";
      if (!owned(s, g, x.lossy, table[column])) return "a sequence is to write into a block that others read";
      uint64_t* slot = plane_.slot(g, x.lossy, table[column], t % x.block_size);
      if (slot == nullptr) return "a slot does not exist";
      *slot = q.content[static_cast<size_t>(t)];
    }
  }
  return {};
}

// Whether the slot of token t holds it, in its packed or its open form.
template <class Traits>
bool machine<Traits>::holds(int32_t s, int32_t g, int32_t t, bool packed) {
  const auto& x = model_.bounds().groups[static_cast<size_t>(g)];
  const bool open = x.lossy && !packed;
  const block_id b = (open ? at(s).open_table(g) : at(s).table(g))[static_cast<size_t>(t / x.block_size)];
  const uint64_t* slot = plane_.slot(g, open, b, t % x.block_size);
  const uint64_t want = model_.at(s).content[static_cast<size_t>(t)];
  return slot != nullptr && *slot == (packed ? packed_form(want) : want);
}

// Every query from token `first` on reads every token before it, in the form that it has to.
template <class Traits>
std::string machine<Traits>::read(int32_t s, int32_t first) {
  const auto& q = model_.at(s);
  for (int32_t g = 0; g < cache_.shape().groups; ++g) {
    const auto& x = model_.bounds().groups[static_cast<size_t>(g)];
    for (int32_t p = first; p < q.held(); ++p) {
      if (x.lossy && at(s).sealed_at(p + 1, g) != model_.sealed_at(q, g, p + 1)) {
        return "query " + std::to_string(p) + " of sequence " + std::to_string(s) + " reads another form";
      }
    }
    // A slot does not change during attention: the first query reads most of them open, the last one packed.
    for (int32_t t = 0; t < x.stored(q.held()); ++t) {
      const int32_t least = x.lossy ? at(s).sealed_at(std::max(first, t) + 1, g) : 0;
      const int32_t most = x.lossy ? at(s).sealed_at(q.held(), g) : 0;
      if ((t < least || holds(s, g, t, false)) && (t >= most || holds(s, g, t, true))) continue;
      return "sequence " + std::to_string(s) + " reads another text at token " + std::to_string(t) +
             " of group " + std::to_string(g);
    }
  }
  return {};
}

template <class Traits>
std::string machine<Traits>::nodes_hold_their_text() {
  for (const auto& n : model_.nodes()) {
    if (!n.alive) continue;
    for (int32_t g = 0; g < cache_.shape().groups; ++g) {
      const auto& x = model_.bounds().groups[static_cast<size_t>(g)];
      if (x.first_only && n.parent != oracle::absent) continue;
      const auto b = core().tree.blocks_of(node_id{n.id}, g);
      for (int32_t t = 0; t < x.stored(model_.bounds().unit()); ++t) {
        const uint64_t* slot =
            plane_.slot(g, false, b[static_cast<size_t>(t / x.block_size)], t % x.block_size);
        const uint64_t want = n.content[static_cast<size_t>(t)];
        if (slot == nullptr || *slot != (x.lossy ? packed_form(want) : want))
          return "a cached unit holds another text";
      }
    }
  }
  return {};
}

template <class Traits>
std::string machine<Traits>::run() {
  if (std::string wrong = plane_.run(cache_.commands()); !wrong.empty()) return wrong;
  std::vector<int32_t> first;
  for (int32_t s = 0; s < model_.bounds().sequences; ++s) {
    first.push_back(model_.at(s).written);
    if (!model_.at(s).live) continue;
    if (std::string wrong = append(s); !wrong.empty()) return wrong;
  }
  if (std::string wrong = plane_.seal(cache_.seals()); !wrong.empty()) return wrong;
  for (int32_t s = 0; s < model_.bounds().sequences; ++s) {
    if (!model_.at(s).live) continue;
    if (std::string wrong = read(s, first[static_cast<size_t>(s)]); !wrong.empty()) return wrong;
  }
  ran_ = true;
  return compare();
}

template <class Traits>
std::string machine<Traits>::step() {
  if (!ran_) {
    if (std::string wrong = run(); !wrong.empty()) return wrong;
  }
  ran_ = false;
  cache_.end_step();
  model_.end_step();
  const stats now = cache_.count();
  const stats seen = cache_.board().read();
  if (std::memcmp(&now, &seen, sizeof now) != 0) return "the board shows other counters";
  for (int32_t s = 0; s < model_.bounds().sequences; ++s) {  // as if their last token were asked once more
    if (!model_.at(s).live) continue;
    if (std::string wrong = read(s, std::max(0, model_.at(s).held() - 1)); !wrong.empty()) return wrong;
  }
  if (std::string wrong = nodes_hold_their_text(); !wrong.empty()) return wrong;
  return compare();
}

// --- comparison ---

template <class Traits>
bool machine<Traits>::same_block(int32_t g, bool open, int32_t name, block_id b) {
  if (name == oracle::absent || b == no_block) return name == oracle::absent && b == no_block;
  auto& names = name_of_[2 * g + open];
  auto& ids = id_of_[2 * g + open];
  if (index(b) >= names.size()) return false;
  int32_t& known_name = names[index(b)];
  int32_t& known_id = ids[static_cast<size_t>(name)];
  if (known_name == oracle::absent && known_id == oracle::absent) {
    known_name = name;
    known_id = raw(b);
    return true;
  }
  return known_name == name && known_id == raw(b);
}

template <class Traits>
std::string machine<Traits>::compare_sequence(int32_t s) {
  const auto& q = model_.at(s);
  const handle& h = at(s);
  if (q.live != h.live()) return "live";
  if (!q.live) return {};
  const auto committed = static_cast<int32_t>(q.path.size()) * model_.bounds().unit();
  if (h.held() != q.held() || h.accepted() != q.accepted || h.committed() != committed ||
      h.reused() != q.reused) {
    return "lengths of sequence " + std::to_string(s);
  }
  for (int32_t g = 0; g < cache_.shape().groups; ++g) {
    const auto k = static_cast<size_t>(g);
    if (h.sealed(g) != q.sealed[k]) return "sealed length";
    const auto table = h.table(g);
    const auto open = h.open_table(g);
    if (table.size() != q.table[k].size() || open.size() != q.open[k].size()) return "table length";
    for (size_t i = 0; i < table.size(); ++i) {
      if (!same_block(g, false, q.table[k][i], table[i])) return "table of sequence " + std::to_string(s);
    }
    for (size_t i = 0; i < open.size(); ++i) {
      if (!same_block(g, true, q.open[k][i], open[i])) return "open table of sequence " + std::to_string(s);
    }
  }
  const auto path = core().seqs.path(h.place());
  if (path.size() != q.path.size()) return "path length";
  for (size_t i = 0; i < path.size(); ++i) {
    int32_t& id = model_.nodes()[static_cast<size_t>(q.path[i])].id;
    if (id == oracle::absent) id = raw(path[i]);
    if (id != raw(path[i])) return "path of sequence " + std::to_string(s);
  }
  return {};
}

template <class Traits>
std::string machine<Traits>::compare_nodes() {
  const auto& tree = core().tree;
  int32_t count = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(model_.nodes().size()); ++i) {
    const auto& n = model_.nodes()[static_cast<size_t>(i)];
    if (!n.alive) continue;
    ++count;
    if (n.id == oracle::absent) return "a unit was never in a path";
    const node_id r{n.id};
    const auto tokens = tree.tree().tokens(r);
    if (!std::equal(tokens.begin(), tokens.end(), n.tokens.begin(), n.tokens.end()))
      return "tokens of a unit";
    const node_id parent =
        n.parent == oracle::absent ? no_node : node_id{model_.nodes()[static_cast<size_t>(n.parent)].id};
    if (tree.tree().parent(r) != parent) return "parent of a unit";
    if (tree.lane(r) != n.lane || tree.pins(r) != model_.pins(i)) return "lane or pins of a unit";
    for (int32_t g = 0; g < cache_.shape().groups; ++g) {
      const auto blocks = tree.blocks_of(r, g);
      for (size_t k = 0; k < blocks.size(); ++k) {
        if (!same_block(g, false, n.blocks[static_cast<size_t>(g)][k], blocks[k])) return "blocks of a unit";
      }
    }
  }
  return count == tree.tree().size() ? "" : "number of units";
}

template <class Traits>
std::string machine<Traits>::compare_events() {
  const auto is = cache_.events();
  const auto& want = model_.events();
  if (is.size() != want.size()) return "number of events";
  for (size_t i = 0; i < is.size(); ++i) {
    if ((is[i].kind == KVC_EVENT_STORED) != want[i].stored) return "kind of an event";
    if (!want[i].stored && is[i].node != want[i].node) return "node of an event";
  }
  return {};
}

template <class Traits>
std::string machine<Traits>::compare_seals() {
  const auto is = cache_.seals();
  std::vector<oracle::seal> want = model_.seals();
  if (is.size() != want.size()) return "number of seals";
  for (const kvc_command& c : is) {
    const auto found = std::find_if(want.begin(), want.end(), [&](const oracle::seal& x) {
      return x.group == c.group && same_block(x.group, false, x.packed, block_id{c.dst}) &&
             same_block(x.group, true, x.open, block_id{c.src});
    });
    if (found == want.end()) return "a seal of other blocks";
    want.erase(found);
  }
  return {};
}

template <class Traits>
std::string machine<Traits>::compare() {
  if (const char* broken = cache_.check_invariants(); broken != nullptr)
    return std::string("invariant: ") + broken;
  if (model_.broken() != nullptr) return model_.broken();
  const stats is = cache_.count();
  const stats want = model_.count();
  if (is.blocks_used + is.blocks_cached + is.blocks_free != is.blocks_total)
    return "the blocks do not add up";
  if (std::memcmp(&is, &want, sizeof is) != 0) {
    uint64_t a[sizeof(stats) / 8], b[sizeof(stats) / 8];
    std::memcpy(a, &is, sizeof is);
    std::memcpy(b, &want, sizeof want);
    for (size_t i = 0; i < std::size(a); ++i) {
      if (a[i] != b[i])
        return "counter " + std::to_string(i) + " is " + std::to_string(a[i]) + ", not " +
               std::to_string(b[i]);
    }
  }
  for (int32_t a = 0; a < model_.bounds().accounts(); ++a) {
    if (cache_.charged(a) != model_.charged(a)) return "charge of account " + std::to_string(a);
  }
  for (int32_t g = 0; g < cache_.shape().groups; ++g) {
    const auto& x = model_.bounds().groups[static_cast<size_t>(g)];
    for (int32_t space = 2 * g; space < 2 * g + 2; ++space) {
      const auto n = static_cast<size_t>(space % 2 == 0 ? x.total : x.open);
      name_of_[space].assign(n, oracle::absent);
      id_of_[space].assign(n, oracle::absent);
    }
  }
  for (int32_t s = 0; s < model_.bounds().sequences; ++s) {
    if (std::string wrong = compare_sequence(s); !wrong.empty()) return wrong;
  }
  if (std::string wrong = compare_nodes(); !wrong.empty()) return wrong;
  if (std::string wrong = compare_seals(); !wrong.empty()) return wrong;
  return compare_events();
}

template <class Traits>
uint64_t machine<Traits>::observe() {
  digest d;
  const stats now = cache_.count();
  uint64_t words[sizeof(stats) / 8];
  std::memcpy(words, &now, sizeof now);
  for (const uint64_t w : words) d.add(w);
  for (const handle& h : handle_) {
    d.add(h.live());
    if (!h.live()) continue;
    for (const int32_t x : {h.place(), h.held(), h.accepted(), h.committed(), h.reused()})
      d.add(static_cast<uint64_t>(x));
    for (int32_t g = 0; g < cache_.shape().groups; ++g) {
      d.add(static_cast<uint64_t>(h.sealed(g)));
      for (const block_id b : h.table(g)) d.add(static_cast<uint64_t>(raw(b)));
      for (const block_id b : h.open_table(g)) d.add(static_cast<uint64_t>(raw(b)));
    }
  }
  for (const kvc_command& c : cache_.commands().view()) {
    for (const int32_t x :
         {int32_t{c.op}, int32_t{c.group}, int32_t{c.stage}, c.tokens, c.src, c.dst, c.arg}) {
      d.add(static_cast<uint64_t>(x));
    }
  }
  for (const kvc_command& c : cache_.seals()) {
    for (const int32_t x : {int32_t{c.op}, int32_t{c.group}, c.tokens, c.src, c.dst}) {
      d.add(static_cast<uint64_t>(x));
    }
  }
  const auto& c = core();
  for (int32_t g = 0; g < cache_.shape().groups; ++g) {
    if constexpr (requires(const typename Traits::allocator_type& a) { a.free_list(); }) {
      for (const block_id b : c.pool.pool(g).free_list()) d.add(static_cast<uint64_t>(raw(b)));
    }
    for (const block_id b : c.pool.open(g).free_list()) d.add(static_cast<uint64_t>(raw(b)));
  }
  detail::walk(c, [&](node_id r) {
    d.add(static_cast<uint64_t>(raw(r)));
    d.add(static_cast<uint64_t>(c.tree.pins(r)));
    for (const token_id t : c.tree.tree().tokens(r)) d.add(static_cast<uint64_t>(t));
  });
  for (int32_t a = 0; a < c.pool.accounts(); ++a) d.add(static_cast<uint64_t>(c.pool.charged(a)));
  return d.value;
}

}  // namespace kvcache::test
