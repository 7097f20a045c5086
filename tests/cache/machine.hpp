// SPDX-License-Identifier: Apache-2.0
#pragma once
// A cache, its model and a mock data plane side by side. apply() makes one call on all of them and compares
// everything: the answer, all counters, who shares which block, what every slot holds, and after a refusal
// every byte of the cache.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "host_memory.hpp"
#include "inside.hpp"
#include "mock_plane.hpp"
#include "operation.hpp"
#include "oracle.hpp"

namespace kvcache::test {

/// The scope that `who` describes. Labels are made from the number alone.
scope scope_of(const sharing& who);
cache_config config_of(const rules& r, std::vector<group_config>& groups);
/// Sharing number `pick`, some with segments.
sharing sharing_of(uint32_t pick, int32_t unit);

/// Hash of a run of values, order matters.
struct digest {
  uint64_t value = 0;
  void add(uint64_t x) { value = mix64(value * 0x9e3779b97f4a7c15ull + x + 1); }
};

template <class Traits>
class machine {
 public:
  using cache_type = basic_cache<Traits>;
  using handle = typename cache_type::sequence;
  using eviction = typename cache_type::eviction;
  using make_eviction = eviction (*)(const eviction_choice& order);

  machine(const rules& r, make_eviction make, uint64_t seed) : make_(make), model_(r), plane_(r, seed) {
    host_memory::start_recording();
    result<cache_type> c = cache_type::create(config_of(r, groups_), make_(r.order));
    const auto arrays = host_memory::stop_recording();
    if (!c) {
      why_ = std::string("create: ") + to_text(c.error().code) + " " + c.error().field;
      return;
    }
    cache_ = *std::move(c);
    handle_.resize(static_cast<size_t>(r.sequences) + 1);
    plan_.resize(handle_.size());
    watch(arrays);
  }

  /// Makes the call. Returns what is wrong, or nothing.
  std::string apply(const operation& o);
  /// Runs the commands, stores what was extended, packs, reads, ends the step.
  std::string step();
  /// All but the last of these.
  std::string run();
  void close_all() {
    for (int32_t s = 0; s < model_.bounds().sequences; ++s) {
      if (model_.at(s).live) (void)apply({.what = verb::close, .s = s});
    }
  }

  /// Sequence s, or the next one that is live.
  int32_t live_near(int32_t s) const {
    for (int32_t i = 0; i < model_.bounds().sequences; ++i) {
      const int32_t t = (s + i) % model_.bounds().sequences;
      if (model_.at(t).live) return t;
    }
    return s;
  }
  /// Keeps all bytes of the cache, to be compared by unchanged().
  void remember() { image_.save(); }
  bool unchanged(bool not_even_refusals);
  /// Prompts are made of texts published lately; without them a script means the same in any machine.
  void forget_texts() {
    texts_ = {};
    for (auto& p : plan_) p.clear();
  }
  /// Whether the step was run and has not ended.
  bool unfinished() const { return ran_; }
  const std::string& created() const { return why_; }
  cache_type& cache() { return cache_; }
  oracle& model() { return model_; }
  detail::core<Traits>& core() { return inside<Traits>::of(cache_); }
  /// Everything an engine can see, ids and orders included.
  uint64_t observe();

  /// Everything counted, over resets: units stored and evicted, blocks copied, refusals, tokens reused.
  std::array<uint64_t, 5> activity() const {
    std::array<uint64_t, 5> a = counters();
    for (size_t i = 0; i < a.size(); ++i) a[i] += past_[i];
    return a;
  }

  struct checkpoint {
    std::vector<std::byte> memory;
    std::vector<std::byte> handles;
    oracle model;
    mock_plane plane;
    std::vector<std::vector<token_id>> plan;
    bool ran = false;
  };
  checkpoint save() const;
  void restore(const checkpoint& c);

 private:
  handle& at(int32_t s) { return handle_[static_cast<size_t>(s)]; }
  static answer from(const status& s) { return {s.code, 0}; }
  static answer from(const result<int32_t>& r) { return {r.error().code, r ? *r : 0}; }
  void watch(std::vector<std::span<std::byte>> arrays) {
    image_.watch(std::move(arrays));
    image_.add(std::as_writable_bytes(std::span(&core(), 1)));
  }
  int32_t vacant_handle() const {
    int32_t s = 0;
    while (handle_[static_cast<size_t>(s)].live()) ++s;
    return s;
  }
  bool injected() {
    int64_t n = 0;
    if constexpr (requires(typename Traits::allocator_type a) { a.refused(); }) {
      for (int32_t g = 0; g < cache_.shape().groups; ++g) n += cache_.pool(g).refused();
    }
    return n != std::exchange(injected_, n);
  }
  bool pending(int32_t s) const { return model_.at(s).written < model_.at(s).held(); }
  bool needs_written(const operation& o) const;
  static bool queues(verb v) {
    return v == verb::extend || v == verb::draft || v == verb::settle || v == verb::reset;
  }
  std::vector<token_id> prompt_of(const operation& o) const;
  std::vector<token_id> continuation(const operation& o) const;
  answer call(const operation& o);
  answer call_model(const operation& o);
  answer call_open(const operation& o);
  answer call_both(const operation& o);
  answer peek(const operation& o);
  void pass_time(const operation& o);
  answer reset(const operation& o);
  int32_t draft_target(const operation& o) const { return o.pick % 16 == 0 ? -1 : o.n; }
  std::string append(int32_t s);
  std::string attend(int32_t s, int32_t first);
  bool owned(int32_t s, int32_t g, bool open, block_id b);
  bool holds(int32_t s, int32_t g, int32_t t, bool packed);
  std::string read(int32_t s, int32_t first);
  std::string nodes_hold_their_text();
  std::string compare();
  std::string compare_sequence(int32_t s);
  std::string compare_nodes();
  std::string compare_events();
  std::string compare_seals();
  bool same_block(int32_t g, bool open, int32_t name, block_id b);

  std::array<uint64_t, 5> counters() const {
    const stats s = cache_.count();
    return {s.nodes_stored, s.nodes_evicted, s.blocks_copied, s.refusals, s.tokens_reused};
  }

  make_eviction make_;
  std::vector<group_config> groups_;
  cache_type cache_;
  oracle model_;
  mock_plane plane_;
  std::vector<handle> handle_;                  // one more than fit, to be refused
  std::vector<std::vector<token_id>> plan_;     // prompts still to be computed
  std::array<std::vector<token_id>, 8> texts_;  // published lately: what prompts are made of
  memory_image image_;
  std::array<uint64_t, 5> past_{};
  int64_t injected_ = 0;
  uint64_t time_ = 0;  // ns
  bool ran_ = false;   // the step was run and has not ended
  std::string why_;
  std::vector<token_id> scratch_;
  std::vector<int32_t> name_of_[2 * max_groups];  // [space][block id] in this comparison
  std::vector<int32_t> id_of_[2 * max_groups];
};

inline token_id next_token(std::span<const token_id> before, int32_t unit, uint32_t& random) {
  random = random * 1664525u + 1013904223u;
  const uint32_t x = random >> 8;
  if (before.size() % static_cast<size_t>(unit) != 0 && x % 16 != 0) return before.back() + 1;
  return static_cast<token_id>(x / 16 % 3) * 1000;
}

template <class Traits>
std::vector<token_id> machine<Traits>::prompt_of(const operation& o) const {
  std::vector<token_id> t;
  const auto n = static_cast<size_t>(o.n);
  if (o.literal < 0 && o.pick % 4 != 0) {
    const auto& known = texts_[o.pick / 4 % texts_.size()];
    t.assign(known.begin(), known.begin() + static_cast<std::ptrdiff_t>(std::min(known.size(), n)));
  }
  uint32_t random = o.pick;
  while (t.size() < n)
    t.push_back(o.literal >= 0 ? o.literal : next_token(t, model_.bounds().unit(), random));
  return t;
}

template <class Traits>
std::vector<token_id> machine<Traits>::continuation(const operation& o) const {
  std::vector<token_id> t = model_.at(o.s).text;
  const size_t held = t.size();
  const auto& plan = plan_[static_cast<size_t>(o.s)];
  uint32_t random = o.pick;
  for (int32_t i = 0; i < o.n; ++i) {
    if (o.literal >= 0) {
      t.push_back(o.literal);
    } else if (t.size() < plan.size() && std::equal(t.begin(), t.end(), plan.begin())) {
      t.push_back(plan[t.size()]);
    } else {
      t.push_back(next_token(t, model_.bounds().unit(), random));
    }
  }
  t.erase(t.begin(), t.begin() + static_cast<std::ptrdiff_t>(held));
  return t;
}

template <class Traits>
bool machine<Traits>::needs_written(const operation& o) const {
  switch (o.what) {
    case verb::accept:
    case verb::settle:
    case verb::commit:
    case verb::fork:
      return pending(o.s);
    case verb::assign:
      return pending(o.other);
    default:
      return false;
  }
}

template <class Traits>
answer machine<Traits>::call_open(const operation& o) {
  const std::vector<token_id> prompt = prompt_of(o);
  const sharing who = sharing_of(o.pick >> 5, model_.bounds().unit());
  const int32_t account = o.pick % 61 == 0 ? -1
                                           : static_cast<int32_t>(o.pick >> 9) %
                                                 (model_.bounds().accounts() + (o.pick % 67 == 0));
  const int32_t recompute = o.pick % 71 == 0 ? 0 : 1 + static_cast<int32_t>(o.pick % 13 == 0) * 5;
  const int32_t s = vacant_handle();
  const int32_t priority = o.pick >> 14 & 3 ? 0 : static_cast<int32_t>(o.pick >> 16 & 3) - 1;
  const uint32_t ms = o.pick >> 18 & 3;
  result<handle> h = cache_.open(prompt, scope_of(who), {account, recompute, priority, ms});
  const answer got{h.error().code, h ? h->reused() : 0};
  const answer want = model_.open(s, prompt, who, account, recompute, priority, ms);
  if (got.code != want.code || got.value != want.value) {
    why_ = std::string("open answers ") + to_text(got.code) + " " + std::to_string(got.value) + ", not " +
           to_text(want.code) + " " + std::to_string(want.value);
  }
  if (h) {
    at(s) = *std::move(h);
    plan_[static_cast<size_t>(s)] = prompt;
  }
  return got;
}

template <class Traits>
answer machine<Traits>::reset(const operation& o) {
  if (o.n % 2 == 0) close_all();
  image_.save();
  const auto before = counters();
  host_memory::start_recording();
  const answer got = from(cache_.reset(make_(model_.bounds().order)));
  auto arrays = host_memory::stop_recording();
  if (got.code != errc::ok) return got;
  for (size_t i = 0; i < past_.size(); ++i) past_[i] += before[i];
  if (model_.live() != 0) why_ = "reset succeeds beside live sequences";
  model_ = oracle(model_.bounds());
  time_ = 0;
  ran_ = false;
  watch(std::move(arrays));
  injected_ = 0;
  return got;
}

template <class Traits>
answer machine<Traits>::call(const operation& o) {
  handle& h = at(o.s);
  switch (o.what) {
    case verb::extend:
      return from(h.extend(o.pick % 97 == 0 ? -1 : o.n));
    case verb::draft:
      return from(h.extend(o.n, true));
    case verb::accept:
      return from(h.accept(draft_target(o)));
    case verb::settle:
      return from(h.settle());
    case verb::truncate:
      return from(h.truncate(o.pick % 31 == 0 ? -1 : o.n));
    case verb::commit:
      return from(h.commit(scratch_));
    case verb::fork: {
      const int32_t to = vacant_handle();
      auto f = h.fork();
      if (f) {
        at(to) = *std::move(f);
        plan_[static_cast<size_t>(to)] = plan_[static_cast<size_t>(o.s)];
      }
      return from(f.error());
    }
    case verb::assign:
      return from(h.assign(at(o.other)));
    case verb::close:
      return from(h.close());
    case verb::evict:
      return {errc::ok, cache_.evict(o.n % 3)};
    default:
      return {};
  }
}

template <class Traits>
answer machine<Traits>::call_model(const operation& o) {
  switch (o.what) {
    case verb::extend:
      return model_.extend(o.s, o.pick % 97 == 0 ? -1 : o.n, continuation(o), false);
    case verb::draft:
      return model_.extend(o.s, o.n, continuation(o), true);
    case verb::accept:
      return model_.accept(o.s, draft_target(o));
    case verb::settle:
      return model_.settle(o.s);
    case verb::truncate:
      return model_.truncate(o.s, o.pick % 31 == 0 ? -1 : o.n);
    case verb::commit:
      return model_.commit(o.s, scratch_);
    case verb::fork: {
      int32_t to = 0;
      while (to < model_.bounds().sequences && model_.at(to).live) ++to;
      return model_.fork(o.s, to);
    }
    case verb::assign:
      return model_.assign(o.s, o.other);
    case verb::close:
      return model_.close(o.s);
    case verb::evict:
      return {errc::ok, model_.evict(o.n % 3)};
    default:
      return {};
  }
}

template <class Traits>
bool machine<Traits>::unchanged(bool not_even_refusals) {
  auto& c = core();
  std::vector<std::span<const std::byte>> may;
  if (!not_even_refusals) may.push_back(std::as_bytes(std::span(&c.counters.refusals, 1)));
  // What a vacant scope entry holds has no meaning; compare() looks at the references.
  may.push_back(scope_bytes::keys(c.scopes));
  may.push_back(scope_bytes::hashes(c.scopes));
  may.push_back(std::as_bytes(std::span(&c.scopes, 1)));
  if constexpr (requires(typename Traits::allocator_type a) { a.refused(); }) {
    for (int32_t g = 0; g < cache_.shape().groups; ++g) {  // the adaptor counts behind the pool that it wraps
      may.push_back(std::as_bytes(std::span(&cache_.pool(g), 1)).subspan(sizeof(block_pool)));
    }
  }
  return image_.same(may);
}

template <class Traits>
answer machine<Traits>::peek(const operation& o) {
  const std::vector<token_id> prompt = prompt_of(o);
  const sharing who = sharing_of(o.pick >> 5, model_.bounds().unit());
  std::array<node_id, 64> room;
  const int32_t found = cache_.peek(prompt, scope_of(who), room);
  const auto usable = prompt.size() - std::min<size_t>(prompt.size(), 1);
  if (found != model_.match(std::span(prompt).first(usable), who)) why_ = "peek finds another length";
  if (!unchanged(true)) why_ = "peek changes something";
  return {};
}

template <class Traits>
answer machine<Traits>::call_both(const operation& o) {
  const bool commit = o.what == verb::commit;
  scratch_ = model_.at(o.s).text;
  if (commit && o.pick % 8 == 0) scratch_.resize(std::min(scratch_.size(), static_cast<size_t>(o.n)));
  if (commit && o.pick % 64 == 1) {  // another text than the committed one
    for (token_id& t : scratch_) t += 500;
    if (model_.at(o.s).path.empty()) scratch_.clear();
  }
  const answer got = call(o);
  if (injected()) {
    model_.refused();
    if (got.code != errc::out_of_blocks) why_ = "a refused admission is not reported as out_of_blocks";
    return got;
  }
  const answer want = call_model(o);
  if (got.code != want.code || got.value != want.value) {
    why_ = std::string("answers ") + to_text(got.code) + " " + std::to_string(got.value) + ", not " +
           to_text(want.code) + " " + std::to_string(want.value);
  }
  if (commit && got.code == errc::ok) texts_[o.pick / 64 % texts_.size()] = model_.at(o.s).text;
  return got;
}

// Before the call that is compared, since a refused one changes nothing.
template <class Traits>
void machine<Traits>::pass_time(const operation& o) {
  time_ += (o.pick >> 20 & 3) * uint64_t{600'000};
  const int32_t gone = cache_.set_time(time_);
  if (gone != model_.set_time(time_)) why_ = "another number of units expires";
}

template <class Traits>
std::string machine<Traits>::apply(const operation& o) {
  if (needs_written(o)) {
    if (std::string wrong = o.pick % 4 == 0 ? run() : step(); !wrong.empty()) return wrong;
  }
  if (ran_ && (o.what == verb::run || queues(o.what))) {
    if (std::string wrong = step(); !wrong.empty()) return wrong;
  }
  if (o.what == verb::step) return step();
  if (o.what == verb::run) return run();
  why_.clear();
  if (o.what == verb::open && o.literal < 0) pass_time(o);
  const uint64_t violations = contract_violations();
  image_.save();
  const int64_t requests = host_memory::requests();
  answer got;
  if (o.what == verb::open) {
    got = call_open(o);
  } else if (o.what == verb::reset) {
    got = reset(o);
  } else if (o.what == verb::peek) {
    got = peek(o);
  } else if (o.what == verb::evict) {
    got = call_both(o);
  } else if (!at(o.s).live() || (o.what == verb::assign && !at(o.other).live())) {
    got = call(o);
    if (got.code != errc::stale_handle) why_ = "a closed handle does not answer stale_handle";
  } else {
    got = call_both(o);
  }
  if (why_.empty() && got.code != errc::ok && !unchanged(false)) why_ = "a refused call changed something";
  if (why_.empty() && o.what != verb::reset && host_memory::requests() != requests) {
    why_ = "a verb takes host memory";
  }
  if (why_.empty() && contract_violations() != violations) why_ = "a contract is violated inside the cache";
  return why_.empty() ? compare() : why_;
}

template <class Traits>
typename machine<Traits>::checkpoint machine<Traits>::save() const {
  checkpoint c{{}, {}, model_, plane_, plan_, ran_};
  image_.save(c.memory);
  // A handle is a pointer and two numbers; copying its bytes lets a search go back to where it was.
  c.handles.resize(handle_.size() * sizeof(handle));
  std::memcpy(c.handles.data(), static_cast<const void*>(handle_.data()), c.handles.size());
  return c;
}

template <class Traits>
void machine<Traits>::restore(const checkpoint& c) {
  image_.restore(c.memory);
  std::memcpy(static_cast<void*>(handle_.data()), c.handles.data(), c.handles.size());
  model_ = c.model;
  plane_ = c.plane;
  plan_ = c.plan;
  ran_ = c.ran;
}

}  // namespace kvcache::test

#include "machine_compare.hpp"
