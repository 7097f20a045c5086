// SPDX-License-Identifier: Apache-2.0
//
// engine_serve: a workload under continuous batching. With --cache both it runs twice in the same memory,
// once with a reserved region per sequence and once paged, and compares: memory, work, time, answers. With
// --policy every request is served under a retention policy, from a paged cache.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <optional>
#include <thread>
#include <utility>

#include "program.hpp"
#include "serve_report.hpp"
#include "session_kind.hpp"
#include "workload.hpp"

namespace {

using engine::json;
using engine::serving;
using clock_type = std::chrono::steady_clock;

// Unless --blocks says otherwise, the pool has room for this many sequences of the longest length.
constexpr std::int64_t default_regions = 3;

struct options {
  engine::common_options common;
  engine::policy_options retention{.policy = "full", .mode = "stream"};
  bool drops = false;  ///< --policy was given
  std::string requests;
  std::optional<std::int64_t> blocks;
  int batch = 24;
  std::string eviction = "lru";
  bool ignore_end = false;
};

// What does not go together is said before anything is loaded.
void check_options(const CLI::App& app, options& o) {
  o.drops = app.count("--policy") > 0;
  if (!o.drops && app.count("--mode") > 0)
    throw CLI::ValidationError("--mode", o.retention.mode + " without --policy");
  if (!o.drops) return;
  if (app.count("--cache") > 0 && o.common.cache != "paged")
    throw CLI::ValidationError("--cache", o.common.cache + "; with --policy: paged");
  if (o.eviction != "lru") throw CLI::ValidationError("--eviction", o.eviction + "; with --policy: lru");
  o.common.cache = "paged";
}

void add_options(engine::command_line& line, options& o) {
  CLI::App& app = line.app();
  o.common.cache = "both";
  o.common.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 256u));
  add_common_options(line, o.common);
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
      ->check(CLI::IsMember({"lru", "fifo", "lfu", "slru", "gdsf", "s3_fifo", "two_q"}))
      ->capture_default_str();
  app.add_flag("--ignore-eos", o.ignore_end, "go on after an end token");
  add_policy_options(line, o.retention);
  app.parse_complete_callback([&app, &o] { check_options(app, o); });
}

/// The memory every kind gets.
struct budget {
  int longest = 1;  ///< tokens of the longest sequence the workload can lead to
  const engine::job* who = nullptr;
  std::int64_t region = 1;  ///< blocks of such a sequence
  std::int64_t blocks = 0;
};

budget plan_budget(const options& o, std::span<const engine::job> jobs, int context, int block_size) {
  budget b;
  for (const engine::job& j : jobs) {
    const std::int64_t most = std::min<std::int64_t>(context, most_tokens(j, j.follow_ups.size()));
    if (b.who != nullptr && most <= b.longest) continue;
    b.longest = static_cast<int>(most);
    b.who = &j;
  }
  const std::int64_t block = std::max(1, block_size);
  b.region = (b.longest + block - 1) / block;
  b.blocks = o.blocks.value_or(default_regions * b.region);
  return b;
}

engine::result<serving> open_serving(const options& o, const std::string& kind,
                                     const std::optional<engine::dropping>& policy, const budget& b,
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
  config.max_sequences = s.sequences;
  config.block_size = o.common.block_size;
  if (policy) engine::use_format(o.common, *policy, config);
  config.max_tokens = b.longest;
  config.eviction = o.eviction;
  config.pool = &parts.pool;
  s.policy = policy;
  auto cache = s.policy ? engine::make_session_kind(*parts.model, *s.policy, config)
                        : engine::make_cache(kind, config);
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
  std::optional<engine::dropping> policy;
  if (o.drops) {
    auto how = engine::read_dropping(o.retention);
    if (!how) return how.error();
    policy = std::move(*how);
  }
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  const int context = (*parts)->model->shape().kv.max_positions;
  const auto jobs = engine::tokenise(*lines, *(*parts)->text, context, o.requests);
  if (!jobs) return jobs.error();
  const int block_size = engine::block_size_of(o.common, policy && policy->packs());
  const budget b = plan_budget(o, *jobs, context, block_size);

  std::vector<std::string> kinds{o.common.cache};
  if (o.common.cache == "both") kinds = {"contiguous", "paged"};
  std::vector<serving> runs;
  json documents = json::array();
  for (const std::string& kind : kinds) {
    auto opened = open_serving(o, kind, policy, b, *jobs, **parts);
    if (!opened) return opened.error();
    serving& s = runs.emplace_back(std::move(*opened));
    if (engine::status done = serve(s); !done) return done.error();
    documents.push_back(engine::to_json(s, *(*parts)->text));
  }
  const std::vector<std::size_t> different = engine::differences(runs);
  failure = failure_of(o, runs, different);
  if (!o.common.as_json) {
    engine::print_answers(runs.back(), *(*parts)->text);
    engine::print_table(runs, different);
    if (failure) std::fprintf(stderr, "error: %s\n", describe(*failure).c_str());
    return json();
  }
  json document = failure ? to_json(*failure) : json{{"schema", "kvcache.engine_serve.v1"}};
  document["block_tokens"] = block_size;
  document["longest_tokens"] = b.longest;
  document["runs"] = std::move(documents);
  if (runs.size() > 1) document["answers_equal"] = different.empty();
  return document;
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("Serves a workload with continuous batching, from a paged or a contiguous cache.",
                            "engine_serve");
  options o;
  add_options(line, o);
  // What failed while others were served is reported beside their answers.
  std::optional<engine::error> failure;
  const int code = engine::run_program(line, argc, argv, o.common, [&] { return run(o, failure); });
  return code == 0 && failure ? static_cast<int>(failure->kind) : code;
}
