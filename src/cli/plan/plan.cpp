// SPDX-License-Identifier: Apache-2.0
#include "plan/plan.hpp"

#include <algorithm>
#include <cmath>

#include "kvcache/plan.hpp"
#include "kvcache/quant/presets.hpp"
#include "output.hpp"
#include "plan/capacity.hpp"

namespace kvcache::cli {
namespace {

bool has_window(const std::vector<pool>& pools) {
  return std::any_of(pools.begin(), pools.end(), [](const pool& p) { return p.window != 0; });
}

void count_weights(plan& p) {
  const model& m = p.asked.subject;
  if (m.parameters == 0) {
    p.notes.emplace_back(
        "the weights are not known (--parameters says how many): all of --memory is the cache's");
    return;
  }
  if (p.asked.weights_bits == 0 && m.stored_bytes != 0) {
    p.weight_bytes = m.stored_bytes;
    p.weights_bits = 8.0 * static_cast<double>(m.stored_bytes) / static_cast<double>(m.parameters);
  } else {
    p.weights_bits = p.asked.weights_bits != 0 ? p.asked.weights_bits : 16;
    p.weight_bytes = weight_bytes(m.parameters, static_cast<std::int32_t>(p.weights_bits)).count;
  }
  if (p.asked.weights_bits == 0 && m.published_bits < 16) {
    p.notes.push_back("weights are counted with 16 bits; they are published with about " +
                      number_text(m.published_bits, 2) + " (--weights-bits)");
  }
}

// Of the weights, the part that a step of the batch reads: with experts chosen evenly, one of E that sees
// k tokens of each B is left out with probability (1 - k/E)^B.
double read_part(const model& m, std::int32_t batch) {
  if (m.expert_parameters == 0) return 1;
  const double out = std::pow(1 - static_cast<double>(m.experts_used) / m.experts, batch);
  return 1 - static_cast<double>(m.expert_parameters) / static_cast<double>(m.parameters) * out;
}

// Bytes of the tokens of a step under a preset, or by its bits alone where the library has no such format.
std::int64_t preset_bytes(const plan& p, const char* preset, std::int32_t bits, std::string& format) {
  std::int64_t sum = 0;
  format = preset;
  for (const pool& q : p.pools) {
    const bool packs = !q.shape.v_aliases_k && q.shape.head_dim_k % 8 == 0 && q.shape.head_dim_v % 8 == 0;
    if (!packs) {
      format = "none";
      sum += read_values({q}, p.asked.context) * bits / 8;
      continue;
    }
    pool packed = q;
    packed.format = find_preset(preset)->format;
    packed.format.k.hadamard = packed.format.v.hadamard = false;  // the same bytes
    packed.block_size = 64;
    packed.block = *block_format_of({&packed.format, 1}, packed.shape, packed.block_size);
    sum += read_bytes({packed}, p.asked.context);
  }
  return times(sum, p.asked.batch, "--batch");
}

void add_levers(plan& p) {
  struct row {
    const char* name;
    double weights_bits;  ///< negative: as now
    const char* preset;   ///< null: as now; empty: a cache of no bytes
    std::int32_t kv_bits;
  };
  constexpr row rows[] = {{"kv_8bit", -1, "kv8", 8},       {"kv_4bit", -1, "kv4", 4},
                          {"weights_8bit", 8, nullptr, 0}, {"weights_4bit", 4, nullptr, 0},
                          {"both_8bit", 8, "kv8", 8},      {"both_4bit", 4, "kv4", 4},
                          {"weights_zero", 0, nullptr, 0}, {"kv_zero", -1, "", 0}};
  const step_traffic step{bytes{p.weights_read}, bytes{p.kv_read}};
  const double values =
      static_cast<double>(read_values(p.pools, p.asked.context)) * static_cast<double>(p.asked.batch);
  for (const row& r : rows) {
    lever l;
    l.name = r.name;
    const double weights = r.weights_bits < 0 ? 1 : r.weights_bits / p.weights_bits;
    l.weights_bits = r.weights_bits < 0 ? p.weights_bits : r.weights_bits;
    double kv = static_cast<double>(p.kv_read);
    if (r.preset != nullptr) {
      kv = *r.preset == 0 ? 0.0 : static_cast<double>(preset_bytes(p, r.preset, r.kv_bits, l.kv_format));
    }
    l.kv_bits = 8 * kv / values;
    l.step_time_factor = step.factor(weights, kv / static_cast<double>(p.kv_read));
    p.levers.push_back(std::move(l));
  }
}

void count_step(plan& p) {
  const plan_request& r = p.asked;
  p.weights_read = std::llround(static_cast<double>(p.weight_bytes) * read_part(r.subject, r.batch));
  if (r.subject.expert_parameters == 0) p.weights_read = p.weight_bytes;
  p.kv_read = times(read_bytes(p.pools, r.context), r.batch, "--batch");
  std::int64_t written = 0;
  for (const pool& q : p.pools) written += bytes_per_token(q.shape).count;
  p.kv_written = written * r.batch;
  if (p.weight_bytes != 0) add_levers(p);
}

}  // namespace

plan make_plan(plan_request request) {
  plan p;
  p.asked = std::move(request);
  const plan_request& r = p.asked;
  p.notes = r.subject.notes;
  p.pools = pools_of(r.subject, r.kv, r.block, p.notes);
  p.block_size = p.pools[0].block_size;
  count_weights(p);
  capacity_question q{r.context, r.batch, r.memory};
  if (q.memory) *q.memory = std::max<std::int64_t>(0, *q.memory - p.weight_bytes);
  const auto library = [&] { return library_holding(groups_of(p.pools), q); };
  if (has_window(p.pools)) {
    p.held = windowed_holding(p.pools, q);
    if (groups_of(p.pools).size() <= max_groups) p.library = library();
    p.notes.emplace_back(
        "window layers are counted with no more than their window; this library keeps them in full "
        "(without_windows)");
  } else if (groups_of(p.pools).size() <= max_groups) {
    p.held = library();
  } else {
    p.held = windowed_holding(p.pools, q);
    p.notes.emplace_back("more kinds of layers than a cache of this library has groups (8)");
  }
  if (r.subject.context != 0 && r.context > r.subject.context) {
    p.notes.push_back("the model is trained for " + count_text(r.subject.context) + " tokens");
  }
  count_step(p);
  return p;
}

}  // namespace kvcache::cli
