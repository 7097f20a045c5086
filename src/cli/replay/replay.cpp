// SPDX-License-Identifier: Apache-2.0
#include "replay/replay.hpp"

#include <array>
#include <cmath>
#include <new>
#include <random>

#include "kvcache/evict/parse.hpp"
#include "replay/worker.hpp"

namespace kvcache::cli {
namespace {

constexpr std::array routes{"random", "round_robin", "prefix_affinity", "affinity_load"};

/// A time so long that it does not matter stands for none.
std::int64_t life_us(const replay_options& how) {
  return how.ttl_s < 0 ? std::numeric_limits<std::int64_t>::max() : std::llround(how.ttl_s * 1e6);
}

template <class Worker>
class cluster {
 public:
  template <class Make>  // makes a policy
  cluster(const traffic& of, const replay_options& how, Make policy) : of_(of), how_(how) {
    const std::int64_t room = how.capacity_blocks < 0 ? std::numeric_limits<std::int64_t>::max()
                                                      : how.capacity_blocks / how.workers;
    if (how.routing == route::random || how.routing == route::round_robin) assign();
    workers_.reserve(static_cast<std::size_t>(how.workers));
    for (std::int32_t w = 0; w < how.workers; ++w) {
      const std::int64_t most = blocks_.empty() ? of.blocks() : blocks_[static_cast<std::size_t>(w)];
      workers_.emplace_back(of, policy(), std::min(room, most), life_us(how));
    }
  }

  void run(replay_result& to, const replay_progress& tell) {
    const std::vector<request>& requests = of_.source().requests;
    teller told(tell, of_.blocks());
    std::int64_t resident_sum = 0;
    std::int64_t resident = 0;
    for (std::size_t r = 0; r < requests.size(); ++r) {
      const request& now = requests[r];
      told.at(now.first);
      const auto [w, hit] = choose(r, now);
      to.hit_blocks += hit;
      to.hit_tokens += of_.tokens_of(now, hit);
      to.requests_with_hit += hit > 0;
      if (how_.hits != nullptr) how_.hits->push_back(hit);
      resident -= w->resident();
      w->serve(of_, static_cast<std::int32_t>(r));
      w->missed += now.count - hit;
      resident += w->resident();
      resident_sum += resident;
    }
    finish(to, resident_sum);
    told.end();
  }

 private:
  struct choice {
    Worker* to;
    std::int32_t hit;
  };
  void assign();
  choice choose(std::size_t r, const request& now);
  choice choose_by_match(const request& now);
  void finish(replay_result& to, std::int64_t resident_sum);

  const traffic& of_;
  const replay_options& how_;
  std::vector<std::int32_t> worker_of_;  // [request], where that does not depend on what is cached
  std::vector<std::int64_t> blocks_;     // [worker] of its requests, so that it is made no larger
  std::vector<Worker> workers_;
};

template <class Worker>
void cluster<Worker>::assign() {
  const auto n = static_cast<std::uint64_t>(how_.workers);
  std::mt19937_64 random(how_.seed);
  blocks_.resize(n);
  worker_of_.reserve(of_.source().requests.size());
  for (const request& r : of_.source().requests) {
    const std::uint64_t w =
        how_.routing == route::random ? (random() >> 32) * n >> 32 : worker_of_.size() % n;
    worker_of_.push_back(static_cast<std::int32_t>(w));
    blocks_[w] += r.count;
  }
}

template <class Worker>
typename cluster<Worker>::choice cluster<Worker>::choose(std::size_t r, const request& now) {
  if (worker_of_.empty()) return choose_by_match(now);
  Worker& w = workers_[static_cast<std::size_t>(worker_of_[r])];
  return {&w, w.match(of_.source().units_of(now), now.time_us)};
}

template <class Worker>
typename cluster<Worker>::choice cluster<Worker>::choose_by_match(const request& now) {
  choice best{nullptr, 0};
  std::pair<std::int64_t, std::int64_t> least;
  for (Worker& w : workers_) {
    const std::int32_t hit = w.match(of_.source().units_of(now), now.time_us);
    const std::int64_t misses = now.count - hit;
    const auto cost = how_.routing == route::prefix_affinity ? std::pair(misses, w.missed)
                                                             : std::pair(misses + w.missed, std::int64_t{0});
    if (best.to == nullptr || cost < least) {
      best = {&w, hit};
      least = cost;
    }
  }
  return best;
}

template <class Worker>
void cluster<Worker>::finish(replay_result& to, std::int64_t resident_sum) {
  const std::vector<request>& requests = of_.source().requests;
  if (requests.empty()) return;
  const std::int64_t end = requests.back().time_us;
  const std::int64_t span = end - requests.front().time_us;
  double block_us = 0;
  for (Worker& w : workers_) {
    w.finish(end);
    to.evictions += w.evictions();
    to.resident_end += w.resident();
    block_us += w.block_us();
  }
  // All at one moment: the average over the requests instead.
  to.mean_resident_blocks = span > 0
                                ? block_us / static_cast<double>(span)
                                : static_cast<double>(resident_sum) / static_cast<double>(requests.size());
}

// Settings that the text of the policy does not give are the library's, but for gdsf: what a unit of the tree
// costs depends on its tokens.
template <class E>
E make(const traffic& of, const replay_options& how, const std::int32_t* setting) {
  constexpr std::int32_t even_tokens = 2048 * 16;
  if constexpr (std::is_same_v<E, ttl>) {
    return ttl(static_cast<std::uint64_t>(life_us(how)));  // of the worker's clock
  } else if constexpr (std::is_same_v<E, gdsf>) {
    return setting != nullptr ? gdsf(setting[0]) : gdsf(std::max(1, even_tokens / of.source().block_tokens));
  } else if constexpr (std::is_same_v<E, s3_fifo> || std::is_same_v<E, two_q>) {
    return setting != nullptr ? E(setting[0], setting[1]) : E();
  } else {
    return E();
  }
}

template <class E, choosing When = choosing::before, bool Future = false>
void run(const traffic& of, const replay_options& how, const std::int32_t* setting, replay_result& to,
         const replay_progress& tell) {
  cluster<worker<E, When, Future>>(of, how, [&] { return make<E>(of, how, setting); }).run(to, tell);
}

struct known {
  policy_info info;
  void (*run)(const traffic&, const replay_options&, const std::int32_t* setting, replay_result&,
              const replay_progress&);
};

using belady = ranked<belady_key>;
constexpr std::array table{
    known{{"lru", false, false}, run<lru>},
    known{{"fifo", false, false}, run<fifo>},
    known{{"lfu", false, false}, run<lfu>},
    known{{"slru", false, false}, run<slru>},
    known{{"ttl", true, false}, run<ttl>},
    known{{"priority", false, false}, run<priority_levels>},
    known{{"gdsf", false, false}, run<gdsf>},
    known{{"s3_fifo", false, false}, run<s3_fifo>},
    known{{"two_q", false, false}, run<two_q>},
    known{{"belady", false, true}, run<belady, choosing::before, true>},
    known{{"belady_pinned", false, true}, run<belady, choosing::before, true>},
    known{{"belady_bypass", false, true}, run<belady, choosing::after, true>},
};

error wrong(const char* field, std::string value) {
  return {failure::usage, "bad_value", field, std::move(value)};
}

const known& known_policy(std::string_view name) {
  for (const known& k : table) {
    if (name == k.info.name) return k;
  }
  throw error(failure::usage, "unknown_policy", "policy", std::string(name));
}

eviction_choice settings_of(const std::string& policy) {
  const parsed_eviction read = parse_eviction(policy);
  if (read.ok()) return read.value;
  std::string field("policy ");
  field.append(read.key).append(" (").append(read.allowed).append(")");
  throw error(failure::usage, "bad_value", std::move(field), std::string(read.text));
}

void check(const replay_options& how, const policy_info& policy) {
  constexpr std::int32_t most_workers = 4096;
  constexpr double longest_ttl = 1e9;  // 30 years; in microseconds it fits 64 bits beside any time
  if (how.capacity_blocks < -1) throw wrong("capacity", std::to_string(how.capacity_blocks));
  if (how.workers < 1 || how.workers > most_workers) throw wrong("workers", std::to_string(how.workers));
  if (!policy.timed) return;
  if (how.ttl_s == -1) throw error(failure::usage, "missing", "ttl", "");
  if (!(how.ttl_s >= 0 && how.ttl_s <= longest_ttl)) throw wrong("ttl", std::to_string(how.ttl_s));
}

}  // namespace

const char* name_of(route r) {
  return routes[static_cast<std::size_t>(r)];
}

route route_of(std::string_view name) {
  for (std::size_t i = 0; i < routes.size(); ++i) {
    if (name == routes[i]) return static_cast<route>(i);
  }
  throw error(failure::usage, "unknown_route", "route", std::string(name));
}

std::span<const policy_info> policies() {
  static const auto infos = [] {
    std::array<policy_info, table.size()> all;
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = table[i].info;
    return all;
  }();
  return infos;
}

replay_result replay(const traffic& of, const replay_options& options, const replay_progress& tell) {
  const std::string_view text = options.policy;
  const known& policy = known_policy(text.substr(0, text.find(':')));
  replay_options how = options;
  eviction_choice choice;
  const bool settings = text.find(':') != text.npos;
  if (settings) choice = settings_of(options.policy);
  if (settings && policy.info.timed) how.ttl_s = choice.value[0];
  check(how, policy.info);
  replay_result to;
  to.policy = how.policy;
  to.capacity_blocks = how.capacity_blocks;
  to.ttl_s = policy.info.timed ? how.ttl_s : -1;
  to.workers = how.workers;
  to.routing = how.routing;
  try {
    policy.run(of, how, settings ? choice.value : nullptr, to, tell);
  } catch (const std::bad_alloc&) {
    throw out_of_memory("capacity", how.capacity_blocks);
  }
  return to;
}

}  // namespace kvcache::cli
