// SPDX-License-Identifier: Apache-2.0
#include "replay/study.hpp"

#include <algorithm>
#include <cmath>

namespace kvcache::cli {
namespace {

const policy_info& info_of(std::string_view policy) {
  const std::string_view name = policy.substr(0, policy.find(':'));
  const auto all = policies();
  return *std::find_if(all.begin(), all.end(), [&](const policy_info& p) { return name == p.name; });
}

hit_count hits_of(const replay_result& r) {
  return {r.hit_blocks, r.hit_tokens, r.requests_with_hit};
}
hit_count minus(const hit_count& a, const hit_count& b) {
  return {a.blocks - b.blocks, a.tokens - b.tokens, a.requests - b.requests};
}

trace_facts facts_of(const traffic& of) {
  const trace& t = of.source();
  trace_facts f{t.format,      static_cast<std::int64_t>(t.requests.size()),
                of.blocks(),   of.nodes(),
                of.tokens(),   of.longest(),
                t.block_tokens};
  if (!t.requests.empty()) {
    f.seconds = static_cast<double>(t.requests.back().time_us - t.requests.front().time_us) / 1e6;
  }
  for (const request& r : t.requests) f.sessions = std::max<std::int64_t>(f.sessions, r.session + 1);
  return f;
}

[[noreturn]] void refuse_capacity(const std::string& text, std::string wanted) {
  throw error(failure::usage, "bad_value", "--capacity", text).wanting(std::move(wanted));
}

// In blocks of the trace; -1: without bound.
std::int64_t blocks_of(const std::string& text, const study_request& request, const trace_facts& f) {
  const capacity c = parse_capacity("--capacity", text);
  std::int64_t blocks = c.amount;
  if (c.in == capacity::unit::unbounded) return -1;
  if (c.in == capacity::unit::tokens) blocks = c.amount / f.block_tokens;
  if (c.in == capacity::unit::bytes) blocks = c.amount / request.size->bytes / f.block_tokens;
  const std::string one = count_text(f.block_tokens) + " tokens";
  if (blocks < 1) refuse_capacity(text, "at least one block of " + one);
  if (blocks < request.workers) {
    refuse_capacity(text, "at least one block of " + one + " for each of " + std::to_string(request.workers) +
                              " workers");
  }
  return blocks;
}

// Powers of four below the number of different blocks, six at most, and no bound.
std::vector<std::int64_t> usual_capacities(const trace_facts& f, std::int32_t workers) {
  std::vector<std::int64_t> out;
  std::int64_t power = 1;
  while (power <= (f.unique_blocks - 1) / 4) power *= 4;
  for (; out.size() < 6 && power >= std::max(4, workers); power /= 4) out.insert(out.begin(), power);
  out.push_back(-1);
  return out;
}

/// Parts of the trace's time.
constexpr std::size_t window_count = 40;

// The part in which request `r` came.
std::size_t window_of(const traffic& of, std::size_t r) {
  const std::vector<request>& all = of.source().requests;
  const std::int64_t span = all.back().time_us - all.front().time_us;
  const double share =
      span > 0 ? static_cast<double>(all[r].time_us - all.front().time_us) / static_cast<double>(span)
               : static_cast<double>(r) / static_cast<double>(all.size());
  return std::min(static_cast<std::size_t>(share * window_count), window_count - 1);
}

// Tokens of the first hits[r] blocks of each request; without hits, of all of it.
std::vector<std::int64_t> windows_of(const traffic& of, const std::vector<std::int32_t>& hits) {
  std::vector<std::int64_t> out(window_count);
  for (std::size_t r = 0; r < of.source().requests.size(); ++r) {
    const request& now = of.source().requests[r];
    out[window_of(of, r)] += hits.empty() ? now.input_tokens : of.tokens_of(now, hits[r]);
  }
  return out;
}

class runner {
 public:
  runner(const traffic& of, study& to, progress& meter) : of_(of), to_(to), meter_(meter) {}

  void run(const std::vector<std::int64_t>& capacities);
  void add_optimum(const std::vector<std::int64_t>& capacities);

 private:
  void run_routes(replay_options how);
  replay_result one(replay_options how);
  /// The row of the run that was made last.
  void add(const replay_result& result, const hit_count& alone, bool asked);

  const traffic& of_;
  study& to_;
  progress& meter_;
  std::vector<std::int32_t> hits_;  // of each request, in the last run
};

replay_result runner::one(replay_options how) {
  hits_.clear();
  how.hits = &hits_;
  const std::string what =
      how.policy + (how.capacity_blocks < 0 ? std::string(" without bound")
                                            : concat({" at ", count_text(how.capacity_blocks)}));
  return replay(of_, how,
                [&](std::int64_t done, std::int64_t total) { meter_.update(what + " blocks", done, total); });
}

void runner::add(const replay_result& result, const hit_count& alone, bool asked) {
  study_row row;
  row.result = result;
  row.asked = asked;
  row.online = !info_of(result.policy).optimum;
  row.lost_to_capacity = minus(of_.ceiling(), alone);
  row.lost_to_routing = minus(alone, hits_of(result));
  row.windows = windows_of(of_, hits_);
  to_.rows.push_back(std::move(row));
}

void runner::run_routes(replay_options how) {
  if (to_.asked.workers == 1) {
    const replay_result result = one(how);
    return add(result, hits_of(result), true);
  }
  const hit_count alone = hits_of(one(how));
  how.workers = to_.asked.workers;
  for (const route r : to_.asked.routes) {
    how.routing = r;
    add(one(how), alone, true);
  }
}

void runner::run(const std::vector<std::int64_t>& capacities) {
  for (const std::string& policy : to_.asked.policies) {
    // A time in the policy's own text stands above those of --ttl.
    const bool times = info_of(policy).timed && policy.find(':') == std::string::npos;
    const std::vector<double> ttls = times ? to_.asked.ttls : std::vector<double>{-1};
    for (const std::int64_t capacity : capacities) {
      for (const double ttl : ttls) {
        replay_options how;
        how.policy = policy;
        how.capacity_blocks = capacity;
        how.ttl_s = ttl;
        how.seed = to_.asked.seed;
        run_routes(std::move(how));
      }
    }
  }
}

// What one worker with all the room would find that knew the future, once per capacity.
void runner::add_optimum(const std::vector<std::int64_t>& capacities) {
  const auto is_optimum = [](const study_row& row, std::int64_t capacity) {
    const replay_result& r = row.result;
    return (r.policy == "belady" || r.policy == "belady_pinned") && r.workers == 1 &&
           r.capacity_blocks == capacity;
  };
  for (const std::int64_t capacity : capacities) {
    const auto there = [&](const study_row& row) { return is_optimum(row, capacity); };
    if (std::none_of(to_.rows.begin(), to_.rows.end(), there)) {
      replay_options how;
      how.policy = "belady";
      how.capacity_blocks = capacity;
      const replay_result result = one(how);
      add(result, hits_of(result), false);
    }
    const std::int64_t best = std::find_if(to_.rows.begin(), to_.rows.end(), there)->result.hit_tokens;
    for (study_row& row : to_.rows) {
      if (row.result.capacity_blocks == capacity) row.optimum_tokens = best;
    }
  }
}

void run_curve(const traffic& of, study& to, progress& meter) {
  to.curve = lru_curve(of, to.asked.sample, to.asked.seed,
                       [&](std::int64_t done, std::int64_t total) { meter.update("curve", done, total); });
  to.knee = to.curve.knee();
}

}  // namespace

study run_study(const traffic& of, study_request request, progress& meter) {
  study s;
  s.asked = std::move(request);
  s.source = facts_of(of);
  s.notes = of.source().notes;
  s.windows = windows_of(of, {});
  std::vector<std::int64_t> capacities;
  for (const std::string& text : s.asked.capacities) {
    capacities.push_back(blocks_of(text, s.asked, s.source));
  }
  if (capacities.empty()) capacities = usual_capacities(s.source, s.asked.workers);
  runner all(of, s, meter);
  all.run(capacities);
  if (s.asked.optimum) all.add_optimum(capacities);
  run_curve(of, s, meter);
  // The workload's own numbers do not depend on the run.
  s.summary = summarize(of, {}, {}, {});
  const bool timed =
      std::any_of(s.rows.begin(), s.rows.end(), [](auto& row) { return row.result.ttl_s >= 0; });
  if (timed && s.source.seconds <= 0) {
    s.notes.emplace_back(
        "All requests come at one time, so nothing runs out: the rows of ttl are those of lru.");
  }
  conclude(s);
  meter.finish();
  return s;
}

std::string tokens_text(std::int64_t tokens) {
  constexpr std::int64_t kibi = 1 << 10, mebi = 1 << 20;
  const std::int64_t scale = tokens >= mebi ? mebi : tokens >= kibi ? kibi : 1;
  if (scale == 1) return std::to_string(tokens);
  const double x = static_cast<double>(tokens) / static_cast<double>(scale);
  const int digits = tokens % scale == 0 ? 0 : x < 10 ? 2 : 1;
  return number_text(x, digits) + (scale == mebi ? "M" : "k");
}

std::string room_text(const study& s, std::int64_t capacity_blocks) {
  if (capacity_blocks < 0) return "no bound";
  const double tokens = static_cast<double>(capacity_blocks) * s.source.block_tokens;
  std::string out = count_text(capacity_blocks) + (capacity_blocks == 1 ? " block" : " blocks");
  if (tokens > 1e15) return out;
  out += concat({" (", tokens_text(static_cast<std::int64_t>(tokens)), " tokens"});
  if (s.asked.size) {
    const double gib = tokens * static_cast<double>(s.asked.size->bytes) / (1 << 30);
    out += concat({", ", number_text(gib, gib < 10 ? 2 : 1), " GiB"});
  }
  return out + ")";
}

std::string row_name(const study& s, const study_row& row) {
  std::string out = row.result.policy;
  const bool own_time = out.find(':') != std::string::npos;
  if (row.result.ttl_s >= 0 && !own_time) {
    const double ttl = row.result.ttl_s;
    out += concat({" ", number_text(ttl, ttl == std::floor(ttl) ? 0 : 3), " s"});
  }
  if (row.result.workers > 1 && s.asked.routes.size() > 1) {
    out += concat({" with ", name_of(row.result.routing)});
  }
  return out;
}

}  // namespace kvcache::cli
