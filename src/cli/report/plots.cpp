// SPDX-License-Identifier: Apache-2.0
#include "report/plots.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace kvcache::cli {
namespace {

constexpr double wide = 900, narrow = 360;
constexpr std::int64_t most_bars = 60;

double share(const study& s, std::int64_t tokens) {
  return percent_of(tokens, s.source.tokens);
}

std::string percent(double x) {
  return number_text(x, 1) + " %";
}

// "8,192" and below it what that is.
svg_tick tick(const study& s, std::int64_t blocks) {
  const double tokens = static_cast<double>(blocks) * s.source.block_tokens;
  svg_tick t{static_cast<double>(blocks), tokens_text(blocks),
             tokens_text(static_cast<std::int64_t>(tokens))};
  if (s.asked.size) {
    const double gib = tokens * static_cast<double>(s.asked.size->bytes) / (1 << 30);
    t.second = number_text(gib, gib < 10 ? 1 : 0) + " GiB";
  }
  return t;
}

// ---- hits against capacity

class hit_plot {
 public:
  explicit hit_plot(const study& s) : s_(s) { frame(); }
  line_chart chart();

 private:
  void frame();
  void add_curve();
  void add_row(const study_row& row);
  svg_line& line_of(const std::string& name, const study_row& row);

  const study& s_;
  line_chart c_;
  int colours_ = 1;  // lru has the first
};

// From half of the smallest capacity to all that the trace has.
void hit_plot::frame() {
  std::int64_t least = s_.source.unique_blocks, most = s_.source.unique_blocks;
  for (const study_row& row : s_.rows) {
    const std::int64_t c = row.result.capacity_blocks;
    if (c < 0) continue;
    least = std::min(least, c);
    most = std::max(most, std::min(c, 4 * s_.source.unique_blocks));
  }
  if (s_.knee.capacity_blocks > 0) least = std::min(least, s_.knee.capacity_blocks);
  c_.from = static_cast<double>(std::max<std::int64_t>(least / 2, 1));
  c_.to = std::max(static_cast<double>(most), c_.from * 2);
  for (std::int64_t power = 1; power <= c_.to; power *= 2) {
    if (static_cast<double>(power) >= c_.from) c_.ticks.push_back(tick(s_, power));
  }
  c_.title = "Token hit rate against capacity";
  c_.y_title = "tokens found, %";
  c_.x_title = std::string("capacity in blocks of ") + count_text(s_.source.block_tokens) +
               " tokens; below in " + (s_.asked.size ? "GiB" : "tokens");
  c_.most = share(s_, s_.summary.ceiling.tokens);
}

void hit_plot::add_curve() {
  svg_line l;
  l.name = s_.curve.rate < 1 ? "lru, sampled curve" : "lru, exact curve";
  l.colour = 1;
  l.marked = false;
  // The step that begins before the frame reaches into it.
  const auto first = static_cast<std::int64_t>(c_.from);
  l.points.push_back({c_.from, share(s_, s_.curve.at(first).hit_tokens)});
  for (const curve_point& p : s_.curve.thinned(600)) {
    const auto at = static_cast<double>(p.capacity_blocks);
    if (at > c_.from && at <= c_.to) l.points.push_back({at, share(s_, p.hit_tokens)});
  }
  l.points.push_back({c_.to, share(s_, s_.curve.at(static_cast<std::int64_t>(c_.to)).hit_tokens)});
  c_.lines.push_back(std::move(l));
}

svg_line& hit_plot::line_of(const std::string& name, const study_row& row) {
  for (svg_line& l : c_.lines) {
    if (l.name == name) return l;
  }
  svg_line l;
  l.name = name;
  l.colour = row.online ? ++colours_ : 0;
  l.dashed = !row.online;
  c_.lines.push_back(std::move(l));
  return c_.lines.back();
}

void hit_plot::add_row(const study_row& row) {
  const replay_result& r = row.result;
  const double hits = share(s_, r.hit_tokens);
  std::string name = row_name(s_, row);
  double room = static_cast<double>(r.capacity_blocks);
  if (r.capacity_blocks < 0) {
    if (r.ttl_s < 0 || r.mean_resident_blocks < 1) return;  // the ceiling says it
    room = r.mean_resident_blocks;
    name += ", mean room";
  }
  const svg_point at{std::clamp(room, c_.from, c_.to), hits};
  if (r.policy == "lru" && r.workers == 1) {  // marks on the curve
    c_.lines.push_back({"", {at}, 1, false});
    return;
  }
  line_of(name, row).points.push_back(at);
}

line_chart hit_plot::chart() {
  const double ceiling = share(s_, s_.summary.ceiling.tokens);
  svg_line top{
      std::string("ceiling ") + percent(ceiling), {{c_.from, ceiling}, {c_.to, ceiling}}, 0, true, false};
  add_curve();
  for (const study_row& row : s_.rows) add_row(row);
  c_.lines.push_back(std::move(top));
  for (svg_line& l : c_.lines) {
    std::sort(l.points.begin(), l.points.end(), [](svg_point a, svg_point b) { return a.x < b.x; });
  }
  return std::move(c_);
}

// ---- where the tokens went

struct split_row {
  double found, routing, gain, capacity, fresh;
};

split_row split(const study& s, const study_row& row) {
  const std::int64_t ceiling = s.summary.ceiling.tokens;
  const std::int64_t found = row.result.hit_tokens;
  const std::int64_t routing = std::max<std::int64_t>(row.lost_to_routing.tokens, 0);
  const std::int64_t room = std::max<std::int64_t>(ceiling - found - routing, 0);
  // Of what is lost to capacity, what the optimum would have found beside it.
  const std::int64_t gain =
      row.optimum_tokens < 0 ? 0 : std::clamp<std::int64_t>(row.optimum_tokens - found - routing, 0, room);
  return {share(s, found), share(s, routing), share(s, gain), share(s, room - gain), 100 - share(s, ceiling)};
}

std::vector<const study_row*> by_capacity(const study& s) {
  std::vector<const study_row*> rows;
  for (const study_row& row : s.rows) rows.push_back(&row);
  const auto key = [](const study_row* r) { return static_cast<std::uint64_t>(r->result.capacity_blocks); };
  std::stable_sort(rows.begin(), rows.end(),
                   [&](const study_row* a, const study_row* b) { return key(a) < key(b); });
  return rows;
}

// One worker without bound finds the ceiling under every policy that does not look at the clock.
bool says_ceiling(const study_row& row) {
  return row.result.capacity_blocks < 0 && row.result.ttl_s < 0 && row.result.workers == 1;
}

bar_chart loss_chart(const study& s) {
  bar_chart c;
  c.title = "Where the tokens of the prompts went";
  c.x_title = "% of all prompt tokens";
  c.parts = {{"found", 1},
             {"lost to routing", 2},
             {"lost to capacity, the optimum would find it", 5},
             {"lost to capacity, whatever the policy", 4},
             {"comes for the first time", -1}};
  for (const study_row* row : by_capacity(s)) {
    if (says_ceiling(*row)) continue;
    if (std::ssize(c.bars) == most_bars) break;
    const split_row p = split(s, *row);
    const std::int64_t room = row->result.capacity_blocks;
    std::string name = row_name(s, *row);
    name += room < 0 ? std::string(", no bound") : std::string(" at ") + count_text(room);
    c.bars.push_back({std::move(name), {p.found, p.routing, p.gain, p.capacity, p.fresh}, percent(p.found)});
  }
  return c;
}

// ---- over time

// The middle one of those asked for; -1: none was.
std::int64_t middle_capacity(const study& s) {
  std::vector<std::int64_t> all;
  for (const study_row& row : s.rows) {
    if (row.result.capacity_blocks >= 0) all.push_back(row.result.capacity_blocks);
  }
  if (all.empty()) return -1;
  const auto middle = all.begin() + std::ssize(all) / 2;
  std::nth_element(all.begin(), middle, all.end());
  return *middle;
}

struct time_unit {
  double seconds;
  const char* name;
};

double share_of_window(const study& s, const study_row& row, std::size_t w) {
  return percent_of(row.windows[w], s.windows[w]);
}

time_unit unit_of(double seconds) {
  if (seconds <= 0) return {1, "% of the requests"};
  if (seconds > 4 * 86400) return {86400, "days"};
  if (seconds > 4 * 3600) return {3600, "hours"};
  return seconds > 4 * 60 ? time_unit{60, "minutes"} : time_unit{1, "seconds"};
}

line_chart time_chart(const study& s) {
  const std::int64_t capacity = middle_capacity(s);
  const time_unit unit = unit_of(s.source.seconds);
  line_chart c;
  c.title = "Token hit rate over time, " +
            std::string(capacity < 0 ? "without bound" : std::string("at ") + room_text(s, capacity));
  c.y_title = "tokens found, %";
  c.x_title = s.source.seconds > 0 ? concat({unit.name, " since the first request"}) : std::string(unit.name);
  c.logarithmic = false;
  c.from = 0;
  c.to = s.source.seconds > 0 ? s.source.seconds / unit.seconds : 100;
  const double step = round_step(c.to, 8);
  for (double t = 0; t <= c.to * 1.0001; t += step)
    c.ticks.push_back({t, number_text(t, step < 1 ? 1 : 0), {}});
  int colour = 1;  // lru's, as in the first drawing
  for (const study_row& row : s.rows) {
    if (row.result.capacity_blocks != capacity) continue;
    const bool lru = row.result.policy == "lru" && row.result.workers == 1;
    svg_line l{row_name(s, row), {}, lru ? 1 : row.online ? ++colour : 0, true, false, !row.online};
    for (std::size_t w = 0; w < s.windows.size(); ++w) {
      if (s.windows[w] == 0) continue;  // nobody came
      const double middle = (static_cast<double>(w) + 0.5) / static_cast<double>(s.windows.size());
      l.points.push_back({middle * c.to, share_of_window(s, row, w)});
    }
    c.lines.push_back(std::move(l));
  }
  c.most = 0;
  for (const svg_line& l : c.lines) {
    for (const svg_point& p : l.points) c.most = std::max(c.most, p.y);
  }
  return c;
}

// ---- reuse distances

bar_chart distance_chart(const study& s) {
  bar_chart c;
  c.title = "How much room it takes to find a block again";
  c.x_title = "% of all blocks";
  c.parts = {{"blocks", 1}};
  c.most = 0;
  std::int64_t before = 0;
  const std::int64_t end = s.curve.points.back().capacity_blocks;
  std::int64_t factor = 2;
  while (std::pow(static_cast<double>(factor), 14) < static_cast<double>(end)) factor *= 2;
  for (std::int64_t to = factor; end > 0; to *= factor) {
    const std::int64_t hits = s.curve.at(to).hit_blocks;
    if (hits > before || !c.bars.empty()) {
      const double part = percent_of(hits - before, s.source.blocks);
      c.bars.push_back({std::string("up to ") + count_text(to), {part}, percent(part)});
      c.most = std::max(c.most, part);
    }
    before = hits;
    if (to >= end) break;
  }
  const double fresh = percent_of(s.source.blocks - before, s.source.blocks);
  c.bars.push_back({"never: first time", {fresh}, percent(fresh)});
  c.most = std::max(c.most, fresh);
  return c;
}

template <class Chart>
void render(const Chart& chart, double height, bool as_files, plot& to) {
  to.title = chart.title;
  to.wide = draw(chart, {wide, height, as_files});
  if (!as_files) to.narrow = draw(chart, {narrow, std::min(height, 340.0), false});
}

}  // namespace

std::vector<plot> plots_of(const study& s, bool as_files) {
  std::vector<plot> out(plot_files.size());
  for (std::size_t i = 0; i < out.size(); ++i) out[i].file = plot_files[i];
  const line_chart hits = hit_plot(s).chart();
  out[0].caption =
      "The line of lru is exact at every capacity. Marks are replays. The dashed line of belady is what a "
      "policy "
      "that knows the future finds in the same room; the ceiling is what one cache without bound finds.";
  const auto timed = [](const study_row& row) {
    return row.result.capacity_blocks < 0 && row.result.ttl_s >= 0;
  };
  if (std::any_of(s.rows.begin(), s.rows.end(), timed)) {
    out[0].caption +=
        " A ttl without bound stands at the room it takes on average over time; at its peak it takes more.";
  }
  render(hits, std::max(440.0, 120 + 17.0 * static_cast<double>(hits.lines.size())), as_files, out[0]);
  out[1].caption =
      "Each bar is all tokens of all prompts, at the capacity in blocks that stands behind its name.";
  const std::int64_t rows = std::ssize(s.rows) - std::count_if(s.rows.begin(), s.rows.end(), says_ceiling);
  if (rows > most_bars) {
    out[1].caption += concat({" The first ", count_text(most_bars), " of ", count_text(rows),
                              " rows are drawn; the table has all."});
  }
  render(loss_chart(s), 0, as_files, out[1]);
  const line_chart times = time_chart(s);
  out[2].caption =
      "Each point is a fortieth of the time from the first request to the last; a stretch without requests "
      "has none. "
      "The first stretch is low in every cache: it is empty.";
  render(times, std::max(380.0, 120 + 17.0 * static_cast<double>(times.lines.size())), as_files, out[2]);
  out[3].caption = "A block counts where lru first finds it: in a cache of at least so many blocks of " +
                   count_text(s.source.block_tokens) + " tokens, and of no fewer than the bar above says.";
  render(distance_chart(s), 0, as_files, out[3]);
  return out;
}

}  // namespace kvcache::cli
