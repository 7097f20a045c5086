// SPDX-License-Identifier: Apache-2.0
#include "oracle.hpp"

#include <algorithm>
#include <set>
#include <tuple>

namespace kvcache::test {

int32_t rules::unit() const noexcept {
  int32_t u = 1;
  for (const group_rule& g : groups) u = std::max(u, g.first_only ? 1 : g.block_size);
  return u;
}

uint64_t content_after(uint64_t before, token_id token, int64_t label, uint64_t forms) noexcept {
  return mix64(before * 0x9e3779b97f4a7c15ull + (uint64_t{static_cast<uint32_t>(token)} << 8) +
               static_cast<uint64_t>(label) * 0xff51afd7ed558ccdull + forms * 0xc4ceb9fe1a85ec53ull + 1);
}

uint64_t packed_form(uint64_t content) noexcept {
  return mix64(content ^ 0x7061636b6564ull);
}

oracle::oracle(rules r) : rules_(std::move(r)) {
  seq_.resize(static_cast<size_t>(rules_.sequences));
  for (const group_rule& g : rules_.groups) block_.emplace_back(static_cast<size_t>(g.total));
  naive_ = naive_order(rules_.order, rules_.nodes, rules_.accounts());
}

// --- counting: always by looking at everything ---

void oracle::recount() const {
  if (counted_) return;
  counted_ = true;
  for (auto& of_group : block_) {
    for (block& b : of_group) b.tables = b.nodes = 0;
  }
  for (const sequence& q : seq_) {
    if (!q.live) continue;
    for (int32_t g = 0; g < groups(); ++g) {
      for (const int32_t b : q.table[static_cast<size_t>(g)]) ++of(g, b).tables;
    }
  }
  for (const node& n : node_) {
    if (!n.alive) continue;
    for (int32_t g = 0; g < groups(); ++g) {
      for (const int32_t b : n.blocks[static_cast<size_t>(g)]) {
        if (b != absent) ++of(g, b).nodes;
      }
    }
  }
}

bool oracle::is_free(int32_t g, int32_t name) const {
  recount();
  return of(g, name).tables == 0 && of(g, name).nodes == 0;
}

// What is packed into a block that nobody holds any more is not packed.
void oracle::drop_dead_seals() {
  const auto dead = [&](const seal& s) { return is_free(s.group, s.packed); };
  seals_.erase(std::remove_if(seals_.begin(), seals_.end(), dead), seals_.end());
}

void oracle::cancel_seal(int32_t g, int32_t packed) {
  const auto same = [&](const seal& s) { return s.group == g && s.packed == packed; };
  const auto gone = std::remove_if(seals_.begin(), seals_.end(), same);
  if (gone != seals_.end()) of(g, packed).packed = false;
  seals_.erase(gone, seals_.end());
}

int32_t oracle::free(int32_t g) const {
  recount();
  int32_t n = 0;
  for (const block& b : block_[static_cast<size_t>(g)]) n += b.tables == 0 && b.nodes == 0;
  return n;
}

int32_t oracle::cached(int32_t g) const {
  recount();
  int32_t n = 0;
  for (const block& b : block_[static_cast<size_t>(g)]) n += b.tables == 0 && b.nodes > 0;
  return n;
}

int32_t oracle::charged(int32_t account) const {
  recount();
  int32_t n = 0;
  for (const auto& of_group : block_) {
    for (const block& b : of_group) n += b.owner == account && (b.tables > 0 || b.nodes > 0);
  }
  return n;
}

int32_t oracle::cached_of(int32_t account) const {
  recount();
  int32_t n = 0;
  for (const auto& of_group : block_) {
    for (const block& b : of_group) n += b.owner == account && b.tables == 0 && b.nodes > 0;
  }
  return n;
}

int32_t oracle::open_shares(int32_t g, int32_t name) const {
  const auto reads = [&](const seal& s) { return s.group == g && s.open == name; };
  return open_holders(g, name) + static_cast<int32_t>(std::count_if(seals_.begin(), seals_.end(), reads));
}

int32_t oracle::open_holders(int32_t g, int32_t name) const {
  int32_t n = 0;
  for (const sequence& q : seq_) {
    if (!q.live) continue;
    const auto& o = q.open[static_cast<size_t>(g)];
    n += static_cast<int32_t>(std::count(o.begin(), o.end(), name));
  }
  return n;
}

int32_t oracle::open_free(int32_t g) const {
  int32_t n = 0;
  for (int32_t b = 0; b < group(g).open; ++b) n += open_shares(g, b) == 0;
  return n;
}

int32_t oracle::immutable(int32_t g, int32_t name) const {
  recount();
  return of(g, name).tables > 1 || of(g, name).nodes > 0;
}

int32_t oracle::live() const {
  return static_cast<int32_t>(
      std::count_if(seq_.begin(), seq_.end(), [](const sequence& q) { return q.live; }));
}

int32_t oracle::vacant() const {
  return rules_.sequences - live();
}

int32_t oracle::pins(int32_t node) const {
  int32_t n = 0;
  for (const sequence& q : seq_) {
    if (q.live) n += static_cast<int32_t>(std::count(q.path.begin(), q.path.end(), node));
  }
  return n;
}

stats oracle::count() const {
  stats s = counters_;
  s.sequences_live = static_cast<uint64_t>(live());
  for (const node& n : node_) s.nodes += n.alive;
  for (int32_t g = 0; g < groups(); ++g) {
    const auto total = static_cast<uint64_t>(group(g).total);
    s.blocks_total += total;
    s.blocks_free += static_cast<uint64_t>(free(g));
    s.blocks_cached += static_cast<uint64_t>(cached(g));
    for (const block& b : block_[static_cast<size_t>(g)]) s.blocks_used += b.tables > 0;
  }
  return s;
}

// --- prefixes ---

sharing oracle::in_units(const sharing& who) const {
  sharing out;
  for (const part& p : who) {
    const int32_t unit = p.first / rules_.unit();
    const bool same = !out.empty() && out.back().first == unit;
    out.push_back({(same ? out.back().label << 14 : 0) + p.first * 16 + p.label + 1, unit});
  }
  return out;
}

int64_t oracle::label_of(const sharing& units, int32_t unit) {
  int64_t label = 0;
  for (const part& p : units) {
    if (p.first <= unit) label = p.label;
  }
  return label;
}

int32_t oracle::child(int32_t parent, int64_t label, std::span<const token_id> tokens) const {
  for (size_t i = 0; i < node_.size(); ++i) {
    const node& n = node_[i];
    if (n.alive && n.parent == parent && n.label == label &&
        std::equal(n.tokens.begin(), n.tokens.end(), tokens.begin(), tokens.end())) {
      return static_cast<int32_t>(i);
    }
  }
  return absent;
}

int32_t oracle::match(std::span<const token_id> tokens, const sharing& who,
                      std::vector<int32_t>* path) const {
  const auto unit = static_cast<size_t>(rules_.unit());
  const sharing units = in_units(who);
  int32_t n = 0;
  int32_t parent = absent;
  for (; (static_cast<size_t>(n) + 1) * unit <= tokens.size(); ++n) {
    parent = child(parent, label_of(units, n), tokens.subspan(static_cast<size_t>(n) * unit, unit));
    if (parent == absent) break;
    if (path != nullptr) path->push_back(parent);
  }
  return n * rules_.unit();
}

bool oracle::has_children(int32_t node) const {
  return newest_child(node) != absent;
}

int32_t oracle::newest_child(int32_t parent) const {
  int32_t best = absent;
  for (size_t i = 0; i < node_.size(); ++i) {
    if (!node_[i].alive || node_[i].parent != parent) continue;
    if (best == absent || node_[i].born > node_[static_cast<size_t>(best)].born)
      best = static_cast<int32_t>(i);
  }
  return best;
}

void oracle::pin(sequence& q, int32_t x) {
  node& n = node_[static_cast<size_t>(x)];
  const bool over = n.priority_ms != 0 && now_ > n.time + n.priority_ms * uint64_t{1'000'000};
  if (pins(x) == 0 && over) n.priority = 0, n.priority_ms = 0;
  const auto longer = [](uint32_t a, uint32_t b) { return a == 0 || b == 0 ? 0 : std::max(a, b); };
  if (q.priority == n.priority) n.priority_ms = longer(q.priority_ms, n.priority_ms);
  if (q.priority > n.priority) n.priority_ms = q.priority_ms;
  n.priority = std::max(n.priority, q.priority);
  n.last = clock_;
  n.time = now_;
  ++n.uses;
  q.path.push_back(x);
}

void oracle::unpin_from(sequence& q, size_t first) {
  while (q.path.size() > first) {
    const int32_t x = q.path.back();
    q.path.pop_back();
    if (pins(x) != 0) continue;
    node_[static_cast<size_t>(x)].last = clock_;
    node_[static_cast<size_t>(x)].time = now_;
    node_[static_cast<size_t>(x)].released = ++order_;
  }
}

int32_t oracle::best_of_lane(int32_t lane) const {
  int32_t best = absent;
  const auto rank = [&](int32_t x) {
    const node& n = node_[static_cast<size_t>(x)];
    return rules_.by_frequency() ? std::tuple<uint64_t, uint64_t, int32_t>{n.uses, n.last, n.id}
                                 : std::tuple<uint64_t, uint64_t, int32_t>{n.released, 0, 0};
  };
  for (int32_t i = 0; i < static_cast<int32_t>(node_.size()); ++i) {
    const node& n = node_[static_cast<size_t>(i)];
    if (!n.alive || n.lane != lane || pins(i) != 0) continue;
    if (!rules_.monotone() && has_children(i)) continue;
    if (best == absent || rank(i) < rank(best)) best = i;
  }
  return best;
}

node_meta oracle::meta_of(int32_t x) const {
  const node& n = node_[static_cast<size_t>(x)];
  node_meta m;
  m.last = n.last;
  m.born = n.stored;
  m.uses = n.uses;
  m.priority = n.priority;
  m.priority_ms = n.priority_ms;
  m.time = n.time;
  for (int32_t p = x; p != absent; p = node_[static_cast<size_t>(p)].parent) {
    const node& a = node_[static_cast<size_t>(p)];
    for (const token_id t : a.tokens) m.print = content_after(m.print, t, a.label, 0);
    m.depth += p != x;
  }
  return m;
}

// Brings the candidates of naive_ up to date. Between two evictions it does not matter when they come.
void oracle::list_candidates() {
  for (int32_t i = 0; i < static_cast<int32_t>(node_.size()); ++i) {
    node& n = node_[static_cast<size_t>(i)];
    if (!n.alive) continue;
    const bool free = pins(i) == 0 && !has_children(i);
    if (naive_.candidate(i) && (!free || n.entered != n.released)) naive_.leave(i);
    if (free && !naive_.candidate(i)) naive_.enter(i, meta_of(i), n.id);
    n.entered = n.released;
  }
}

// The victim of the lane, which is about to go.
int32_t oracle::take(int32_t lane) {
  if (!rules_.by_naive_order()) return best_of_lane(lane);
  if (lane < 0) return absent;
  list_candidates();
  naive_.settle(lane);
  return naive_.victim(lane);
}

int32_t oracle::set_time(uint64_t ns) {
  now_ = ns;
  naive_.advance(ns);
  int32_t gone = 0;
  if (!rules_.by_time()) return 0;
  for (int32_t lane = 0; lane < rules_.accounts(); ++lane) {
    for (;; ++gone) {
      const int32_t x = best_of_lane(lane);
      const uint64_t after = static_cast<uint64_t>(rules_.order.value[0]) * 1'000'000'000;
      if (x == absent || now_ - node_[static_cast<size_t>(x)].time <= after) break;
      evict_below(x);
    }
  }
  return gone;
}

bool oracle::evict_one(int32_t lane) {
  int32_t x = take(rules_.accounts() == 1 ? 0 : lane);
  if (x != absent && rules_.accounts() == 1 && has_children(x))
    broken_ = "the eviction order puts a parent before its child";
  if (x == absent) {
    int32_t most = -1;
    for (int32_t a = 0; a < rules_.accounts(); ++a) {
      if (best_of_lane(a) == absent || cached_of(a) <= most) continue;
      most = cached_of(a);
      lane = a;
    }
    if (most >= 0) x = take(lane);
  }
  if (x == absent) return false;
  evict_below(x);
  return true;
}

void oracle::evict_below(int32_t x) {
  while (has_children(x)) x = newest_child(x);
  if (pins(x) != 0) broken_ = "a pinned node is evicted";
  node_[static_cast<size_t>(x)].alive = false;
  if (rules_.by_naive_order()) naive_.evicted(x);
  report({false, node_[static_cast<size_t>(x)].id});
  counted_ = false;
  drop_dead_seals();
  ++counters_.nodes_evicted;
}

int32_t oracle::evict(int32_t n) {
  int32_t done = 0;
  while (done < n && evict_one(-1)) ++done;
  return done;
}

// --- lengths ---

bool oracle::scopes_fit(const sharing& who) const {
  std::set<int64_t> labels;
  for (const sequence& q : seq_) {
    if (!q.live) continue;
    for (const part& p : q.who) labels.insert(p.label);
  }
  for (const node& n : node_) {
    if (n.alive) labels.insert(n.label);
  }
  for (const part& p : in_units(who)) labels.insert(p.label);
  return static_cast<int32_t>(labels.size()) <= rules_.scopes;
}

answer oracle::open(int32_t s, std::span<const token_id> prompt, const sharing& who, int32_t account,
                    int32_t recompute, int32_t priority, uint32_t priority_ms) {
  if (account < 0 || account >= rules_.accounts() || recompute < 1) return {errc::bad_argument, 0};
  if (prompt.size() > static_cast<size_t>(rules_.max_tokens)) return {errc::too_long, 0};
  if (!scopes_fit(who)) return {errc::out_of_scopes, 0};
  if (vacant() == 0) return {errc::out_of_sequences, 0};
  ++clock_;
  const size_t usable = prompt.size() - std::min(prompt.size(), static_cast<size_t>(recompute));
  std::vector<int32_t> path;
  const int32_t reused = match(prompt.first(usable), who, &path);
  sequence q;
  q.live = true;
  q.account = account;
  q.priority = priority;
  q.priority_ms = priority_ms;
  q.who = in_units(who);
  q.accepted = q.reused = q.written = reused;
  q.table.resize(static_cast<size_t>(groups()));
  q.open.resize(static_cast<size_t>(groups()));
  for (const group_rule& g : rules_.groups) q.sealed.push_back(g.lossy ? reused : 0);
  q.packed = q.sealed;
  for (const int32_t x : path) {
    pin(q, x);
    const node& n = node_[static_cast<size_t>(x)];
    q.text.insert(q.text.end(), n.tokens.begin(), n.tokens.end());
    q.content.insert(q.content.end(), n.content.begin(), n.content.end());
    for (size_t g = 0; g < q.table.size(); ++g) {
      if (rules_.groups[g].first_only && !q.table[g].empty()) continue;
      q.table[g].insert(q.table[g].end(), n.blocks[g].begin(), n.blocks[g].end());
      if (rules_.groups[g].lossy) q.open[g].resize(q.table[g].size(), absent);
    }
  }
  at(s) = std::move(q);
  counted_ = false;
  ++counters_.sequences_opened;
  counters_.tokens_asked += prompt.size();
  counters_.tokens_reused += static_cast<uint64_t>(reused);
  return {errc::ok, reused};
}

int32_t oracle::take(int32_t g, int32_t account) {
  recount();
  auto& all = block_[static_cast<size_t>(g)];
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].tables != 0 || all[i].nodes != 0) continue;
    all[i] = {account, false, 1, 0};
    return static_cast<int32_t>(i);
  }
  broken_ = "the model has no free block left";
  return 0;
}

int32_t oracle::take_open(int32_t g) {
  for (int32_t b = 0; b < group(g).open; ++b) {
    if (open_shares(g, b) == 0) return b;
  }
  broken_ = "the model has no open block left";
  return 0;
}

errc oracle::feasible(const sequence& q, int32_t n, std::vector<demand>& d, int32_t& sum) const {
  int32_t copies = 0;
  bool room = true;
  for (int32_t g = 0; g < groups(); ++g) {
    const group_rule& x = group(g);
    const auto k = static_cast<size_t>(g);
    demand& need = d[k];
    need.blocks =
        (x.stored(q.held() + n) + x.block_size - 1) / x.block_size - static_cast<int32_t>(q.table[k].size());
    if (x.stored(q.held()) % x.block_size != 0) {
      need.copy = immutable(g, q.table[k].back());
      if (x.lossy) need.open_copy = open_shares(g, q.open[k].back()) > 1;
    }
    sum += need.blocks + need.copy;
    copies += x.lossy ? need.open_copy : need.copy;
    room = room && need.blocks + need.copy <= free(g) + cached(g);
    if (x.lossy) room = room && need.blocks + need.open_copy <= open_free(g);
  }
  if (queued_ + copies > rules_.commands) return errc::busy;
  const int32_t limit = rules_.limits[static_cast<size_t>(q.account)];
  if (sum > 0 && int64_t{charged(q.account)} - cached_of(q.account) + sum > limit) return errc::over_quota;
  return room ? errc::ok : errc::out_of_blocks;
}

void oracle::grow(sequence& q, int32_t g, const demand& d) {
  const auto k = static_cast<size_t>(g);
  while (free(g) < d.blocks + d.copy && evict_one(q.account)) {
  }
  if (d.copy != 0) {
    q.table[k].back() = take(g, q.account);
    counted_ = false;
    drop_dead_seals();
    counters_.blocks_copied += !group(g).lossy;
    queued_ += !group(g).lossy;
  }
  if (d.open_copy != 0) {
    q.open[k].back() = take_open(g);
    ++counters_.blocks_copied;
    ++queued_;
  }
  // What is written to again is no longer what was packed.
  if (group(g).lossy && q.held() % group(g).block_size != 0) {
    cancel_seal(g, q.table[k].back());
    of(g, q.table[k].back()).packed = false;
  }
  for (int32_t i = 0; i < d.blocks; ++i) {
    q.table[k].push_back(take(g, q.account));
    if (group(g).lossy) q.open[k].push_back(take_open(g));
  }
  counted_ = false;
}

answer oracle::extend(int32_t s, int32_t n, std::span<const token_id> tokens, bool draft) {
  sequence& q = at(s);
  if (n < 0) return {errc::bad_argument, 0};
  if (!draft && q.accepted != q.held()) return {errc::busy, 0};
  for (int32_t g = 0; draft && g < groups(); ++g) {
    if (!group(g).in_step()) continue;
    const int32_t next = q.sealed[static_cast<size_t>(g)] / group(g).block_size;
    while (n > 0 && group(g).reads_packed(next, q.held() + n)) --n;
  }
  if (q.held() + n > rules_.max_tokens) return refuse(errc::too_long);
  if (n == 0) return {};
  std::vector<demand> d(rules_.groups.size());
  int32_t sum = 0;
  if (const errc e = feasible(q, n, d, sum); e != errc::ok) return refuse(e);
  while (int64_t{charged(q.account)} + sum > rules_.limits[static_cast<size_t>(q.account)] &&
         evict_one(q.account)) {
  }
  for (int32_t g = 0; g < groups(); ++g) grow(q, g, d[static_cast<size_t>(g)]);
  for (int32_t i = 0; i < n; ++i) {
    const uint64_t before = q.content.empty() ? 0 : q.content.back();
    const int64_t label = label_of(q.who, q.held() / rules_.unit());
    q.text.push_back(tokens[static_cast<size_t>(i)]);
    if (!draft) {
      q.accepted = q.held();
      seal_in_step(q);
    }
    q.content.push_back(content_after(before, q.text.back(), label, forms_read(q, q.held())));
  }
  counters_.tokens_extended += static_cast<uint64_t>(n);
  return {errc::ok, n};
}

int32_t oracle::sealed_at(const sequence& q, int32_t g, int32_t tokens) const {
  const group_rule& x = group(g);
  const auto k = static_cast<size_t>(g);
  if (!x.in_step()) return q.sealed[k];
  int32_t n = q.packed[k];
  while (n < q.sealed[k] && x.reads_packed(n / x.block_size, tokens)) n += x.block_size;
  return n;
}

uint64_t oracle::forms_read(const sequence& q, int32_t tokens) const {
  uint64_t forms = 0;
  for (int32_t g = 0; g < groups(); ++g) {
    if (group(g).lossy) forms = forms * 1009 + static_cast<uint64_t>(sealed_at(q, g, tokens));
  }
  return forms;
}

std::vector<uint64_t> oracle::cold(const std::vector<token_id>& text, const sharing& units) const {
  std::vector<uint64_t> out;
  for (int32_t t = 0; t < static_cast<int32_t>(text.size()); ++t) {
    uint64_t forms = 0;
    for (const group_rule& x : rules_.groups) {
      if (!x.lossy) continue;
      int32_t n = 0;  // with deferred seals a prompt is computed exactly
      while (x.in_step() && x.reads_packed(n / x.block_size, t + 1)) n += x.block_size;
      forms = forms * 1009 + static_cast<uint64_t>(n);
    }
    out.push_back(content_after(out.empty() ? 0 : out.back(), text[static_cast<size_t>(t)],
                                label_of(units, t / rules_.unit()), forms));
  }
  return out;
}

void oracle::seal_in_step(sequence& q) {
  for (int32_t g = 0; g < groups(); ++g) {
    const auto k = static_cast<size_t>(g);
    const group_rule& x = group(g);
    while (x.in_step() && x.reads_packed(q.sealed[k] / x.block_size, q.accepted)) {
      const auto column = static_cast<size_t>(q.sealed[k] / x.block_size);
      block& b = of(g, q.table[k][column]);
      if (!b.packed) seals_.push_back({g, q.open[k][column], q.table[k][column]});
      b.packed = true;
      q.sealed[k] += x.block_size;
    }
  }
}

// Seals of this step that would not have come with `n` tokens have not come.
void oracle::reopen(sequence& q, int32_t n) {
  for (int32_t g = 0; g < groups(); ++g) {
    const auto k = static_cast<size_t>(g);
    const group_rule& x = group(g);
    if (!x.lossy) continue;
    q.packed[k] = std::min(q.packed[k], n);
    while (q.sealed[k] > q.packed[k] && !x.reads_packed(q.sealed[k] / x.block_size - 1, n)) {
      q.sealed[k] -= x.block_size;
      const auto column = static_cast<size_t>(q.sealed[k] / x.block_size);
      if (column >= q.table[k].size()) continue;
      if (!immutable(g, q.table[k][column])) cancel_seal(g, q.table[k][column]);
    }
  }
}

int32_t oracle::seals_due(const sequence& q, int32_t g) const {
  const group_rule& x = group(g);
  int32_t n = 0;
  const int32_t first = q.sealed[static_cast<size_t>(g)] / x.block_size;
  while (x.lossy && x.deferred && x.reads_packed(first + n, q.accepted)) ++n;
  return n;
}

void oracle::shrink(sequence& q, int32_t n) {
  q.text.resize(static_cast<size_t>(n));
  q.content.resize(static_cast<size_t>(n));
  q.written = std::min(q.written, n);
  for (size_t g = 0; g < q.table.size(); ++g) {
    const group_rule& x = rules_.groups[g];
    q.table[g].resize(static_cast<size_t>((x.stored(n) + x.block_size - 1) / x.block_size));
    if (x.lossy) q.open[g].resize(q.table[g].size());
  }
  counted_ = false;
  drop_dead_seals();
}

answer oracle::accept(int32_t s, int32_t n) {
  sequence& q = at(s);
  if (n < 0 || n > q.held() - q.accepted) return {errc::bad_argument, 0};
  q.accepted += n;
  shrink(q, q.accepted);
  return {};
}

answer oracle::settle(int32_t s) {
  sequence& q = at(s);
  int32_t due = 0;
  for (int32_t g = 0; g < groups(); ++g) due += seals_due(q, g);
  if (queued_ + due > rules_.commands) return {errc::busy, 0};
  for (int32_t g = 0; g < groups(); ++g) {
    const auto k = static_cast<size_t>(g);
    for (int32_t n = seals_due(q, g); n > 0; --n) {
      const auto column = static_cast<size_t>(q.sealed[k] / group(g).block_size);
      block& b = of(g, q.table[k][column]);
      queued_ += !b.packed;
      b.packed = true;
      q.open[k][column] = absent;
      q.sealed[k] += group(g).block_size;
      q.packed[k] = q.sealed[k];
    }
  }
  return {};
}

answer oracle::truncate(int32_t s, int32_t n) {
  sequence& q = at(s);
  if (n < 0 || n > q.held()) return {errc::bad_argument, 0};
  n = std::min(n, q.accepted);
  const auto possible = [&](int32_t m) {
    for (size_t g = 0; g < q.packed.size(); ++g) {
      const group_rule& x = rules_.groups[g];
      if (x.lossy && m < q.packed[g] && m % x.block_size != 0) return false;
    }
    return true;
  };
  while (!possible(n)) --n;
  shrink(q, n);
  q.accepted = n;
  reopen(q, n);
  unpin_from(q, static_cast<size_t>(n / rules_.unit()));
  return {errc::ok, n};
}

// --- publishing ---

int32_t oracle::store(const sequence& q, int32_t parent, int64_t label, std::span<const token_id> tokens) {
  const int32_t used =
      static_cast<int32_t>(std::count_if(node_.begin(), node_.end(), [](const node& n) { return n.alive; }));
  if (used == rules_.nodes && !evict_one(q.account)) return absent;
  size_t i = 0;
  while (i < node_.size() && node_[i].alive) ++i;
  if (i == node_.size()) node_.emplace_back();
  node n;
  n.alive = true;
  n.parent = parent;
  n.label = label;
  n.lane = q.account;
  n.tokens.assign(tokens.begin(), tokens.end());
  n.born = ++order_;
  n.stored = clock_;
  n.last = clock_;
  n.time = now_;
  n.priority = q.priority;
  n.priority_ms = q.priority_ms;
  const auto from = static_cast<std::ptrdiff_t>(q.path.size() * tokens.size());
  n.content.assign(q.content.begin() + from, q.content.begin() + from + rules_.unit());
  for (size_t g = 0; g < q.table.size(); ++g) {
    if (rules_.groups[g].first_only) {
      n.blocks.push_back({q.path.empty() ? q.table[g][0] : absent});
      continue;
    }
    const int32_t per = rules_.unit() / rules_.groups[g].block_size;
    const auto first = q.table[g].begin() + static_cast<std::ptrdiff_t>(q.path.size()) * per;
    n.blocks.emplace_back(first, first + per);
  }
  node_[i] = std::move(n);
  counted_ = false;
  ++counters_.nodes_stored;
  if (rules_.by_naive_order()) {
    node_meta m = meta_of(static_cast<int32_t>(i));
    m.uses = 1;  // of q, which is about to hold it
    naive_.stored(static_cast<int32_t>(i), q.account, m);
  }
  report({true, static_cast<int32_t>(i)});
  return static_cast<int32_t>(i);
}

answer oracle::commit(int32_t s, std::span<const token_id> text) {
  sequence& q = at(s);
  const auto unit = static_cast<size_t>(rules_.unit());
  size_t limit = std::min(text.size(), static_cast<size_t>(q.accepted));
  for (size_t g = 0; g < q.sealed.size(); ++g) {
    if (rules_.groups[g].lossy) limit = std::min(limit, static_cast<size_t>(q.sealed[g]));
  }
  // The horizon by its meaning: where the content begins to be another one than without any prefix.
  const std::vector<uint64_t> alone = cold(q.text, q.who);
  for (size_t t = 0; t < limit; ++t) {
    if (alone[t] != q.content[t]) limit = t;
  }
  if (!q.path.empty() && text.size() >= q.path.size() * unit) {
    const auto& last = node_[static_cast<size_t>(q.path.back())].tokens;
    if (!std::equal(last.begin(), last.end(),
                    text.begin() + static_cast<std::ptrdiff_t>((q.path.size() - 1) * unit))) {
      return {errc::bad_argument, 0};
    }
  }
  while ((q.path.size() + 1) * unit <= limit) {
    const int32_t parent = q.path.empty() ? absent : q.path.back();
    const int64_t label = label_of(q.who, static_cast<int32_t>(q.path.size()));
    const auto tokens = text.subspan(q.path.size() * unit, unit);
    int32_t x = child(parent, label, tokens);
    if (x != absent) {
      for (size_t g = 0; g < q.table.size(); ++g) {
        if (rules_.groups[g].first_only && !q.path.empty()) continue;
        const auto& theirs = node_[static_cast<size_t>(x)].blocks[g];
        std::copy(theirs.begin(), theirs.end(),
                  q.table[g].begin() + static_cast<std::ptrdiff_t>(q.path.size() * theirs.size()));
      }
      counted_ = false;
      drop_dead_seals();
    } else if ((x = store(q, parent, label, tokens)) == absent) {
      break;
    }
    pin(q, x);
  }
  return {errc::ok, static_cast<int32_t>(q.path.size() * unit)};
}

// --- several sequences ---

answer oracle::fork(int32_t s, int32_t to) {
  if (at(s).accepted != at(s).held()) return {errc::busy, 0};
  if (vacant() == 0) return {errc::out_of_sequences, 0};
  sequence copy = at(s);
  const std::vector<int32_t> path = std::move(copy.path);
  copy.path.clear();
  for (const int32_t x : path) pin(copy, x);
  at(to) = std::move(copy);
  counted_ = false;
  ++counters_.sequences_opened;
  return {};
}

answer oracle::assign(int32_t dst, int32_t src) {
  if (dst == src) return {};
  sequence& d = at(dst);
  const sequence& s = at(src);
  if (d.account != s.account) return {errc::bad_argument, 0};
  const auto same_part = [](const part& a, const part& b) {
    return a.label == b.label && a.first == b.first;
  };
  if (!std::equal(d.who.begin(), d.who.end(), s.who.begin(), s.who.end(), same_part))
    return {errc::bad_argument, 0};
  if (d.accepted != d.held() || s.accepted != s.held()) return {errc::busy, 0};
  int32_t touched = 0;
  const auto differing = [](const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    int32_t n = 0;
    for (size_t i = 0; i < std::max(a.size(), b.size()); ++i)
      n += i >= a.size() || i >= b.size() || a[i] != b[i];
    return n;
  };
  for (size_t g = 0; g < d.table.size(); ++g)
    touched += differing(d.table[g], s.table[g]) + differing(d.open[g], s.open[g]);
  size_t same = 0;
  while (same < d.path.size() && same < s.path.size() && d.path[same] == s.path[same]) ++same;
  sequence copy = s;
  copy.path.resize(same);
  for (size_t i = same; i < s.path.size(); ++i) pin(copy, s.path[i]);
  unpin_from(d, same);
  d = std::move(copy);
  counted_ = false;
  drop_dead_seals();
  return {errc::ok, touched};
}

answer oracle::close(int32_t s) {
  ++clock_;
  unpin_from(at(s), 0);
  at(s) = {};
  counted_ = false;
  drop_dead_seals();
  return {};
}

void oracle::report(event e) {
  if (rules_.events == 0) return;
  if (static_cast<int32_t>(events_.size()) == rules_.events) {
    ++counters_.events_lost;
  } else {
    events_.push_back(e);
  }
}

void oracle::end_step() {
  for (sequence& q : seq_) {
    for (int32_t g = 0; q.live && g < groups(); ++g) {
      const auto k = static_cast<size_t>(g);
      for (; q.packed[k] < q.sealed[k]; q.packed[k] += group(g).block_size) {
        q.open[k][static_cast<size_t>(q.packed[k] / group(g).block_size)] = absent;
      }
    }
  }
  seals_.clear();
  events_.clear();
  queued_ = 0;
  ++counters_.steps;
}

// Names of blocks and nodes are replaced by the order in which they are met, times by their order.
void oracle::key(std::vector<int32_t>& out) const {
  out.clear();
  std::vector<int32_t> order;
  for (int32_t i = 0; i < static_cast<int32_t>(node_.size()); ++i) {
    if (node_[static_cast<size_t>(i)].alive) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return node_[static_cast<size_t>(a)].born < node_[static_cast<size_t>(b)].born;
  });
  renaming seen{std::vector<std::map<int32_t, int32_t>>(rules_.groups.size()),
                std::vector<std::map<int32_t, int32_t>>(rules_.groups.size()), order};
  for (const sequence& q : seq_) key_of(q, seen, out);
  std::vector<uint64_t> times;
  for (const int32_t x : order) times.push_back(rank_time(node_[static_cast<size_t>(x)]));
  std::sort(times.begin(), times.end());
  for (const int32_t x : order) {
    const node& n = node_[static_cast<size_t>(x)];
    out.push_back(seen.place(n.parent));
    out.push_back(static_cast<int32_t>(n.label) * 64 + n.lane);
    out.insert(out.end(), n.tokens.begin(), n.tokens.end());
    const auto time = std::lower_bound(times.begin(), times.end(), rank_time(n));
    out.push_back(static_cast<int32_t>(time - times.begin()));
    if (rules_.by_frequency()) out.push_back(static_cast<int32_t>(n.uses) * 64 + n.id);
    key_of_blocks(n.blocks, seen, out);
  }
}

void oracle::key_of(const sequence& q, renaming& seen, std::vector<int32_t>& out) const {
  out.push_back(q.live ? 1 + q.account : 0);
  if (!q.live) return;
  for (const part& p : q.who) out.push_back(static_cast<int32_t>(p.label));
  out.push_back(q.held() * 64 + q.accepted);
  out.insert(out.end(), q.text.begin(), q.text.end());
  out.insert(out.end(), q.sealed.begin(), q.sealed.end());
  out.insert(out.end(), q.packed.begin(), q.packed.end());
  for (const uint64_t x : q.content) out.push_back(static_cast<int32_t>(x));
  key_of_blocks(q.table, seen, out);
  for (size_t g = 0; g < q.open.size(); ++g) {
    for (const int32_t b : q.open[g]) out.push_back(renaming::rename(seen.open[g], b));
  }
  for (const int32_t x : q.path) out.push_back(seen.place(x));
}

void oracle::key_of_blocks(const std::vector<std::vector<int32_t>>& names, renaming& seen,
                           std::vector<int32_t>& out) const {
  for (size_t g = 0; g < names.size(); ++g) {
    for (const int32_t b : names[g]) {
      if (b == absent) continue;
      const block& x = of(static_cast<int32_t>(g), b);
      out.push_back(renaming::rename(seen.block[g], b));
      out.push_back(x.owner * 2 + x.packed);
    }
  }
}

int32_t oracle::renaming::rename(std::map<int32_t, int32_t>& m, int32_t x) {
  return x == absent ? absent : m.emplace(x, static_cast<int32_t>(m.size())).first->second;
}

int32_t oracle::renaming::place(int32_t node) const {
  if (node == absent) return absent;
  return static_cast<int32_t>(std::find(order.begin(), order.end(), node) - order.begin());
}

uint64_t oracle::rank_time(const node& n) const {
  return rules_.by_frequency() ? n.last : n.released;
}

}  // namespace kvcache::test
