// SPDX-License-Identifier: Apache-2.0
// What each kv head of a session keeps, against each rule stated over the oracle's own attention: that the
// right weights reach the right head, and what is chosen is carried out there.
#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <numeric>

#include "session_support.hpp"

using namespace engine;
using namespace engine::test;

namespace {

/// Every row of attention weights of a text, as the oracle computes them in double.
struct witness {
  masked_reference oracle{shape()};
  // [layer * query_heads + head][row][position]
  std::vector<std::vector<std::vector<double>>> rows = std::vector<std::vector<std::vector<double>>>(
      static_cast<std::size_t>(shape().layers * shape().query_heads));

  witness() {
    oracle.watch = [this](int layer, int head, std::span<const double> weights) {
      rows[static_cast<std::size_t>(layer * shape().query_heads + head)].emplace_back(weights.begin(),
                                                                                      weights.end());
    };
  }
  witness(const witness&) = delete;
  witness& operator=(const witness&) = delete;

  /// Sum over the query heads of the group.
  template <class F>
  double over_group(int layer, int kv_head, F&& of_rows) const {
    const int group = shape().query_heads / shape().kv_heads;
    double sum = 0;
    for (int h = kv_head * group; h < (kv_head + 1) * group; ++h)
      sum += of_rows(rows[static_cast<std::size_t>(layer * shape().query_heads + h)]);
    return sum;
  }
};

double weight(const std::vector<double>& row, int position) {
  return static_cast<std::size_t>(position) < row.size() ? row[static_cast<std::size_t>(position)] : 0.0;
}

/// A rule in its paper's words.
struct rule {
  const char* text;
  int keep;
  int sinks, recent;
  std::function<double(const witness&, int layer, int kv_head, int position)> score;
};

double all_queries(const witness& w, int layer, int h, int p) {
  return w.over_group(layer, h, [p](const auto& rows) {
    double sum = 0;
    for (const auto& row : rows) sum += weight(row, p);
    return sum;
  });
}

double last_queries(const witness& w, int layer, int h, int p) {
  return w.over_group(layer, h, [p](const auto& rows) {
    double sum = 0;
    for (std::size_t r = rows.size() - std::min<std::size_t>(rows.size(), 9); r < rows.size(); ++r)
      sum += weight(rows[r], p);
    return sum;
  });
}

double last_query_of_all_heads(const witness& w, int layer, int, int p) {
  double sum = 0;
  for (int h = 0; h < shape().kv_heads; ++h)
    sum += w.over_group(layer, h, [p](const auto& rows) { return weight(rows.back(), p); });
  return sum;
}

double far_queries(const witness& w, int layer, int h, int p) {
  const double of_group = w.over_group(layer, h, [p](const auto& rows) {
    double squares = 0;
    int n = 0;
    for (std::size_t r = static_cast<std::size_t>(p) + 8; r < rows.size(); ++r, ++n)
      squares += std::pow(weight(rows[r], p), 2);
    return std::sqrt(squares / std::max(n, 1));
  });
  return of_group * w.oracle.value_norm(layer, h, p);
}

const rule rules[] = {{"h2o:heavy=11,recent=10", 21, 0, 10, all_queries},
                      {"snapkv:capacity=23,window=9,kernel=1", 23, 0, 9, last_queries},
                      {"tova:21", 21, 0, 0, last_query_of_all_heads},
                      {"far_rms:capacity=21,recent=8,sinks=2,distance=8", 21, 2, 8, far_queries}};

/// What stays of `held`, ascending: what is protected, then the best, ties to the lower position.
std::vector<int> by_the_rule(const rule& r, const std::vector<int>& held, const std::vector<double>& score) {
  const int n = static_cast<int>(held.size());
  std::vector<int> kept, others;
  for (int i = 0; i < n; ++i) (i < r.sinks || i >= n - r.recent ? kept : others).push_back(i);
  std::stable_sort(others.begin(), others.end(), [&](int a, int b) {
    return score[static_cast<std::size_t>(a)] > score[static_cast<std::size_t>(b)];
  });
  others.resize(static_cast<std::size_t>(r.keep) - kept.size());
  kept.insert(kept.end(), others.begin(), others.end());
  std::sort(kept.begin(), kept.end());
  for (int& i : kept) i = held[static_cast<std::size_t>(i)];
  return kept;
}

/// Two sets that differ in one token each whose scores only rounding sets apart are the same choice.
bool same_choice(const std::vector<int>& got, const std::vector<int>& right, const std::vector<int>& held,
                 const std::vector<double>& score) {
  if (got == right) return true;
  std::vector<int> apart;
  std::set_symmetric_difference(got.begin(), got.end(), right.begin(), right.end(),
                                std::back_inserter(apart));
  if (got.size() != right.size() || apart.size() != 2) return false;
  const auto of = [&](int position) {
    return score[static_cast<std::size_t>(std::lower_bound(held.begin(), held.end(), position) -
                                          held.begin())];
  };
  return std::fabs(of(apart[0]) - of(apart[1])) < 1e-4 * std::fabs(of(apart[0]));
}

/// Compares what every head keeps with what the rule makes of `before`, what it held.
void check(const rule& r, const witness& w, const keep_sets& before, const session& s) {
  for (int layer = 0; layer < shape().layers; ++layer) {
    for (int h = 0; h < shape().kv_heads; ++h) {
      CAPTURE(r.text, layer, h, s.position());
      const std::vector<int>& held = before[static_cast<std::size_t>(layer * shape().kv_heads + h)];
      std::vector<double> score;
      for (const int p : held) score.push_back(r.score(w, layer, h, p));
      const auto kept = s.kept(layer, h);
      const std::vector<int> got(kept.begin(), kept.end());
      REQUIRE(std::is_sorted(got.begin(), got.end()));
      const auto right = by_the_rule(r, held, score);
      if (!same_choice(got, right, held, score)) CHECK(got == right);
    }
  }
}

keep_sets everything(int tokens) {
  std::vector<int> all(static_cast<std::size_t>(tokens));
  std::iota(all.begin(), all.end(), 0);
  return keep_sets(static_cast<std::size_t>(shape().layers * shape().kv_heads), all);
}

}  // namespace

TEST_CASE("one shot: every head of every layer keeps what its own attention says") {
  for (const rule& r : rules) {
    for (const int n : {22, 61, 90}) {
      const auto text = some_text(n);
      const auto cache = cache_of(model(), machine().pool);
      witness w;
      w.oracle.feed(model(), text);
      session s = begin(model(), *cache, r.text, {.chunk = 17});
      feed(s, text);
      REQUIRE(s.compress());
      if (n > r.keep) {
        check(r, w, everything(n), s);
      } else {
        CHECK(kept_of(s, shape()) == everything(n));
      }
    }
  }
}

TEST_CASE("stream: after every token each head has dropped what its own attention says") {
  const auto text = some_text(64);
  for (const rule& r : rules) {
    for (const bool in_place : {false, true}) {
      CAPTURE(in_place);
      const auto cache = cache_of(model(), machine().pool);
      witness w;
      session s = begin(model(), *cache, r.text, {.mode = drop_mode::stream, .in_place = in_place});
      int turned = 0;
      for (const token_id t : text) {
        auto before = kept_of(s, shape());
        for (auto& held : before) held.push_back(s.position());
        w.oracle.feed(model(), {&t, 1});
        feed(s, {&t, 1});
        if (s.position() > r.keep) check(r, w, before, s);
        follow(w.oracle, s, shape(), 0, turned);
      }
      CHECK(s.dropped() == 64 - r.keep);
    }
  }
}

TEST_CASE("a budget over all heads: each is sure of its share, the rest goes to the best of all") {
  const rule r{"far_rms:capacity=21,recent=8,sinks=2,distance=8,budget=global", 21, 2, 8, far_queries};
  const auto text = some_text(61);
  const auto cache = cache_of(model(), machine().pool);
  witness w;
  w.oracle.feed(model(), text);
  session s = begin(model(), *cache, r.text);
  feed(s, text);
  REQUIRE(s.compress());
  const int least = 2 + 8;  // more than a fifth of 21
  struct candidate {
    double score;
    int layer, head, position;
  };
  std::vector<candidate> all;
  for (int layer = 0; layer < shape().layers; ++layer) {
    for (int h = 0; h < shape().kv_heads; ++h) {
      for (int p = 2; p < 61 - 8; ++p) all.push_back({r.score(w, layer, h, p), layer, h, p});
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const candidate& a, const candidate& b) { return a.score > b.score; });
  const int heads = shape().layers * shape().kv_heads;
  std::vector<int> counts(static_cast<std::size_t>(heads), least);
  for (int i = 0; i < heads * (21 - least); ++i) {
    const candidate& c = all[static_cast<std::size_t>(i)];
    ++counts[static_cast<std::size_t>(c.layer * shape().kv_heads + c.head)];
    const auto kept = s.kept(c.layer, c.head);
    CHECK(std::binary_search(kept.begin(), kept.end(), c.position));
  }
  for (int layer = 0; layer < shape().layers; ++layer) {
    for (int h = 0; h < shape().kv_heads; ++h)
      CHECK(static_cast<int>(s.kept(layer, h).size()) ==
            counts[static_cast<std::size_t>(layer * shape().kv_heads + h)]);
  }
  CHECK(*std::max_element(counts.begin(), counts.end()) > *std::min_element(counts.begin(), counts.end()));
}
