// SPDX-License-Identifier: Apache-2.0
// gpu_bandwidth: attention, command lists and calls timed on a GPU. Not run on a GPU yet.
//
//   gpu_bandwidth [--full] [--seconds N] [--driver TEXT] [--json FILE] [--markdown FILE]
//   gpu_bandwidth --card     which card it is
//   gpu_bandwidth --list     the cases, their bytes and whether there is a plan; needs no GPU
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "gpu/bench.hpp"

namespace kvcache::gpu_check {
namespace {

struct arguments {
  bench_options bench;
  bool card = false, list = false, right = true;
  std::string driver, json, markdown;
};

arguments read_arguments(int argc, char** argv) {
  arguments a;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 < argc) return argv[++i];
      a.right = false;
      return {};
    };
    if (name == "--full") {
      a.bench.full = true;
    } else if (name == "--card") {
      a.card = true;
    } else if (name == "--list") {
      a.list = true;
    } else if (name == "--seconds") {
      a.bench.seconds = std::atof(value().c_str());
    } else if (name == "--shrink") {
      a.bench.shrink = std::atoi(value().c_str());
    } else if (name == "--driver") {
      a.driver = value();
    } else if (name == "--json") {
      a.json = value();
    } else if (name == "--markdown") {
      a.markdown = value();
    } else {
      a.right = false;
    }
  }
  a.right = a.right && a.bench.seconds > 0 && a.bench.shrink > 0;
  if (a.bench.shrink > 1) {
    a.bench.times = 1;
    a.bench.memory_part = 0.02;
  }
  return a;
}

int list_cases(bool full) {
  std::vector<row> rows;
  std::vector<attend_case> cases = decode_cases(full);
  for (const attend_case& c : prefill_cases()) cases.push_back(c);
  for (const attend_case& c : cases) {
    const layer_or_reason d = describe_layer(c, static_cast<int32_t>(blocks_of(c)), nullptr);
    const plan_or_reason p = d.reason.empty() ? plan_case(c, d.layer, 132) : plan_or_reason{};
    rows.push_back({c.rows > 1 ? "Prefill" : "Decode",
                    {{"format", c.stored.name},
                     {"batch", c.batch},
                     {"tokens", c.tokens},
                     {"group", c.group},
                     {"block", c.block},
                     {"dim", c.dim},
                     {"rows", c.rows},
                     {"KV MB", double(kv_bytes(c)) / 1e6},
                     {"splits", p.plan.splits}},
                    d.reason + p.reason});
  }
  std::printf("%s", markdown_of({}, rows).c_str());
  return 0;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::strftime(text, sizeof text, "%Y-%m-%d", &utc);
  return text;
}

int show_card() {
  bench b({.full = false, .seconds = 60, .memory_part = 0.01, .times = 1, .shrink = 1});
  for (const field& f : b.card()) {
    std::printf("%-18s %s\n", f.name.c_str(), f.is_text ? f.text.c_str() : number_text(f.number, 5).c_str());
  }
  std::printf("%-18s %s\n", "SM MHz now", number_text(b.clock_now(), 5).c_str());
  return 0;
}

int measure_all(const arguments& a) {
  bench b(a.bench);
  std::vector<row> rows;
  const auto part = [&](const char* what, auto&& measure) {
    std::printf("%s\n", what);
    std::fflush(stdout);
    try {
      const std::vector<row> more = measure(b);
      rows.insert(rows.end(), more.begin(), more.end());
    } catch (const std::exception& e) {
      std::printf("failed: %s: %s\n", what, e.what());
      rows.push_back({what, {}, std::string(failed_mark) + e.what()});
    }
  };
  b.warm_up();
  std::vector<field> common = b.card();  // now: after a fault no call answers any more
  common.emplace_back("SM MHz before", b.clock_now());
  part("Host", measure_host);
  part("Moves", measure_moves);
  part("Prefill", measure_prefill);
  part("Decode", measure_decode);
  const std::vector<row> targets = targets_of(rows);
  rows.insert(rows.end(), targets.begin(), targets.end());
  bool failed = false;
  for (const row& r : rows) failed = failed || r.refused.rfind(failed_mark, 0) == 0;
  common.emplace_back("SM MHz after", failed ? 0 : b.clock_now());
  if (!a.driver.empty()) common.emplace_back("driver", a.driver);
  common.emplace_back("date", today());
  const std::string text = markdown_of(common, rows);
  std::printf("\n%s", text.c_str());
  if (!a.json.empty() && !write_file(a.json, json_of(common, rows))) failed = true;
  if (!a.markdown.empty() && !write_file(a.markdown, text)) failed = true;
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace kvcache::gpu_check

int main(int argc, char** argv) {
  using namespace kvcache::gpu_check;
  const arguments a = read_arguments(argc, argv);
  if (!a.right) {
    std::printf(
        "usage: gpu_bandwidth [--full] [--seconds N] [--driver TEXT] [--json FILE] [--markdown FILE] "
        "| --card | --list\n");
    return 2;
  }
  if (a.list) return list_cases(a.bench.full);
  return on_a_gpu([&] { return a.card ? show_card() : measure_all(a); });
}
