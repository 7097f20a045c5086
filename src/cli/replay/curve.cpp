// SPDX-License-Identifier: Apache-2.0
#include "replay/curve.hpp"

#include <cmath>
#include <limits>

#include "kvcache/core/fixed_array.hpp"
#include "replay/path.hpp"

namespace kvcache::cli {
namespace {

// The order of recency without a list: blocks that request q used last are a contiguous part of q's path,
// and lie in the order of the path, head first, behind those of all later requests. So a place is a sum over
// the later requests, kept in a Fenwick tree ("A new data structure for cumulative frequency tables",
// Software: Practice and Experience 24, 1994), plus a place in the part; a run of blocks costs one sum.
class recency {
 public:
  explicit recency(std::size_t requests) : sum_(requests + 1) {}

  void add(std::int32_t request, std::int32_t blocks) {
    all_ += blocks;
    for (std::size_t i = static_cast<std::size_t>(request) + 1; i < sum_.size(); i += i & (~i + 1)) {
      sum_[i] += blocks;
    }
  }
  /// Blocks that were last used by a later request.
  std::int64_t behind(std::int32_t request) const {
    std::int64_t up_to = 0;
    for (std::size_t i = static_cast<std::size_t>(request) + 1; i > 0; i &= i - 1) up_to += sum_[i];
    return all_ - up_to;
  }

 private:
  std::vector<std::int32_t> sum_;
  std::int64_t all_ = 0;
};

// Blocks and tokens by place, as differences from one place to the next.
class histogram {
 public:
  explicit histogram(std::size_t places) {
    if (!blocks_.create(places + 2) || !tokens_.create(places + 2)) {
      throw out_of_memory("curve", static_cast<std::int64_t>(places));
    }
  }
  /// One block of so many tokens each at the places [from, from + count).
  void add(std::int64_t from, std::int64_t count, std::int64_t tokens) {
    const auto a = static_cast<std::size_t>(from), b = static_cast<std::size_t>(from + count);
    ++blocks_[a];
    --blocks_[b];
    tokens_[a] += tokens;
    tokens_[b] -= tokens;
  }
  template <class Act>  // act(place, blocks, tokens) for each place that has any
  void each(Act act) const {
    std::int64_t blocks = 0, tokens = 0;
    for (std::size_t i = 0; i + 1 < blocks_.size(); ++i) {
      blocks += blocks_[i];
      tokens += tokens_[i];
      if (blocks > 0) act(static_cast<std::int64_t>(i), blocks, tokens);
    }
  }

 private:
  fixed_array<std::int64_t> blocks_, tokens_;
};

std::int64_t rounded(double x) {
  return std::llround(x);
}

/// Tokens of one block of a request.
std::int64_t tokens_at(const traffic& of, const request& r, std::int64_t block) {
  return of.tokens_of(r, block + 1) - of.tokens_of(r, block);
}

class exact_pass {
 public:
  explicit exact_pass(const traffic& of)
      : of_(of), tree_(tree_of(of.nodes())), recency_(of.source().requests.size()), found_(nodes()) {
    if (!last_.create(nodes())) throw out_of_memory("curve", of.nodes());
    path_.resize(static_cast<std::size_t>(of.longest()));
  }
  void request_at(std::int32_t r);
  void finish(hit_curve& to) const {
    curve_point sum;
    found_.each([&](std::int64_t place, std::int64_t blocks, std::int64_t tokens) {
      sum = {place + 1, sum.hit_blocks + blocks, sum.hit_tokens + tokens};
      to.points.push_back(sum);
    });
  }

 private:
  std::size_t nodes() const { return static_cast<std::size_t>(of_.nodes()); }
  std::int32_t& last(std::int32_t i) { return last_[index(path_[static_cast<std::size_t>(i)])]; }

  const traffic& of_;
  radix_tree tree_;
  recency recency_;
  histogram found_;
  fixed_array<std::int32_t> last_;  // request
  std::vector<node_id> path_;
};

void exact_pass::request_at(std::int32_t r) {
  const request& now = of_.source().requests[static_cast<std::size_t>(r)];
  const std::span<const std::int32_t> units = of_.source().units_of(now);
  const std::int32_t hit = tree_.match(0, no_node, units, path_);
  const std::int64_t each = of_.source().block_tokens;
  const std::int64_t full = now.input_tokens / each;  // blocks that are sure to be full
  for (std::int32_t i = 0; i < hit;) {
    const std::int32_t from = i, q = last(i);
    while (i < hit && last(i) == q) last(i++) = r;
    // The blocks before, all used later than q, are counted nowhere at the moment.
    const std::int64_t place = recency_.behind(q) + from;
    const auto whole = static_cast<std::int32_t>(std::clamp<std::int64_t>(full - from, 0, i - from));
    if (whole > 0) found_.add(place, whole, each);
    for (std::int32_t k = from + whole; k < i; ++k) found_.add(place + k - from, 1, tokens_at(of_, now, k));
    recency_.add(q, -(i - from));
  }
  extend_path(tree_, units, path_, hit, now.count);
  for (std::int32_t i = hit; i < now.count; ++i) last(i) = r;
  recency_.add(r, now.count);
}

// The same over blocks whose hash is small. A block is known by a hash of all ids up to it, so that no tree
// is needed: memory is for the sample alone.
class sampled_pass {
 public:
  sampled_pass(const traffic& of, double rate, std::uint64_t seed)
      : of_(of),
        rate_(rate),
        seed_(mixed(seed + odd)),
        below_(static_cast<std::uint64_t>(std::ldexp(rate, 53)) << 11),
        recency_(of.source().requests.size()),
        table_(1024),
        found_(1) {}
  void request_at(std::int32_t r);
  void finish(hit_curve& to) const;

 private:
  struct entry {
    std::uint64_t hash = 0;
    std::int32_t last = vacant;  // request
  };
  struct sum {
    std::int64_t blocks = 0, tokens = 0;
  };
  static constexpr std::int32_t vacant = -1;
  static constexpr std::uint64_t odd = 0x9e3779b97f4a7c15ull;
  // A bijection of 64 bits without visible order.
  static std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ (x >> 32)) * 0xe9846af9b1a615dull;
    x = (x ^ (x >> 32)) * 0xe9846af9b1a615dull;
    return x ^ (x >> 28);
  }
  std::int32_t& last(std::uint64_t hash);
  void grow();

  const traffic& of_;
  double rate_;
  std::uint64_t seed_;
  std::uint64_t below_;
  recency recency_;
  std::vector<entry> table_;  // open addressing, a power of two, at most half full
  std::vector<sum> found_;    // by place in the sample; one for each block known
  sum all_;                   // sampled references
};

void sampled_pass::request_at(std::int32_t r) {
  const request& now = of_.source().requests[static_cast<std::size_t>(r)];
  std::uint64_t hash = seed_;
  std::int32_t sampled = 0, run_from = 0, q = r;
  std::int64_t place = 0, block = 0;
  for (const std::int32_t id : of_.source().units_of(now)) {
    hash = mixed(hash + odd * (static_cast<std::uint64_t>(id) + 1));
    const std::int64_t at = block++;
    if (hash >= below_) continue;
    const std::int64_t tokens = tokens_at(of_, now, at);
    all_ = {all_.blocks + 1, all_.tokens + tokens};
    std::int32_t& used = last(hash);
    if (used != q) {
      if (q != r && q != vacant) recency_.add(q, run_from - sampled);
      run_from = sampled;
      q = used;
      if (q != vacant) place = recency_.behind(q) + sampled;
    }
    if (q != vacant) {
      sum& to = found_[static_cast<std::size_t>(place + sampled - run_from)];
      to = {to.blocks + 1, to.tokens + tokens};
    }
    used = r;
    ++sampled;
    if (q == vacant) grow();
  }
  if (q != r && q != vacant) recency_.add(q, run_from - sampled);
  recency_.add(r, sampled);
}

std::int32_t& sampled_pass::last(std::uint64_t hash) {
  const std::size_t mask = table_.size() - 1;
  std::size_t i = static_cast<std::size_t>(hash * odd >> 32) & mask;
  while (table_[i].last != vacant && table_[i].hash != hash) i = (i + 1) & mask;
  table_[i].hash = hash;
  return table_[i].last;
}

// One block more is known.
void sampled_pass::grow() {
  found_.emplace_back();
  if (2 * found_.size() < table_.size()) return;
  std::vector<entry> old(2 * table_.size());
  old.swap(table_);
  for (const entry& e : old) {
    if (e.last != vacant) last(e.hash) = e.last;
  }
}

// Places are scaled up, and the references that the sample has too many or too few are taken to be of the
// blocks used most often (SHARDS, section 3.3), whose places are the first.
void sampled_pass::finish(hit_curve& to) const {
  double blocks = static_cast<double>(of_.blocks()) * rate_ - static_cast<double>(all_.blocks);
  double tokens = 0;
  for (const request& r : of_.source().requests) tokens += static_cast<double>(of_.tokens_of(r, r.count));
  tokens = tokens * rate_ - static_cast<double>(all_.tokens);
  for (std::size_t i = 0; i < found_.size(); ++i) {
    if (found_[i].blocks == 0) continue;
    blocks += static_cast<double>(found_[i].blocks);
    tokens += static_cast<double>(found_[i].tokens);
    const curve_point before = to.points.back();
    const curve_point p{rounded(static_cast<double>(i) / rate_) + 1,
                        std::max(before.hit_blocks, rounded(blocks / rate_)),
                        std::max(before.hit_tokens, rounded(tokens / rate_))};
    if (p.hit_blocks > before.hit_blocks) to.points.push_back(p);
  }
}

template <class Pass>
void run(Pass& pass, const traffic& of, hit_curve& to, const replay_progress& tell) {
  teller told(tell, of.blocks());
  const std::vector<request>& requests = of.source().requests;
  for (std::size_t r = 0; r < requests.size(); ++r) {
    told.at(requests[r].first);
    pass.request_at(static_cast<std::int32_t>(r));
  }
  pass.finish(to);
  told.end();
}

}  // namespace

hit_curve lru_curve(const traffic& of, double rate, std::uint64_t seed, const replay_progress& tell) {
  if (!(rate > 0 && rate <= 1)) throw error(failure::usage, "bad_value", "rate", std::to_string(rate));
  hit_curve to{.rate = rate, .exact_from = of.longest(), .points = {curve_point{}}};
  try {
    if (rate == 1) {
      exact_pass pass(of);
      run(pass, of, to, tell);
    } else {
      sampled_pass pass(of, rate, seed);
      run(pass, of, to, tell);
    }
  } catch (const std::bad_alloc&) {
    throw out_of_memory("curve", of.nodes());
  }
  return to;
}

curve_point hit_curve::at(std::int64_t capacity_blocks) const {
  if (capacity_blocks < 0) capacity_blocks = std::numeric_limits<std::int64_t>::max();
  const auto above =
      std::upper_bound(points.begin(), points.end(), capacity_blocks,
                       [](std::int64_t c, const curve_point& p) { return c < p.capacity_blocks; });
  return above == points.begin() ? curve_point{} : *(above - 1);
}

std::int64_t hit_curve::capacity_for(double share) const {
  if (points.empty()) return 0;
  const double least = share * static_cast<double>(points.back().hit_blocks);
  for (const curve_point& p : points) {
    if (static_cast<double>(p.hit_blocks) >= least) return p.capacity_blocks;
  }
  return points.back().capacity_blocks;
}

curve_point hit_curve::knee() const {
  if (points.empty()) return {};
  const double width = static_cast<double>(points.back().capacity_blocks);
  const double height = static_cast<double>(points.back().hit_blocks);
  curve_point best;
  double most = 0;
  for (const curve_point& p : points) {
    const double above =
        static_cast<double>(p.hit_blocks) * width - static_cast<double>(p.capacity_blocks) * height;
    if (above > most) {
      most = above;
      best = p;
    }
  }
  return best;
}

std::vector<curve_point> hit_curve::thinned(std::size_t most) const {
  most = std::max<std::size_t>(most, 2);
  if (points.size() <= most) return points;
  std::vector<curve_point> some{points.front()};
  const double step = std::log(static_cast<double>(points.back().capacity_blocks)) /
                      static_cast<double>(most - 2 + (most == 2));
  for (std::size_t i = 0; i + 1 < most; ++i) {
    const auto c = static_cast<std::int64_t>(std::llround(std::exp(step * static_cast<double>(i))));
    const curve_point p = i + 2 == most ? points.back() : at(c);
    if (p.capacity_blocks > some.back().capacity_blocks) some.push_back(p);
  }
  return some;
}

}  // namespace kvcache::cli
