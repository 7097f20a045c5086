// SPDX-License-Identifier: Apache-2.0
// What the numbers of a study say, in sentences. Percent are of all tokens unless they say otherwise.
#include <algorithm>
#include <cmath>

#include "replay/study.hpp"

namespace kvcache::cli {
namespace {

/// Less than this, in percent of the tokens, is not worth a change.
constexpr double worth = 2;

std::string percent(double x) {
  return number_text(x, 1) + " %";
}

std::vector<std::int64_t> finite_capacities(const study& s) {
  std::vector<std::int64_t> out;
  for (const study_row& row : s.rows) {
    const std::int64_t c = row.result.capacity_blocks;
    if (c >= 0 && std::find(out.begin(), out.end(), c) == out.end()) out.push_back(c);
  }
  std::sort(out.begin(), out.end());
  return out;
}

/// The online rows of one capacity.
class at_capacity {
 public:
  at_capacity(const study& s, std::int64_t capacity) : s_(s) {
    for (const study_row& row : s.rows) {
      if (row.online && row.result.capacity_blocks == capacity) rows_.push_back(&row);
    }
    const auto fewer = [](const study_row* a, const study_row* b) {
      return a->result.hit_tokens < b->result.hit_tokens;
    };
    if (rows_.empty()) return;
    best = *std::max_element(rows_.begin(), rows_.end(), fewer);
    least = *std::min_element(rows_.begin(), rows_.end(), fewer);
  }
  double share(const study_row* row) const { return percent_of(row->result.hit_tokens, s_.source.tokens); }
  /// lru under the route of `row`; null if it was not asked for.
  const study_row* lru_beside(const study_row* row) const {
    for (const study_row* r : rows_) {
      if (r->result.policy == "lru" && r->result.routing == row->result.routing) return r;
    }
    return nullptr;
  }
  const std::vector<const study_row*>& rows() const { return rows_; }

  const study_row* best = nullptr;
  const study_row* least = nullptr;

 private:
  const study& s_;
  std::vector<const study_row*> rows_;
};

std::string ceiling_text(const study& s) {
  const double ceiling = percent_of(s.summary.ceiling.tokens, s.source.tokens);
  // As where a trace lists full blocks only.
  const bool some_in_no_block = s.source.blocks * s.source.block_tokens < s.source.tokens;
  return percent(ceiling) +
         " of the tokens can be found again at most (the ceiling: one cache without bound); " + "the other " +
         percent(100 - ceiling) +
         (some_in_no_block ? " come for the first time, or stand in no full block."
                           : " come for the first time.");
}

std::string capacity_finding(const study& s, std::int64_t capacity) {
  const at_capacity here(s, capacity);
  if (here.best == nullptr) return {};
  std::string out = std::string("At ") + room_text(s, capacity) + " " + row_name(s, *here.best) + " finds " +
                    percent(here.share(here.best)) + " of the tokens";
  if (here.rows().size() > 1) {
    out +=
        ", the most, and " + row_name(s, *here.least) + " " + percent(here.share(here.least)) + ", the least";
  }
  out += std::string("; ") + percent(percent_of(here.best->lost_to_capacity.tokens, s.source.tokens)) +
         " are lost to capacity";
  if (here.best->result.workers > 1) {
    out += std::string(" and ") + percent(percent_of(here.best->lost_to_routing.tokens, s.source.tokens)) +
           " to routing";
  }
  out += ".";
  if (here.best->optimum_tokens >= 0) {
    out += " An optimum that knows the future (belady) would find " +
           percent(percent_of(here.best->optimum_tokens, s.source.tokens)) + " in the same room.";
  }
  return out;
}

// Routes, for the policy that finds most.
std::string routing_finding(const study& s, std::int64_t capacity) {
  if (s.asked.workers == 1 || s.asked.routes.size() < 2) return {};
  const at_capacity here(s, capacity);
  if (here.best == nullptr) return {};
  std::string out = std::string("Routing at ") + room_text(s, capacity) + ", " + here.best->result.policy +
                    ", against one " + "worker with all the room:";
  const char* comma = " ";
  for (const study_row* row : here.rows()) {
    if (row->result.policy != here.best->result.policy || row->result.ttl_s != here.best->result.ttl_s)
      continue;
    const double lost = percent_of(row->lost_to_routing.tokens, s.source.tokens);
    out += comma + std::string(name_of(row->result.routing)) + (lost < 0 ? " gains " : " loses ") +
           percent(std::abs(lost));
    comma = ", ";
  }
  return out + ".";
}

void add_times(study& s) {
  for (const study_row& row : s.rows) {
    const replay_result& r = row.result;
    if (r.ttl_s < 0 || r.capacity_blocks >= 0) continue;
    s.findings.push_back(row_name(s, row) + " without bound finds " +
                         percent(percent_of(r.hit_tokens, s.source.tokens)) + " of the tokens and holds " +
                         room_text(s, std::llround(r.mean_resident_blocks)) +
                         " on average over time, more at its peak.");
  }
}

std::string sharing_text(const study& s) {
  const loss_summary& l = s.summary;
  std::string out = percent(percent_of(l.share_less_than_block, l.requests)) + " of the requests (" +
                    count_text(l.share_less_than_block) + " of " + count_text(l.requests) +
                    ") share less than one block (" + count_text(s.source.block_tokens) +
                    " tokens) with any earlier request";
  if (l.shorter_than_block > 0) {
    out += std::string("; ") + percent(percent_of(l.shorter_than_block, l.requests)) +
           " of all could not, being shorter than a block";
  }
  return out + ".";
}

std::string bend_text(const study& s) {
  const std::int64_t most = s.curve.points.back().hit_blocks;
  if (most == 0) return {};
  std::string out = std::string("The curve of lru bends at ") + room_text(s, s.knee.capacity_blocks) +
                    ", where it finds " + percent(percent_of(s.knee.hit_blocks, most)) +
                    " of all blocks that can be found; half of " + "them take " +
                    room_text(s, s.curve.capacity_for(0.5)) + ", 90 % take " +
                    room_text(s, s.curve.capacity_for(0.9)) + ".";
  if (s.curve.rate < 1) out += " (Estimated from a sample of the blocks.)";
  return out;
}

void advise_prompts(study& s) {
  const double ceiling = percent_of(s.summary.ceiling.tokens, s.source.tokens);
  const double apart =
      percent_of(s.summary.share_less_than_block - s.summary.shorter_than_block, s.summary.requests);
  if (ceiling < 10) {
    s.advice.push_back(
        "Little comes again, so neither room nor policy can bring much. Look at how prompts begin: a date, a "
        "name or an id at the front makes every prompt new; move it behind what is shared.");
  } else if (apart > 30) {
    s.advice.push_back(
        "Many requests share no whole block. If their prompts do begin alike, shorter blocks would "
        "show it: record with fewer tokens per block and compare.");
  }
}

// From the curve of lru, whatever was asked for.
void advise_room(study& s, std::int64_t capacity) {
  const auto share = [&](const curve_point& p) { return percent_of(p.hit_tokens, s.source.tokens); };
  const double here = share(s.curve.at(capacity)),
               twice = share(s.curve.at(2 * std::min(capacity, std::int64_t{1} << 61)));
  const double left = share(s.curve.points.back()) - here;
  std::string from = std::string("From ") + room_text(s, capacity) + " on, ";
  if (left < worth) {
    s.advice.push_back(from + "more room brings lru no more than " + percent(left) +
                       " of the tokens: that is enough room.");
  } else {
    s.advice.push_back(from + "twice the room brings lru another " + percent(twice - here) +
                       " of the tokens, and room without bound " + percent(left) + ".");
  }
}

// Best against lru over all capacities.
void advise_policy(study& s, const std::vector<std::int64_t>& capacities) {
  double most = -1, worst = 0, gap = 0;
  std::string best_text, worst_text;
  std::int64_t gap_at = -1;
  for (const std::int64_t c : capacities) {
    const at_capacity here(s, c);
    if (here.best == nullptr) continue;
    if (here.best->optimum_tokens >= 0) {
      const double left = percent_of(here.best->optimum_tokens, s.source.tokens) - here.share(here.best);
      if (left > gap) gap = left, gap_at = c;
    }
    for (const study_row* row : here.rows()) {
      const study_row* lru = here.lru_beside(row);
      if (lru == nullptr || row->result.policy == "lru") continue;
      const double more = here.share(row) - here.share(lru);
      if (more > most) most = more, best_text = row_name(s, *row) + " at " + room_text(s, c);
      if (more < worst) worst = more, worst_text = row_name(s, *row) + " at " + room_text(s, c);
    }
  }
  if (!best_text.empty() && most >= worth) {
    s.advice.push_back(best_text + " finds " + percent(most) +
                       " of the tokens more than lru: worth a trial there.");
  } else if (!best_text.empty()) {
    s.advice.push_back(std::string("No other policy here finds as much as ") + number_text(worth, 0) +
                       " % of the tokens more "
                       "than lru at any of these capacities: stay with lru.");
  }
  if (worst <= -worth) {
    s.advice.push_back("The wrong policy costs: " + worst_text + " finds " + percent(-worst) +
                       " of the tokens less than lru.");
  }
  if (gap >= 5) {
    s.advice.push_back(
        std::string("At ") + room_text(s, gap_at) + " the optimum finds " + percent(gap) +
        " of the tokens more than the best " +
        "policy here. Part of it can be had by telling the cache what is known of the future: "
        "sessions that ended, prompts that will come again (priorities, pins); the rest is room.");
  }
}

void advise_routing(study& s, const std::vector<std::int64_t>& capacities) {
  if (s.asked.workers == 1 || capacities.empty()) return;
  const at_capacity here(s, capacities.back());
  if (here.best == nullptr) return;
  const double lost = percent_of(here.best->lost_to_routing.tokens, s.source.tokens);
  if (lost < worth) return;
  s.advice.push_back(std::string("Even ") + row_name(s, *here.best) + ", the best here, loses " +
                     percent(lost) + " of the tokens to routing at " + room_text(s, capacities.back()) +
                     ": a store that all workers share, or fewer and larger workers, would find them.");
}

}  // namespace

void conclude(study& s) {
  const std::vector<std::int64_t> capacities = finite_capacities(s);
  const auto add = [&](std::string text) {
    if (!text.empty()) s.findings.push_back(std::move(text));
  };
  add(ceiling_text(s));
  for (const std::int64_t c : capacities) add(capacity_finding(s, c));
  for (const std::int64_t c : capacities) add(routing_finding(s, c));
  add_times(s);
  add(sharing_text(s));
  add(bend_text(s));
  advise_prompts(s);
  if (s.summary.ceiling.blocks == 0) return;
  if (s.curve.points.back().hit_blocks == 0) {
    s.notes.emplace_back("The sample holds no block that is used again: the curve needs a larger --sample.");
  } else if (!capacities.empty()) {
    advise_room(s, capacities.back());
  }
  advise_policy(s, capacities);
  advise_routing(s, capacities);
}

}  // namespace kvcache::cli
