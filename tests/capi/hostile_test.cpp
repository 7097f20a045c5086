// SPDX-License-Identifier: Apache-2.0
// A caller who passes anything: random handles, counts and struct fields (pointers only as far as the memory
// behind them goes). Whatever is answered, the caches stay whole, and under the sanitizers nothing else is
// touched.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <vector>

#include "kvcache/core/config.hpp"
#include "kvcache/kvcache.h"
#include "support/environment.hpp"

namespace {

using kvcache::test::effort;
using kvcache::test::test_seed;

constexpr int32_t room = 64;

class attacker {
 public:
  explicit attacker(uint64_t seed) : random_(seed) {
    for (kvc_cache& c : caches_) c = {0};
    std::memset(bytes_, 0x5a, sizeof bytes_);
  }
  ~attacker() {
    for (const kvc_cache c : caches_) (void)kvc_cache_destroy(c, nullptr);
  }

  void act() {
    error_ = random_() % 4 == 0 ? nullptr : &filled_;
    const uint64_t what = random_() % 32;
    if (what == 0 && random_() % 8 == 0) return create();
    if (what == 1 && random_() % 512 == 0) {
      const kvc_cache c = any_cache();
      (void)kvc_cache_destroy(c, error_);
      return forget_all(c);
    }
    if (what < 8) return open();
    if (what < 22) return verb(what);
    if (what < 26) return view();
    whole(what);
  }
  void check() {
    for (const kvc_cache c : caches_) {
      const char* broken = nullptr;
      if (kvc_cache_check(c, &broken, nullptr) != KVC_OK) continue;
      INFO(broken);
      REQUIRE(broken == nullptr);
    }
  }
  int64_t succeeded = 0;

 private:
  struct opened {
    uint64_t cache;
    kvc_sequence sequence;
  };

  // Mostly small, sometimes a border.
  int32_t number() {
    static constexpr int32_t borders[] = {
        -1, 0,   1,   INT32_MAX, INT32_MIN, INT32_MAX / 2, 1 << 20, 1 << 30, (1 << 20) + 1,
        -2, 255, 256, 65535,     65536};
    if (random_() % 4 != 0) return static_cast<int32_t>(random_() % 12);
    if (random_() % 2 != 0) return borders[random_() % (sizeof borders / sizeof borders[0])];
    return static_cast<int32_t>(random_());
  }
  int32_t within(int32_t most) {
    return random_() % 8 == 0 ? -1 : static_cast<int32_t>(random_() % (most + 1));
  }
  kvc_cache any_cache() {
    if (random_() % 32 == 0) return {random_()};
    picked_ = caches_[random_() % 3];
    if (random_() % 32 == 0) return {picked_.id ^ uint64_t{1} << random_() % 64};
    return picked_;
  }
  // Usually a sequence of the cache that was picked last.
  kvc_sequence any_sequence() {
    if (random_() % 32 == 0 || known_.empty()) return {random_()};
    size_t i = random_() % known_.size();
    for (int tries = 0; tries < 8 && known_[i].cache != picked_.id; ++tries) i = random_() % known_.size();
    if (random_() % 32 == 0) return {known_[i].sequence.id ^ uint64_t{1} << random_() % 64};
    return known_[i].sequence;
  }
  uint32_t size(size_t right) {
    return random_() % 12 == 0 ? static_cast<uint32_t>(number()) : uint32_t(right);
  }
  template <class T>
  T* maybe(T* p) {
    return random_() % 48 == 0 ? nullptr : p;
  }
  void remember(kvc_sequence s) {
    if (known_.size() < 20) {
      known_.push_back({picked_.id, s});
    } else {
      known_[random_() % known_.size()] = {picked_.id, s};
    }
  }
  // Now and then a dead handle is kept, to be used again.
  template <class Gone>
  void forget(Gone gone) {
    if (random_() % 16 == 0) return;
    std::erase_if(known_, gone);
  }
  void forget_all(kvc_cache c) {
    forget([c](const opened& o) { return o.cache == c.id; });
  }

  kvc_group_config any_group() {
    kvc_group_config g{};
    g.struct_size = size(sizeof g);
    g.block_size = random_() % 3 != 0 ? 4 << random_() % 2 : number();
    g.layers = random_() % 4 != 0 ? 1 : number();
    g.kv_heads = random_() % 4 != 0 ? 1 : number();
    g.head_dim_k = random_() % 4 != 0 ? 8 : number();
    g.head_dim_v = random_() % 4 != 0 ? 0 : number();
    g.type = random_() % 4 != 0 ? 0 : number();
    g.total = random_() % 4 != 0 ? 12 : within(40);
    g.open = random_() % 4 != 0 ? 0 : within(40);
    g.v_aliases_k = random_() % 8 == 0;
    g.window = random_() % 16 == 0 ? number() : 0;
    g.format.lossy = random_() % 3 == 0;
    g.format.residual = random_() % 3 == 0 ? number() : 0;
    g.format.block = random_() % 8 == 0 ? static_cast<int64_t>(random_()) : 0;
    g.format.open_block = random_() % 8 == 0 ? static_cast<int64_t>(random_()) : 0;
    g.format.fingerprint = random_();
    g.format.deferred = g.format.lossy != 0 ? random_() % 3 == 0 : random_() % 32 == 0;
    g.format.exempt = random_() % 8 == 0 ? number() : 0;
    if (random_() % 8 == 0) {
      g.first_only = 1;
      g.block_size = random_() % 8 == 0 ? number() : 1 << random_() % 3;
      if (random_() % 8 != 0) g.format = {};
    }
    return g;
  }
  void create() {
    kvc_group_config groups[8];
    for (kvc_group_config& g : groups) g = any_group();
    static const char* names[] = {"lru",     "lfu",   "slru", "ttl:1",          "priority", "gdsf",
                                  "s3_fifo", "two_q", "",     "no such policy", "ttl:-1",   "lru:x"};
    int32_t limits[4] = {number(), 20, 40, number()};
    kvc_cache_config c{};
    c.struct_size = size(sizeof c);
    c.n_groups = random_() % 4 != 0 ? 1 + static_cast<int32_t>(random_() % 2) : within(8);
    c.groups = maybe(groups);
    c.capacity = random_() % 2 != 0 ? 0 : static_cast<int64_t>(random_() >> random_() % 64);
    c.eviction = random_() % 3 == 0 ? nullptr : names[random_() % 8 + (random_() % 8 == 0 ? 4 : 0)];
    c.account_limits = random_() % 2 == 0 ? limits : nullptr;
    c.n_accounts = random_() % 8 == 0 ? within(4) : (c.account_limits != nullptr ? 3 : 0);
    c.max_sequences = random_() % 8 == 0 ? within(100) : 5;
    c.max_sequence_tokens = random_() % 4 == 0 ? within(500) : 0;
    c.max_nodes = random_() % 4 == 0 ? within(50) : 0;
    c.max_scopes = random_() % 4 == 0 ? within(5) : 0;
    c.max_events = random_() % 2 == 0 ? within(20) : 0;
    c.max_commands = random_() % 4 == 0 ? number() : 0;
    c.max_gathers = random_() % 16 == 0 ? within(20) : 0;
    c.max_step_tokens = random_() % 4 == 0 ? within(100) : 0;
    kvc_geometry geometry{};
    geometry.struct_size = size(sizeof geometry);
    (void)kvc_plan_cache(&c, maybe(&geometry), error_);
    int64_t bytes = 0;
    int32_t n = 0;
    (void)kvc_plan_sequences(&c, number(), maybe(&bytes), maybe(&n), error_);
    (void)kvc_plan_context(&c, number(), maybe(&n), error_);
    // What is planned may be of any size; what is built must not take the machine's memory.
    c.capacity = std::min<int64_t>(c.capacity, 1 << 20);
    for (kvc_group_config& g : groups) g.format.residual = std::min(g.format.residual, 1000);
    kvc_cache made{};
    if (kvc_cache_create(&c, maybe(&made), error_) != KVC_OK) return;
    ++succeeded;
    const size_t i = random_() % 3;
    (void)kvc_cache_destroy(caches_[i], error_);
    forget_all(caches_[i]);
    caches_[i] = made;
  }

  kvc_bytes any_bytes() {
    if (random_() % 2 == 0) return {nullptr, random_() % 16 == 0 ? random_() : 0};
    if (random_() % 16 == 0) return {bytes_, random_()};  // refused before it is followed
    return {bytes_, random_() % (random_() % 8 == 0 ? sizeof bytes_ : 4)};
  }
  const kvc_scope* any_scope() {
    for (kvc_scope& s : levels_) {
      s = {};
      s.struct_size = size(sizeof s);
      s.kind = random_() % 12 == 0 ? number() : 1 + static_cast<int32_t>(random_() % 2);
      if (s.kind == KVC_SCOPE_TENANT || random_() % 12 == 0) s.salt = {bytes_, random_() % 3};
      if (random_() % 4 == 0) s.adapter = any_bytes();
      if (random_() % 4 == 0) s.media = any_bytes();
      if (random_() % 8 == 0) s.generation = random_();
      if (random_() % 8 == 0) s.weights = random_();
      s.first_token = &s == levels_ ? (random_() % 12 == 0 ? number() : 0) : number();
      s.narrower = random_() % 3 == 0 ? &levels_[random_() % 5] : nullptr;
    }
    return maybe(&levels_[0]);
  }
  void any_text() {
    for (int32_t i = 0; i < room; ++i) text_[i] = i + static_cast<int32_t>(random_() % 8 == 0);
  }
  void open() {
    kvc_open_options o{};
    o.struct_size = size(sizeof o);
    o.account = random_() % 4 == 0 ? number() : 0;
    o.recompute = random_() % 4 == 0 ? number() : 0;
    o.priority = random_() % 4 == 0 ? number() : 0;
    o.priority_ms = static_cast<uint32_t>(random_() % 4 == 0 ? number() : 0);
    any_text();
    kvc_sequence s{};
    int32_t n = 0;
    const kvc_scope* scope = any_scope();
    (void)kvc_peek(any_cache(), scope, maybe(text_), within(room), number(), maybe(&n), error_);
    if (kvc_open(any_cache(), scope, maybe(text_), within(room), random_() % 2 != 0 ? &o : nullptr, maybe(&s),
                 maybe(&n), error_) == KVC_OK) {
      ++succeeded;
      remember(s);
    }
  }

  kvc_status drop(kvc_cache c, kvc_sequence s) {
    const auto some = [this] { return random_() % 8 == 0 ? number() : static_cast<int32_t>(random_() % 5); };
    kvc_drop d{};
    d.struct_size = size(sizeof d);
    d.form = some();
    d.keep = some();
    d.sinks = some() / 2;
    d.recent = some() / 2;
    d.move_sinks = some();
    d.overwritten = some();
    d.at_a_loss = some();
    int32_t dropped = 0, returned = 0;
    return kvc_retain(c, s, maybe(&d), maybe(&dropped), maybe(&returned), error_);
  }

  void verb(uint64_t what) {
    const kvc_cache c = any_cache();
    const kvc_sequence s = any_sequence();
    kvc_sequence out{};
    int32_t n = random_() % 4 != 0 ? static_cast<int32_t>(random_() % 4) : number();
    kvc_status done = KVC_OK;
    any_text();
    switch (what) {
      case 8:
      case 9:
      case 10:
        done = kvc_extend(c, s, n, random_() % 4 == 0 ? number() : 0, maybe(&n), error_);
        break;
      case 11:
        done = kvc_accept(c, s, n, error_);
        break;
      case 12:
        done = kvc_settle(c, s, error_);
        break;
      case 13:
        done = kvc_truncate(c, s, n, maybe(&n), error_);
        break;
      case 14:
      case 15:
      case 16:
        done = kvc_commit(c, s, maybe(text_), within(room), maybe(&n), error_);
        break;
      case 17:
      case 18:
        done = kvc_fork(c, s, maybe(&out), error_);
        if (done == KVC_OK) remember(out);
        break;
      case 19:
        done = random_() % 2 == 0 ? kvc_assign(c, s, any_sequence(), maybe(&n), error_) : drop(c, s);
        break;
      default:
        done = kvc_close(c, s, error_);
        if (done == KVC_OK) forget([s](const opened& o) { return o.sequence.id == s.id; });
    }
    succeeded += done == KVC_OK;
  }

  void view() {
    kvc_view v{};
    kvc_sequence sequences[4];
    int32_t rows[4], n = 0;
    for (int32_t i = 0; i < 4; ++i) {
      sequences[i] = any_sequence();
      rows[i] = random_() % 4 == 0 ? number() : static_cast<int32_t>(random_() % 3);
    }
    v.struct_size = size(sizeof v);
    v.group = random_() % 4 == 0 ? number() : 0;
    v.n = within(4);
    v.table_columns = within(room);
    v.max_rows = within(room);
    v.sequences = maybe(sequences);
    v.rows = maybe(rows);
    // Exactly as large as stated, so that a write beyond is found.
    const auto cells =
        static_cast<size_t>(std::max(v.n, 0)) * static_cast<size_t>(std::max(v.table_columns, 0));
    const auto new_rows = static_cast<size_t>(std::max(v.max_rows, 0));
    const auto count = static_cast<size_t>(std::max(v.n, 0));
    std::vector<int32_t> table(cells), open_table(cells), kv_len(count), sealed(count), start(count + 1),
        pos(new_rows);
    std::vector<int32_t> row_sealed(new_rows), exempt_table(count);
    std::vector<int64_t> slot(new_rows), open_slot(new_rows), exempt_slot(new_rows);
    v.table = maybe(table.data());
    v.open_table = maybe(open_table.data());
    v.kv_len = maybe(kv_len.data());
    v.sealed = maybe(sealed.data());
    v.q_start = maybe(start.data());
    v.q_pos = maybe(pos.data());
    v.slot = maybe(slot.data());
    v.open_slot = maybe(open_slot.data());
    v.row_sealed = maybe(row_sealed.data());
    if (random_() % 2 == 0) v.exempt_group = random_() % 4 == 0 ? number() : 2;
    v.exempt_table = maybe(exempt_table.data());
    v.exempt_slot = maybe(exempt_slot.data());
    kvc_batch batch{};
    batch.struct_size = size(sizeof batch);
    const kvc_cache c = any_cache();
    succeeded += kvc_view_batch(c, maybe(&v), maybe(&batch), error_) == KVC_OK;
    succeeded += kvc_view_csr(c, maybe(sequences), v.n, v.group, maybe(start.data()), maybe(pos.data()),
                              static_cast<int64_t>(new_rows), maybe(kv_len.data()), error_) == KVC_OK;
    const int32_t* ids = nullptr;
    if (kvc_table(c, any_sequence(), number(), maybe(&ids), maybe(&n), error_) == KVC_OK) sum_ += sum(ids, n);
    if (kvc_open_table(c, any_sequence(), number(), maybe(&ids), maybe(&n), error_) == KVC_OK)
      sum_ += sum(ids, n);
    succeeded += kvc_sealed_at(c, any_sequence(), number(), number(), maybe(&n), error_) == KVC_OK;
    kvc_lengths l{};
    l.struct_size = size(sizeof l);
    (void)kvc_get_lengths(c, any_sequence(), maybe(&l), error_);
  }

  // Whatever geometry is asked for, what is described lies inside the memory lent.
  void planes() {
    alignas(64) static char memory[4096];
    static kvc_kv layers[4];
    kvc_planes p{};
    p.struct_size = size(sizeof p);
    p.layers = random_() % 8 == 0 ? within(4) : 1 + static_cast<int32_t>(random_() % 4);
    p.kv_heads = number();
    p.dim_k = random_() % 2 == 0 ? 8 : number();
    p.dim_v = random_() % 2 == 0 ? 8 : number();
    p.type = number();
    p.v_aliases_k = random_() % 2 == 0;
    p.block = random_() % 2 == 0 ? 8 : number();
    p.blocks = number();
    p.group = number();
    p.order = within(1);
    p.memory = {maybe(memory), random_() % 4 == 0 ? random_() % sizeof memory : sizeof memory};
    int64_t bytes = -1;
    if (kvc_cpu_planes(&p, maybe(layers), &bytes, error_) != KVC_OK) return;
    ++succeeded;
    if (p.memory.ptr == nullptr) return;
    REQUIRE((bytes > 0 && static_cast<size_t>(bytes) <= sizeof memory));
    for (int32_t i = 0; i < p.layers; ++i) {
      const kvc_plane& k = layers[i].k;
      const int64_t last = (layers[i].blocks - 1) * k.block_stride +
                           (layers[i].kv_heads - 1) * k.head_stride + (layers[i].block - 1) * k.token_stride +
                           (layers[i].dim_k - 1) * k.dim_stride;
      REQUIRE(static_cast<char*>(k.data) >= memory);
      REQUIRE(static_cast<char*>(k.data) + last < memory + bytes);
    }
  }

  void whole(uint64_t what) {
    const kvc_cache c = any_cache();
    int32_t n = 0;
    const int32_t* tokens = nullptr;
    const kvc_command* commands = nullptr;
    const kvc_event* events = nullptr;
    kvc_stats stats{};
    stats.struct_size = size(sizeof stats);
    switch (what) {
      case 26:
        if (kvc_cache_tokens(c, number(), maybe(&tokens), maybe(&n), error_) == KVC_OK)
          sum_ += sum(tokens, n);
        return;
      case 27:
        (void)kvc_cache_evict(c, random_() % 4 == 0 ? number() : 1, maybe(&n), error_);
        (void)kvc_cache_set_time(c, random_() >> random_() % 64, maybe(&n), error_);
        return;
      case 28:
        if (random_() % 8 == 0) (void)kvc_cache_reset(c, error_);
        (void)kvc_cache_charged(c, number(), maybe(&n), error_);
        return;
      case 29:
        if (kvc_cache_commands(c, maybe(&commands), maybe(&n), error_) == KVC_OK) {
          for (int32_t i = 0; i < n; ++i) sum_ += commands[i].dst;
        }
        if (kvc_cache_seals(c, maybe(&commands), maybe(&n), error_) == KVC_OK) {
          for (int32_t i = 0; i < n; ++i) sum_ += commands[i].dst;
        }
        if (kvc_cache_gather_ids(c, maybe(&tokens), maybe(&n), error_) == KVC_OK) sum_ += sum(tokens, n);
        if (kvc_cache_events(c, maybe(&events), maybe(&n), error_) == KVC_OK) {
          for (int32_t i = 0; i < n; ++i) sum_ += events[i].node;
        }
        return;
      case 30:
        planes();
        (void)kvc_cache_board(c, maybe(&stats), error_);
        (void)kvc_cache_count(c, maybe(&stats), error_);
        return;
      default:
        (void)kvc_cache_end_step(c, error_);
    }
  }
  static int64_t sum(const int32_t* p, int32_t n) {
    int64_t s = 0;
    for (int32_t i = 0; i < n; ++i) s += p[i];
    return s;
  }

  std::mt19937_64 random_;
  kvc_cache caches_[3];
  std::vector<opened> known_;
  kvc_cache picked_{};
  kvc_scope levels_[5];
  kvc_error filled_{};
  kvc_error* error_ = nullptr;
  int32_t text_[room];
  char bytes_[200];
  int64_t sum_ = 0;
};

}  // namespace

TEST_CASE("whatever a caller passes, the caches stay whole") {
  attacker a(test_seed("capi hostile", 7));
  const uint64_t violations = kvcache::contract_violations();
  const int64_t n = effort(300000);
  for (int64_t i = 0; i < n; ++i) {
    INFO("operation " << i);
    a.act();
    if (i % 64 == 0) a.check();
  }
  CHECK(a.succeeded > n / 20);
  CHECK(kvcache::contract_violations() == violations);
}
