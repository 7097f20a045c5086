// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <memory>

#include "command.hpp"
#include "replay/replay_options.hpp"
#include "report/output_file.hpp"
#include "report/page.hpp"
#include "report/plots.hpp"

namespace kvcache::cli {
namespace {

constexpr const char* examples =
    "Examples:\n"
    "  kvcache replay trace.jsonl\n"
    "  kvcache replay trace.jsonl.zst --policy lru,slru,s3_fifo --capacity 1M,4M,16M --html report.html\n"
    "  kvcache replay log-*.jsonl --policy ttl --ttl 60,300,3600 --capacity inf\n"
    "  kvcache replay trace.jsonl --workers 4 --route random,round_robin,prefix_affinity --seed 1 --capacity "
    "8M\n"
    "  kvcache replay trace.jsonl --model llama-3-8b --kv fp8 --capacity 20GiB,40GiB --curve --json\n"
    "\n"
    "Formats are recognised by content, plain or zstd: docs/traces.md. Every number is defined in "
    "docs/replay.md.\n"
    "Exit codes: 0 answered, 1 cannot run, 2 wrong command line, 3 bad input.\n";

void add_what(CLI::App& app, replay_arguments& o) {
  app.add_option("FILE", o.files, "traces, read as one by their times")->type_name("");
  app.add_option(
         "--policy", o.policies,
         "lru, fifo, lfu, slru, ttl, priority, gdsf, s3_fifo, two_q; belady (the optimum), belady_bypass; "
         "several with commas, settings as in s3_fifo:small=20,uses=1")
      ->type_name("NAME,...")
      ->capture_default_str();
  app.add_option(
         "--capacity", o.capacities,
         "of all workers: 2048b or 2048blocks, 4M or 512k tokens (2^20, 2^10), bytes such as 80GiB with "
         "--model, inf; default: powers of four that suit the trace, and inf")
      ->type_name("SIZE,...");
  app.add_option("--ttl", o.ttls, "seconds after its last use that a block lives under ttl")
      ->type_name("S,...");
  app.add_option("--workers", o.workers, "each has an equal part of the capacity")
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--route", o.routes, "random, round_robin, prefix_affinity, affinity_load")
      ->type_name("NAME,...")
      ->capture_default_str();
  app.add_option("--seed", o.seed, "of random; also varies a sampled curve")->type_name("N");
  app.add_flag("--no-optimum", o.no_optimum, "without the rows of belady beside those that were asked for");
}

void add_output(CLI::App& app, replay_arguments& o) {
  app.add_flag("--curve", o.curve, "the hits of lru at every capacity");
  app.add_option("--sample", o.sample, "share of the blocks that the curve looks at, such as 0.1")
      ->type_name("RATE");
  app.add_option("--plot", o.plot,
                 "write drawings there: hit_rate.svg, losses.svg, over_time.svg, reuse_distance.svg")
      ->type_name("DIR");
  app.add_option("--html", o.html, "write a report, one page that needs nothing else")->type_name("FILE");
}

void add_reading(CLI::App& app, replay_arguments& o) {
  app.add_option("--model", o.model,
                 "by name (kvcache plan --list): what a token takes, for capacities in bytes")
      ->type_name("NAME");
  app.add_option("--kv", o.kv, "how that model's cache is stored, as in kvcache plan")
      ->type_name("FORMAT")
      ->capture_default_str();
  app.add_option("--block", o.block, "tokens of a block, where the trace leaves it open")->type_name("N");
  app.add_option("--ids", o.ids,
                 "whether equal ids in two files are the same block: automatic, shared, per_file")
      ->type_name("SCOPE")
      ->capture_default_str();
  app.add_option(
         "--session-gap", o.session_gap,
         "seconds from the start of one file to that of the next, where times begin at 0 in each session")
      ->type_name("S")
      ->capture_default_str();
}

/// The files that are written, opened before the work starts.
struct outputs {
  std::vector<output_file> plots;
  std::unique_ptr<output_file> page;
};

// A report must not take the place of a trace.
output_file open_output(const char* option, const std::string& path, const replay_arguments& o) {
  for (const std::string& file : o.files) {
    std::error_code unknown;
    if (file == path || std::filesystem::equivalent(file, path, unknown)) {
      throw error(failure::usage, "conflict", option, path)
          .wanting("another file than the trace that is read");
    }
  }
  return {option, path};
}

outputs open_outputs(const CLI::App& app, const replay_arguments& o) {
  outputs out;
  if (app.count("--plot") != 0) {
    std::error_code failed;
    std::filesystem::create_directories(o.plot, failed);
    if (failed) {
      throw error(failure::cannot_run, "cannot_write", "--plot", o.plot.empty() ? "empty" : o.plot)
          .wanting(failed.message());
    }
    for (const char* name : plot_files)
      out.plots.push_back(open_output("--plot", o.plot + "/" + name + ".svg", o));
  }
  if (app.count("--html") == 0) return out;
  out.page = std::make_unique<output_file>(open_output("--html", o.html, o));
  for (const output_file& plot : out.plots) {
    if (plot.target() != out.page->target()) continue;
    throw error(failure::usage, "conflict", "--html", o.html)
        .wanting("another file than a drawing of --plot");
  }
  return out;
}

json write(const study& s, outputs& to) {
  json files = json::array();
  if (!to.plots.empty()) {
    const std::vector<plot> plots = plots_of(s, true);
    for (std::size_t i = 0; i < plots.size(); ++i) {
      to.plots[i].finish(plots[i].wide);
      files.push_back(to.plots[i].path());
    }
  }
  if (to.page) {
    to.page->finish(page_of(s));
    files.push_back(to.page->path());
  }
  return files;
}

// As it can be given to a shell again.
std::string quoted(const std::string& word) {
  const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@%";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::string command_line(const CLI::App& app, const replay_arguments& o) {
  std::string out = "kvcache replay";
  for (const std::string& file : o.files) out += concat({" ", quoted(file)});
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || name.rfind("--", 0) != 0 || name == "--json" || name == "--progress")
      continue;
    out += concat({" ", name});
    if (option->get_type_size() > 0) out += concat({" ", quoted(option->results()[0])});
  }
  return out;
}

json run_replay(const CLI::App& app, const replay_arguments& o, progress& meter) {
  study_request request = read_arguments(app, o);  // what is cheap to check before a file is read
  request.command = command_line(app, o);
  outputs to = open_outputs(app, o);
  const trace read = read_trace(request.files, request.reading,
                                [&](const read_progress& p) { meter.update("reading", p.bytes, p.total); });
  if (read.block_tokens == 0) {
    throw error(failure::bad_input, "lengths_only", "hash_ids", "missing", request.files[0])
        .wanting("a trace with ids of blocks or tokens: lengths alone do not say what comes again");
  }
  const traffic ready(
      read, [&](std::int64_t done, std::int64_t total) { meter.update("counting blocks", done, total); });
  const study s = run_study(ready, std::move(request), meter);
  json document = to_document(s);
  document["files"] = write(s, to);
  return document;
}

}  // namespace

command add_replay(CLI::App& program) {
  const auto options = std::make_shared<replay_arguments>();
  command c;
  c.app = program.add_subcommand("replay", "What a trace of requests would hit, and what it loses where");
  c.app->footer(examples);
  add_what(*c.app, *options);
  add_output(*c.app, *options);
  add_reading(*c.app, *options);
  c.run = [app = c.app, options](progress& meter) { return run_replay(*app, *options, meter); };
  c.describe = replay_text;
  return c;
}

}  // namespace kvcache::cli
