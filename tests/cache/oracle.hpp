// SPDX-License-Identifier: Apache-2.0
#pragma once
// A cache as one would write it without any thought of speed: sequences are lists of tokens and of blocks,
// blocks are names, prefixes are a list of nodes, and every count is found by looking at all of it. It
// answers what the real cache must answer to each call; ids are not compared, who shares what is.
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "kvcache/cache/stats.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"
#include "support/naive_order.hpp"

namespace kvcache::test {

struct group_rule {
  int32_t block_size = 1;
  int32_t total = 0;
  int32_t open = 0;
  bool lossy = false;
  int32_t residual = 0;
  bool deferred = false;
  bool first_only = false;

  bool in_step() const noexcept { return lossy && !deferred; }
  /// Of `tokens` tokens, those that the group stores.
  int32_t stored(int32_t tokens) const noexcept {
    return first_only && tokens > block_size ? block_size : tokens;
  }
  /// Whether the query that is the `tokens`-th token of a text reads block `j` packed.
  bool reads_packed(int64_t j, int32_t tokens) const noexcept {
    return (j + 1) * block_size + residual <= tokens;
  }
};

/// What bounds a cache.
struct rules {
  std::vector<group_rule> groups;
  int32_t sequences = 1;
  int32_t max_tokens = 1;
  int32_t nodes = 0;
  int32_t scopes = 1;
  int32_t commands = 1;
  int32_t events = 0;
  std::vector<int32_t> limits{INT32_MAX};  // per account
  eviction_choice order;                   // lru

  bool by_frequency() const noexcept { return order.policy == 1; }
  bool by_time() const noexcept { return std::string_view(eviction_name(order.policy)) == "ttl"; }
  /// Whether the model asks support/naive_order.hpp; else it knows the order itself.
  bool by_naive_order() const noexcept { return order.policy > 1 && !by_time(); }
  bool monotone() const noexcept { return order.policy == 0 || by_time(); }
  int32_t unit() const noexcept;
  int32_t accounts() const noexcept { return static_cast<int32_t>(limits.size()); }
};

/// A sharing scope: `label` holds from token `first` on. Where it begins is part of what it is.
struct part {
  int64_t label = 0;
  int32_t first = 0;
};
using sharing = std::vector<part>;

struct answer {
  errc code = errc::ok;
  int32_t value = 0;
};

/// What a slot must hold: a fingerprint of the whole text up to its token, of who computed it under which
/// scope and of what every query of it read packed, as real keys and values depend on all of these.
uint64_t content_after(uint64_t before, token_id token, int64_t label, uint64_t forms) noexcept;
/// What becomes of a slot's content when its block is packed.
uint64_t packed_form(uint64_t content) noexcept;

/// The model. Verbs are those of the cache; `s` is the caller's number of a sequence.
class oracle {
 public:
  static constexpr int32_t absent = -1;

  struct sequence {
    bool live = false;
    int32_t account = 0;
    int32_t priority = 0;  // of what it finds and indexes
    uint32_t priority_ms = 0;
    sharing who;                    // with `first` in units, labels joined where they begin in one unit
    std::vector<token_id> text;     // held
    std::vector<uint64_t> content;  // of each token
    int32_t accepted = 0;
    int32_t reused = 0;
    int32_t written = 0;                            // tokens that the data plane has stored
    std::vector<std::vector<int32_t>> table, open;  // per group: names of blocks
    std::vector<int32_t> sealed;                    // per group, tokens
    std::vector<int32_t> packed;                    // of these, those without an open form
    std::vector<int32_t> path;                      // nodes

    int32_t held() const noexcept { return static_cast<int32_t>(text.size()); }
  };
  struct node {
    bool alive = false;
    int32_t parent = absent;
    int64_t label = 0;
    std::vector<token_id> tokens;
    std::vector<uint64_t> content;
    std::vector<std::vector<int32_t>> blocks;  // per group
    int32_t lane = 0;
    uint64_t last = 0;
    uint32_t uses = 0;
    uint64_t released = 0;  // order in which nodes were unpinned
    uint64_t born = 0;      // order of creation
    uint64_t stored = 0;    // the clock then
    uint64_t time = 0;      // of the last access, ns
    int32_t priority = 0;
    uint32_t priority_ms = 0;
    uint64_t entered = 0;  // `released` when it was made a candidate last
    int32_t id = absent;   // the cache's name of it, told by the driver: ties go to the lower one
  };

  struct seal {
    int32_t group, open, packed;  // names
  };
  struct event {
    bool stored;
    int32_t node;  // index if stored, the cache's id if removed
  };

  explicit oracle(rules r);

  answer open(int32_t s, std::span<const token_id> prompt, const sharing& who, int32_t account,
              int32_t recompute, int32_t priority, uint32_t priority_ms);
  int32_t set_time(uint64_t ns);
  answer extend(int32_t s, int32_t n, std::span<const token_id> tokens, bool draft);
  answer accept(int32_t s, int32_t n);
  answer settle(int32_t s);
  answer truncate(int32_t s, int32_t n);
  answer commit(int32_t s, std::span<const token_id> text);
  answer fork(int32_t s, int32_t to);
  answer assign(int32_t dst, int32_t src);
  answer close(int32_t s);
  int32_t evict(int32_t n);
  void end_step();
  void refused() { ++counters_.refusals; }  // by an injected fault

  int32_t match(std::span<const token_id> tokens, const sharing& who,
                std::vector<int32_t>* path = nullptr) const;
  stats count() const;
  int32_t charged(int32_t account) const;
  int32_t live() const;
  int32_t immutable(int32_t g, int32_t name) const;
  int32_t pins(int32_t node) const;
  /// Leading tokens of group g that the query which is the `tokens`-th token of s reads packed.
  int32_t sealed_at(const sequence& q, int32_t g, int32_t tokens) const;
  /// Contents of `text` as computed from its first token on, without any prefix.
  std::vector<uint64_t> cold(const std::vector<token_id>& text, const sharing& units) const;
  /// Sequences that hold the open block.
  int32_t open_holders(int32_t g, int32_t name) const;
  const std::vector<seal>& seals() const { return seals_; }

  const rules& bounds() const { return rules_; }
  sequence& at(int32_t s) { return seq_[static_cast<size_t>(s)]; }
  const sequence& at(int32_t s) const { return seq_[static_cast<size_t>(s)]; }
  std::vector<node>& nodes() { return node_; }
  const std::vector<node>& nodes() const { return node_; }
  const std::vector<event>& events() const { return events_; }
  /// First fault of the model's own assumptions, or null.
  const char* broken() const { return broken_; }
  /// The state without history: two oracles with equal keys answer all calls alike.
  void key(std::vector<int32_t>& out) const;

 private:
  struct block {
    int32_t owner = 0;
    bool packed = false;
    int32_t tables = 0, nodes = 0;  // found by recount
  };
  struct demand {
    int32_t blocks = 0, copy = 0, open_copy = 0;
  };

  struct renaming {
    std::vector<std::map<int32_t, int32_t>> block, open;  // per group
    const std::vector<int32_t>& order;                    // nodes by birth
    static int32_t rename(std::map<int32_t, int32_t>& m, int32_t x);
    int32_t place(int32_t node) const;
  };

  answer refuse(errc e) {
    ++counters_.refusals;
    return {e, 0};
  }
  block& of(int32_t g, int32_t name) const {
    return block_[static_cast<size_t>(g)][static_cast<size_t>(name)];
  }
  const group_rule& group(int32_t g) const { return rules_.groups[static_cast<size_t>(g)]; }
  int32_t groups() const { return static_cast<int32_t>(rules_.groups.size()); }
  void recount() const;
  int32_t free(int32_t g) const;
  int32_t cached(int32_t g) const;
  int32_t open_free(int32_t g) const;
  int32_t open_shares(int32_t g, int32_t name) const;
  int32_t cached_of(int32_t account) const;
  int32_t take(int32_t g, int32_t account);
  int32_t take_open(int32_t g);
  int32_t seals_due(const sequence& q, int32_t g) const;
  bool is_free(int32_t g, int32_t name) const;
  void drop_dead_seals();
  void cancel_seal(int32_t g, int32_t packed);
  void seal_in_step(sequence& q);
  void reopen(sequence& q, int32_t n);
  uint64_t forms_read(const sequence& q, int32_t tokens) const;
  errc feasible(const sequence& q, int32_t n, std::vector<demand>& d, int32_t& sum) const;
  void grow(sequence& q, int32_t g, const demand& d);
  void shrink(sequence& q, int32_t n);
  void pin(sequence& q, int32_t node);
  void unpin_from(sequence& q, size_t first);
  int32_t child(int32_t parent, int64_t label, std::span<const token_id> tokens) const;
  bool has_children(int32_t node) const;
  int32_t newest_child(int32_t node) const;
  int32_t best_of_lane(int32_t lane) const;
  int32_t take(int32_t lane);
  void list_candidates();
  node_meta meta_of(int32_t node) const;
  bool evict_one(int32_t lane);
  void evict_below(int32_t node);
  int32_t store(const sequence& q, int32_t parent, int64_t label, std::span<const token_id> tokens);
  sharing in_units(const sharing& who) const;
  static int64_t label_of(const sharing& units, int32_t unit);
  bool scopes_fit(const sharing& who) const;
  int32_t vacant() const;
  void report(event e);
  void key_of(const sequence& q, renaming& seen, std::vector<int32_t>& out) const;
  void key_of_blocks(const std::vector<std::vector<int32_t>>& names, renaming& seen,
                     std::vector<int32_t>& out) const;
  uint64_t rank_time(const node& n) const;

  rules rules_;
  std::vector<sequence> seq_;
  std::vector<node> node_;
  mutable std::vector<std::vector<block>> block_;  // [group][name]
  mutable bool counted_ = false;
  std::vector<seal> seals_;  // of this step
  std::vector<event> events_;
  stats counters_{};
  int32_t queued_ = 0;  // commands
  uint64_t clock_ = 0, order_ = 0, now_ = 0;
  naive_order naive_;
  const char* broken_ = nullptr;
};

}  // namespace kvcache::test
