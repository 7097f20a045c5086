// SPDX-License-Identifier: Apache-2.0
// Decode against the read ceiling, and chunks of prompts.
#include <set>

#include "gpu/bench.hpp"

namespace kvcache::gpu_check {
namespace {

std::vector<field> names_of(const attend_case& c) {
  return {{"format", c.stored.name}, {"batch", c.batch}, {"tokens", c.tokens},
          {"group", c.group},        {"block", c.block}, {"dim", c.dim}};
}

void add_decode(bench& b, const attend_case& c, const attend_call& call, row& r) {
  const auto attend = [&] { call.attend(b); };
  const spread us = spread_of(b.timed(attend));
  const auto bytes = kv_bytes(c);
  const double rate = gb_per_second(double(bytes), us.median);
  const double ceiling = gb_per_second(double(bytes), b.read_ceiling(bytes));
  for (const field& f : std::vector<field>{{"KV MB", double(bytes) / 1e6},
                                           {"us", us.median},
                                           {"us low", us.low},
                                           {"us high", us.high},
                                           {"GB/s", rate},
                                           {"ceiling GB/s", ceiling},
                                           {"of ceiling", ceiling > 0 ? rate / ceiling : 0}}) {
    r.fields.push_back(f);
  }
}

void add_prefill(bench& b, const attend_case& c, const attend_call& call, row& r) {
  const spread us = spread_of(b.timed([&] { call.attend(b); }));
  const double flops = attend_flops(c);
  r.fields.emplace_back("us", us.median);
  r.fields.emplace_back("us low", us.low);
  r.fields.emplace_back("us high", us.high);
  r.fields.emplace_back("TFLOP/s", us.median > 0 ? flops / us.median / 1e6 : 0);
}

/// A line as soon as there is one, so that a run that is stopped has told what it knew.
void tell(const row& r) {
  std::string line = r.table;
  for (const field& f : r.fields) line.append(" ").append(f.is_text ? f.text : number_text(f.number, 4));
  std::printf("%s %s\n", line.c_str(), r.refused.c_str());
  std::fflush(stdout);
}

/// One row per case; a case that fails becomes a row that says so, and the rest goes on.
template <class Add>
std::vector<row> measure(bench& b, const char* table, const std::vector<attend_case>& cases, Add&& add) {
  std::vector<row> rows;
  std::set<std::string> seen;
  for (const attend_case& asked : cases) {
    const attend_case c = shrunk(asked, b.options.shrink);
    row r{table, names_of(c), {}};
    if (c.rows > 1) r.fields.emplace_back("rows", c.rows);
    if (!seen.insert(json_of({}, {r})).second) continue;  // the same case once it is shrunk
    if (b.late()) {
      r.refused = "not reached in the time given";
    } else {
      try {
        const prepared p = prepare(b, c);
        r.refused = p.reason;
        if (r.refused.empty()) {
          const attend_call call(b, c, p.layer, p.plan);
          call.attend(b);
          if (!call.plausible(b)) throw gpu_failure("results that are not finite, or all 0");
          if (c.rows == 1) r.fields.emplace_back("splits", p.plan.splits);
          add(b, c, call, r);
        }
      } catch (const gpu_failure& e) {
        r.refused = std::string(failed_mark) + e.what();
      }
    }
    tell(r);
    rows.push_back(r);
  }
  return rows;
}

}  // namespace

std::vector<row> measure_decode(bench& b) {
  return measure(b, "Decode", decode_cases(b.options.full), &add_decode);
}

std::vector<row> measure_prefill(bench& b) {
  return measure(b, "Prefill", prefill_cases(), &add_prefill);
}

}  // namespace kvcache::gpu_check
