// SPDX-License-Identifier: Apache-2.0
//
// block_sizes: what the number of tokens per block costs. Only the last block of a sequence can be partly
// empty, and only whole blocks can be shared, so small blocks waste less and share more; large blocks make
// tables, indexes and the lists that kernels read shorter. Beside them stands what paging replaces: one
// region per sequence, long enough for the longest text.
//
//   block 4   | a a a a | a a a a | a . . . |              3 empty, 3 table entries
//   block 8   | a a a a a a a a | a . . . . . . . |        7 empty, 2 table entries
//   region    | a a a a a a a a a . . . . . . . . . . |    reserved for as long as the sequence lives
//
// The program runs the control plane alone: a server's day of chats, agents and documents goes through the
// real cache, with token ids but without keys, values or a model. How much of a prompt should be found is
// known from comparing it with everything sent before, so every single hit is checked.

#include "example.hpp"
#include "kvcache/plan.hpp"
#include "simulation.hpp"

namespace {

using block_sizes::job;
using block_sizes::outcome;
using block_sizes::simulation;

struct options {
  engine::common_options common;
  int scale = 40;  ///< conversations of each kind
  int batch = 32;
  int region = 4096;
  std::uint64_t seed = 1;
};

void print_row(engine::report& out, const outcome& r, const outcome& region) {
  const kvcache::bytes token = kvcache::bytes_per_token(kvcache::group_of(block_sizes::shape));
  const auto bytes = static_cast<double>(token.count) * static_cast<double>(r.peak_blocks * r.block);
  const auto most = static_cast<double>(token.count) * static_cast<double>(region.peak_blocks * region.block);
  const bool shares = &r != &region;
  out.print("%-8s %8.1f %% %10.2f %8.1f x %14s %12s", r.name.c_str(), r.used_percent(), bytes / (1 << 30),
            most / bytes, engine::thousands(4 * r.peak_entries).c_str(), engine::thousands(r.nodes).c_str());
  out.print(shares ? " %14.2f %%\n" : "              -\n", r.lost_percent());
  out.figures["rows"].push_back({{"block", shares ? engine::json(r.block) : engine::json("region")},
                                 {"used_percent", r.used_percent()},
                                 {"peak_bytes", bytes},
                                 {"peak_table_bytes", 4 * r.peak_entries},
                                 {"index_nodes", r.nodes},
                                 {"tokens_reused", r.reused},
                                 {"tokens_reusable", r.could_reuse},
                                 {"sharing_lost_percent", r.lost_percent()}});
}

void check(engine::report& out, const std::vector<outcome>& rows, const outcome& region) {
  bool hits = true;
  bool sound = region.sound;
  bool ordered = true;
  bool same_day = true;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    hits = hits && rows[i].wrong_hits == 0 && rows[i].reused > 0;
    sound = sound && rows[i].sound;
    same_day = same_day && rows[i].steps == region.steps && rows[i].could_reuse == rows[0].could_reuse;
    if (i == 0) continue;
    const outcome& smaller = rows[i - 1];
    ordered = ordered && rows[i].used_percent() < smaller.used_percent() && rows[i].reused < smaller.reused &&
              rows[i].peak_entries < smaller.peak_entries;
  }
  const auto usual = std::find_if(rows.begin(), rows.end(), [](const outcome& r) { return r.block == 16; });
  out.claim("every prompt finds exactly what an earlier text has in common with it, in whole blocks", hits);
  out.claim("larger blocks use less of their memory, share less, and have shorter tables", ordered);
  out.claim("blocks of 16 tokens use at least 96 % of their memory, regions 20 to 40 %",
            usual->used_percent() >= 96 && region.used_percent() >= 20 && region.used_percent() <= 40);
  out.claim("all runs served the same requests in the same steps", same_day);
  out.claim("every cache is sound, and nothing leaked or was evicted", sound);
}

engine::result<std::string> run(const options& o, engine::report& out) {
  const std::vector<job> jobs = block_sizes::day(o.scale, o.seed).take();
  std::size_t tokens = 0;
  std::size_t longest = 0;
  for (const job& j : jobs) {
    tokens += j.text.size();
    longest = std::max(longest, j.text.size());
  }
  out.print("%zu requests, %zu tokens on average, %zu at most; %d at a time\n\n", jobs.size(),
            tokens / jobs.size(), longest, o.batch);
  auto region = simulation<block_sizes::reserving>(jobs, o.batch, o.region, 16).run();
  if (!region) return region.error();
  std::vector<outcome> rows;
  for (const int block : {8, 16, 32, 64, 128}) {
    auto made = simulation<kvcache::serving>(jobs, o.batch, o.region, block).run();
    if (!made) return made.error();
    rows.push_back(*made);
  }
  out.print("%-8s %10s %10s %10s %14s %12s %16s\n", "block", "used", "peak, GiB", "fits", "tables, bytes",
            "index nodes", "sharing lost");
  for (const outcome& r : rows) print_row(out, r, *region);
  print_row(out, *region, *region);
  out.print("\n");
  check(out, rows, *region);
  return engine::formatted(
      "used %.1f %% with blocks of 8 tokens, %.1f %% with 16, %.1f %% with 128, %.1f %% with regions; "
      "sharing lost %.2f, %.2f, %.2f %%",
      rows[0].used_percent(), rows[1].used_percent(), rows[4].used_percent(), region->used_percent(),
      rows[0].lost_percent(), rows[1].lost_percent(), rows[4].lost_percent());
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("What the number of tokens per block costs, on a mixed workload.", "block_sizes");
  options o;
  line.add("--scale", o.scale, "conversations of each kind", 1, 1000);
  line.add("--batch", o.batch, "requests at a time", 1, 1024);
  line.add("--region", o.region, "longest text that a server has to expect, in tokens", 1, 1 << 20);
  line.add("--seed", o.seed, "of the workload");
  line.add("--json", o.common.as_json, "one JSON document on stdout, progress on stderr");
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
