// SPDX-License-Identifier: Apache-2.0
#include "serve_report.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <utility>

namespace engine {
namespace {

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016" PRIx64, value);
  return text;
}

json to_json(const answer& a, const tokenizer& text) {
  const auto ids = a.ids();
  const std::span<const token_id> all(a.text);
  const auto prompt = all.first(static_cast<std::size_t>(a.prompt_tokens));
  return {{"id", a.from->id},
          {"turn", a.turn},
          {"sample", a.sample},
          {"temperature", a.from->how.temperature},
          {"seed", a.from->how.seed + static_cast<std::uint64_t>(a.sample)},
          {"prompt_ids", std::vector<token_id>(prompt.begin(), prompt.end())},
          {"ids", std::vector<token_id>(ids.begin(), ids.end())},
          {"text", text.decode(ids)},
          {"stop", a.stop},
          {"asked", a.prompt_tokens},
          {"reused", a.reused},
          {"prefilled", a.prefilled},
          {"recomputed", a.recomputed},
          {"preempted", a.preempted},
          {"dropped", a.dropped},
          {"fnv", hex(a.fnv)},
          {"first_token_step", a.first_token_step},
          {"finish_step", a.finish_step}};
}

/// Rows of a table: a label, then one cell per run.
class table {
 public:
  explicit table(const std::vector<serving>& runs) : runs_(runs) {}

  template <class Cell>
  void row(const char* label, const Cell& cell) {
    std::printf("%-46s", label);
    for (const serving& s : runs_) std::printf("%16s", std::string(cell(s)).c_str());
    std::printf("\n");
  }

 private:
  const std::vector<serving>& runs_;
};

std::string number(std::int64_t value) {
  return std::to_string(value);
}

std::string fixed(double value, const char* unit) {
  char text[48];
  std::snprintf(text, sizeof(text), "%.1f %s", value, unit);
  return text;
}

std::string mebibytes(std::size_t bytes) {
  return fixed(static_cast<double>(bytes) / (1 << 20), "MiB");
}

// The first line of an answer, for a list.
std::string first_words(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  if (text.size() <= 64) return text;
  std::size_t end = 64;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0u) == 0x80u) --end;
  return text.substr(0, end) + "...";
}

}  // namespace

json to_json(const serving& s, const tokenizer& text) {
  const serve_totals& t = s.scheduler->totals();
  const cache_counts& c = s.counts;
  json requests = json::array();
  for (const answer* a : s.scheduler->answers()) requests.push_back(to_json(*a, text));
  const json totals = {{"asked", t.asked},
                       {"reused", t.reused},
                       {"prefilled", t.prefilled},
                       {"recomputed", t.recomputed},
                       {"generated", t.generated},
                       {"steps", t.steps},
                       {"peak_running", t.peak_running},
                       {"peak_blocks", t.peak_blocks},
                       {"peak_bytes_held", t.peak_held},
                       {"peak_bytes_reserved", t.peak_reserved},
                       {"pool_blocks", c.blocks_total},
                       {"pool_bytes", s.pool_bytes()},
                       {"waste_percent", t.waste_percent()},
                       {"preemptions", t.preemptions},
                       {"dropped", t.dropped},
                       {"evictions", c.evictions},
                       {"copies", c.copies},
                       {"seconds", s.seconds}};
  json run = {{"cache", s.kind}, {"sequences", s.sequences}};
  if (s.policy) {
    run["policy"] = policy_text(*s.policy);
    run["mode"] = name_of(s.policy->mode);
  }
  run["requests"] = std::move(requests);
  run["totals"] = totals;
  return run;
}

std::vector<std::size_t> differences(const std::vector<serving>& runs) {
  std::vector<std::size_t> out;
  const auto first = runs.front().scheduler->answers();
  for (std::size_t r = 1; r < runs.size(); ++r) {
    const auto other = runs[r].scheduler->answers();
    for (std::size_t i = 0; i < first.size(); ++i) {
      const bool same =
          i < other.size() && first[i]->text == other[i]->text && first[i]->fnv == other[i]->fnv;
      if (!same) out.push_back(i);
    }
  }
  return out;
}

void print_answers(const serving& s, const tokenizer& text) {
  std::printf("answers (%s)\n%-16s %4s %6s %6s %8s %5s  %s\n", s.kind.c_str(), "id", "turn", "sample",
              "asked", "reused", "new", "text");
  for (const answer* a : s.scheduler->answers()) {
    std::printf("%-16s %4d %6d %6d %8d %5zu  %s\n", first_words(a->from->id).c_str(), a->turn, a->sample,
                a->prompt_tokens, a->reused, a->ids().size(), first_words(text.decode(a->ids())).c_str());
  }
  std::printf("\n");
}

void print_table(const std::vector<serving>& runs, const std::vector<std::size_t>& different) {
  using cell = const serving&;
  const auto totals = [](cell s) -> const serve_totals& { return s.scheduler->totals(); };
  if (const auto& policy = runs.front().policy)
    std::printf("policy %s, %s\n", policy_text(*policy).c_str(), name_of(policy->mode));
  table t(runs);
  t.row("", [](cell s) { return s.kind; });
  t.row("memory for keys and values", [](cell s) { return mebibytes(s.pool_bytes()); });
  t.row("requests at the same time, at most", [&](cell s) { return number(totals(s).peak_running); });
  t.row("set aside for them, peak", [&](cell s) { return mebibytes(totals(s).peak_reserved); });
  t.row("holding tokens, peak", [&](cell s) { return mebibytes(totals(s).peak_held); });
  t.row("set aside but empty, average", [&](cell s) { return fixed(totals(s).waste_percent(), "%"); });
  t.row("prompt tokens asked for", [&](cell s) { return number(totals(s).asked); });
  t.row("  found in the cache", [&](cell s) { return number(totals(s).reused); });
  t.row("  computed", [&](cell s) { return number(totals(s).prefilled); });
  t.row("tokens generated", [&](cell s) { return number(totals(s).generated); });
  t.row("requests preempted (tokens computed again)",
        [&](cell s) { return number(totals(s).preemptions) + " (" + number(totals(s).recomputed) + ")"; });
  if (runs.front().policy)
    t.row("tokens dropped by the policy", [&](cell s) { return number(totals(s).dropped); });
  t.row("cached prefixes evicted", [](cell s) { return number(s.counts.evictions); });
  t.row("shared blocks copied before writing", [](cell s) { return number(s.counts.copies); });
  t.row("steps", [&](cell s) { return number(totals(s).steps); });
  t.row("time", [](cell s) { return fixed(s.seconds, "s"); });
  if (runs.size() < 2) return;
  const std::size_t answers = runs.front().scheduler->answers().size();
  std::printf("%-46s", "answers equal (tokens, and logits bit for bit)");
  if (different.empty()) {
    std::printf("%32s\n", ("yes, all " + std::to_string(answers)).c_str());
  } else {
    std::printf("%32s\n", ("NO, " + std::to_string(different.size()) + " differ").c_str());
  }
}

}  // namespace engine
