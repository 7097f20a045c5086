// SPDX-License-Identifier: Apache-2.0
//
// engine_serve: a workload under continuous batching. With --cache both it runs twice in the same memory,
// once with a reserved region per sequence and once paged, and compares: memory, work, time, answers.

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <optional>
#include <thread>

#include "program.hpp"
#include "scheduler.hpp"
#include "workload.hpp"

namespace {

using engine::json;
using clock_type = std::chrono::steady_clock;

// Unless --blocks says otherwise, the pool has room for this many sequences of the longest length.
constexpr std::int64_t default_regions = 3;

struct options {
  engine::common_options common;
  std::string requests;
  std::optional<std::int64_t> blocks;
  int batch = 24;
  std::string eviction = "lru";
  bool ignore_end = false;
};

void add_options(CLI::App& app, options& o) {
  o.common.cache = "both";
  o.common.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 256u));
  add_common_options(app, o.common);
  std::vector<std::string> kinds(engine::cache_kind_names().begin(), engine::cache_kind_names().end());
  kinds.push_back("both");
  app.remove_option(app.get_option("--cache"));
  app.add_option("--cache", o.common.cache, "cache kind; both: contiguous, then paged, in the same memory")
      ->check(CLI::IsMember(kinds))
      ->capture_default_str();
  app.add_option("--requests", o.requests, "workload (JSON lines)")->required();
  app.add_option("--blocks", o.blocks, "size of the pool; default: 3 sequences of the longest length")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{INT32_MAX}));
  app.add_option("--batch", o.batch, "requests running at the same time")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--eviction", o.eviction, "which cached prefix goes first")
      ->check(CLI::IsMember({"lru", "lfu"}))
      ->capture_default_str();
  app.add_flag("--ignore-eos", o.ignore_end, "go on after an end token");
}

/// The memory every kind gets.
struct budget {
  int longest = 1;  ///< tokens of the longest sequence the workload can lead to
  const engine::job* who = nullptr;
  std::int64_t region = 1;  ///< blocks of such a sequence
  std::int64_t blocks = 0;
};

budget plan_budget(const options& o, std::span<const engine::job> jobs, int context) {
  budget b;
  for (const engine::job& j : jobs) {
    const std::int64_t most = std::min<std::int64_t>(context, most_tokens(j, j.follow_ups.size()));
    if (b.who != nullptr && most <= b.longest) continue;
    b.longest = static_cast<int>(most);
    b.who = &j;
  }
  const std::int64_t block = std::max(1, o.common.block_size);
  b.region = (b.longest + block - 1) / block;
  b.blocks = o.blocks.value_or(default_regions * b.region);
  return b;
}

/// A cache kind, what it was asked to do and how it went.
struct serving {
  std::string kind;
  int sequences = 0;
  std::unique_ptr<engine::cache_kind> cache;
  std::unique_ptr<engine::scheduler> scheduler;
  engine::cache_counts counts;  ///< at the end; the cache itself is gone by then
  double seconds = 0;

  std::size_t pool_bytes() const {
    return static_cast<std::size_t>(counts.blocks_total) * counts.block_bytes;
  }
};

engine::result<serving> open_serving(const options& o, const std::string& kind, const budget& b,
                                     std::span<const engine::job> jobs, engine::loaded& parts) {
  serving s;
  s.kind = kind;
  s.sequences = o.batch;
  engine::cache_config config;
  config.blocks = b.blocks;
  if (kind == "contiguous") {  // whole regions, and as many sequences as have one
    const std::int64_t regions = b.blocks / b.region;
    s.sequences = static_cast<int>(std::min<std::int64_t>(o.batch, regions));
    config.blocks = regions * b.region;
  }
  if (s.sequences == 0) {
    engine::error e = engine::cannot_run("out_of_blocks", "id", b.who->id);
    e.file = o.requests;
    e.line = b.who->line;
    return e;
  }
  config.shape = parts.model->shape().kv;
  config.type = engine::kv_type_of(o.common.type);
  config.block_size = o.common.block_size;
  config.max_sequences = s.sequences;
  config.max_tokens = b.longest;
  config.eviction = o.eviction;
  config.pool = &parts.pool;
  auto cache = engine::make_cache(kind, config);
  if (!cache) return cache.error();
  s.cache = std::move(*cache);
  engine::scheduler_options how{s.sequences, o.common.chunk, {}};
  if (!o.ignore_end) how.is_stop = [&parts](engine::token_id id) { return parts.text->is_stop(id); };
  s.scheduler = std::make_unique<engine::scheduler>(*parts.model, *s.cache, jobs, std::move(how));
  return s;
}

void print_progress(const serving& s, double seconds) {
  const engine::serve_progress p = s.scheduler->progress();
  const engine::cache_counts c = s.cache->counts();
  const engine::serve_totals& t = s.scheduler->totals();
  std::fprintf(stderr,
               "%-10s %6.1f s  answers %" PRId64 "/%" PRId64 "  tokens %" PRId64 "/%" PRId64
               "  running %zu  waiting %zu  blocks %" PRId64 "/%" PRId64 " used, %" PRId64
               " cached  preempted %" PRId64 "\n",
               s.kind.c_str(), seconds, p.answered, p.answers_expected, p.tokens_done, p.tokens_expected,
               p.running, p.waiting, c.blocks_used, c.blocks_total, c.blocks_cached, t.preemptions);
}

// A line per second, also without a terminal.
engine::status serve(serving& s) {
  const auto start = clock_type::now();
  auto printed = start;
  const auto seconds = [&] { return std::chrono::duration<double>(clock_type::now() - start).count(); };
  const engine::status done = s.scheduler->run([&] {
    const auto now = clock_type::now();
    if (now - printed < std::chrono::seconds(1)) return;
    printed = now;
    print_progress(s, seconds());
  });
  s.seconds = seconds();
  print_progress(s, s.seconds);
  if (!done) return done;
  s.counts = s.cache->counts();
  s.cache.reset();  // the next kind gets the same memory
  return {};
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016" PRIx64, value);
  return text;
}

json to_json(const engine::answer& a, const engine::tokenizer& text) {
  const auto ids = a.ids();
  const std::span<const engine::token_id> all(a.text);
  const auto prompt = all.first(static_cast<std::size_t>(a.prompt_tokens));
  return {{"id", a.from->id},
          {"turn", a.turn},
          {"sample", a.sample},
          {"temperature", a.from->how.temperature},
          {"seed", a.from->how.seed + static_cast<std::uint64_t>(a.sample)},
          {"prompt_ids", std::vector<engine::token_id>(prompt.begin(), prompt.end())},
          {"ids", std::vector<engine::token_id>(ids.begin(), ids.end())},
          {"text", text.decode(ids)},
          {"stop", a.stop},
          {"asked", a.prompt_tokens},
          {"reused", a.reused},
          {"prefilled", a.prefilled},
          {"recomputed", a.recomputed},
          {"preempted", a.preempted},
          {"fnv", hex(a.fnv)},
          {"first_token_step", a.first_token_step},
          {"finish_step", a.finish_step}};
}

json to_json(const serving& s, const engine::tokenizer& text) {
  const engine::serve_totals& t = s.scheduler->totals();
  const engine::cache_counts& c = s.counts;
  json requests = json::array();
  for (const engine::answer* a : s.scheduler->answers()) requests.push_back(to_json(*a, text));
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
                       {"evictions", c.evictions},
                       {"copies", c.copies},
                       {"seconds", s.seconds}};
  return {{"cache", s.kind}, {"sequences", s.sequences}, {"requests", requests}, {"totals", totals}};
}

/// The answers in which the runs differ, as indices.
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

void print_answers(const serving& s, const engine::tokenizer& text) {
  std::printf("answers (%s)\n%-16s %4s %6s %6s %8s %5s  %s\n", s.kind.c_str(), "id", "turn", "sample",
              "asked", "reused", "new", "text");
  for (const engine::answer* a : s.scheduler->answers()) {
    std::printf("%-16s %4d %6d %6d %8d %5zu  %s\n", first_words(a->from->id).c_str(), a->turn, a->sample,
                a->prompt_tokens, a->reused, a->ids().size(), first_words(text.decode(a->ids())).c_str());
  }
  std::printf("\n");
}

void print_table(const std::vector<serving>& runs, const std::vector<std::size_t>& different) {
  using cell = const serving&;
  const auto totals = [](cell s) -> const engine::serve_totals& { return s.scheduler->totals(); };
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

// The first thing that went wrong although the runs came to their end.
std::optional<engine::error> failure_of(const options& o, const std::vector<serving>& runs,
                                        const std::vector<std::size_t>& different) {
  for (const serving& s : runs) {
    if (!s.scheduler->failure()) continue;
    engine::error e = *s.scheduler->failure();
    e.file = o.requests;
    return e;
  }
  if (different.empty()) return {};
  return engine::cannot_run("answers_differ", "id",
                            runs.front().scheduler->answers()[different.front()]->from->id);
}

engine::result<json> run(const options& o, std::optional<engine::error>& failure) {
  const auto file = engine::read_file(o.requests, "--requests");
  if (!file) return file.error();
  const auto lines = engine::parse_workload(*file, o.requests);
  if (!lines) return lines.error();
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  const int context = (*parts)->model->shape().kv.max_positions;
  const auto jobs = engine::tokenise(*lines, *(*parts)->text, context, o.requests);
  if (!jobs) return jobs.error();
  const budget b = plan_budget(o, *jobs, context);

  std::vector<std::string> kinds{o.common.cache};
  if (o.common.cache == "both") kinds = {"contiguous", "paged"};
  std::vector<serving> runs;
  json documents = json::array();
  for (const std::string& kind : kinds) {
    auto opened = open_serving(o, kind, b, *jobs, **parts);
    if (!opened) return opened.error();
    serving& s = runs.emplace_back(std::move(*opened));
    if (engine::status done = serve(s); !done) return done.error();
    documents.push_back(to_json(s, *(*parts)->text));
  }
  const std::vector<std::size_t> different = differences(runs);
  failure = failure_of(o, runs, different);
  if (!o.common.as_json) {
    print_answers(runs.back(), *(*parts)->text);
    print_table(runs, different);
    if (failure) std::fprintf(stderr, "error: %s\n", describe(*failure).c_str());
    return json();
  }
  json document = failure ? to_json(*failure) : json{{"schema", "kvcache.engine_serve.v1"}};
  document["block_tokens"] = o.common.block_size;
  document["longest_tokens"] = b.longest;
  document["runs"] = std::move(documents);
  if (runs.size() > 1) document["answers_equal"] = different.empty();
  return document;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Serves a workload with continuous batching, from a paged or a contiguous cache.",
               "engine_serve");
  options o;
  add_options(app, o);
  // What failed while others were served is reported beside their answers.
  std::optional<engine::error> failure;
  const int code = engine::run_program(app, argc, argv, o.common, [&] { return run(o, failure); });
  return code == 0 && failure ? static_cast<int>(failure->kind) : code;
}
