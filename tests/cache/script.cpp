// SPDX-License-Identifier: Apache-2.0
#include "script.hpp"

#include <random>

#include "drive.hpp"
#include "traits.hpp"

namespace kvcache::test {

namespace {

// What is packed how: residuals of 0, 1, half a block, a block and more than one, sealed by the step or when
// the owner says so.
group_rule lossy(int32_t block_size, int32_t total, int32_t open, int32_t how) {
  const int32_t residual[] = {0, 1, block_size / 2, block_size, block_size + 3};
  return {.block_size = block_size,
          .total = total,
          .open = open,
          .lossy = true,
          .residual = residual[how % 5],
          .deferred = how / 5 % 3 == 0};
}

// Tiny pools, so that every few operations must evict, copy or be refused. `tight` makes them smaller still.
std::vector<group_rule> groups_of(int32_t layout, int32_t tight, int32_t how) {
  const auto less = [tight](int32_t n) { return n - n * (tight % 4) / 8; };
  switch (layout) {
    case 0:
      return {{.block_size = 4, .total = less(24)}};
    case 1:
      return {{.block_size = 16, .total = less(24)}, {.block_size = 32, .total = less(14)}};
    case 2:
      return {{.block_size = 8, .total = less(40)}, {.block_size = 64, .total = less(7)}};
    case 3:
      return {lossy(4, less(24), less(24), how)};
    case 4:
      return {lossy(4, less(24), less(28), how), {.block_size = 2, .total = less(48)}};
    case 5:
      return {lossy(2, less(40), less(40), how), lossy(8, less(14), less(18), how / 16)};
    case 6:
      return {{.block_size = 1, .total = less(40)},
              {.block_size = 2, .total = less(24)},
              {.block_size = 4, .total = less(12)}};
    default:
      return {{.block_size = 4, .total = less(24)}, {.block_size = 8, .total = less(12)}};
  }
}

// Exact copies of the first tokens: sometimes beside packed groups, always in the last layout.
void add_first_only(std::vector<group_rule>& groups, int32_t layout, int32_t units, int32_t choice) {
  const bool wanted = layout == 7 || (layout >= 3 && layout <= 5 && choice % 2 == 1);
  if (!wanted) return;
  const int32_t total[] = {units, units / 2 + 1, 4, 3};
  groups.insert(choice % 32 < 16 ? groups.end() : groups.begin(),
                {.block_size = 1 << choice / 2 % 3, .total = total[choice / 64 % 4], .first_only = true});
}

template <class Traits>
outcome run(const rules& r, std::span<const uint8_t> ops) {
  outcome out;
  machine<Traits> m(r, &make_policy<Traits>, ops.size());
  out.failure = m.created();
  if (out.failure.empty()) out.failure = drive(m, ops, &out.operations);
  if (!out.failure.empty()) return out;
  m.close_all();
  if (const std::string why = m.step(); !why.empty()) out.failure = "after closing all: " + why;
  out.activity = m.activity();
  if (m.cache().count().blocks_used != 0) {
    out.failure = "blocks are in use though all sequences are closed";
  }
  return out;
}

}  // namespace

rules rules_of(std::span<const uint8_t> header) {
  rules r;
  const int32_t policy = header[0] % policies;
  r.order = parse_eviction(policy_texts[policy < 2 ? policy : policy - 2]).value;
  const int32_t layout = header[1] % layouts;
  r.groups = groups_of(layout, header[3], header[8]);
  const int32_t unit = r.unit();
  int32_t fit = INT32_MAX;
  int32_t all = 0;
  for (const group_rule& g : r.groups) {
    fit = std::min(fit, g.total * g.block_size);
    all += g.total;
  }
  add_first_only(r.groups, layout, fit / unit, header[9]);
  r.sequences = 2 + header[5] % 4;
  r.max_tokens = std::max(unit, fit * (2 + header[4] % 3) / 6 + header[4] % 3);
  r.nodes = header[6] % 8 == 0 ? 0 : 2 + header[6] % (fit / unit + 2);
  r.scopes = 2 + header[7] % 11;
  // Often as few as a cache may have: what one verb queues for one sequence.
  int32_t least = static_cast<int32_t>(r.groups.size());
  int32_t seals = 0;
  for (const group_rule& g : r.groups) seals += g.deferred ? ceil_div(r.max_tokens, g.block_size) : 0;
  least = std::max(least, seals);
  r.commands = header[7] % 5 == 0 ? least : least + header[6] % 64;
  r.events = header[5] % 3 * 4;
  if (header[2] % 2 == 1) r.limits = {all / 2, all / 3 + 1, all};
  return r;
}

outcome run_ops(const uint8_t* data, size_t size) {
  if (size < header_bytes) return {};
  const std::span<const uint8_t> all(data, size);
  const rules r = rules_of(all);
  const auto ops = all.subspan(header_bytes);
  switch (data[0] % policies) {
    case 0:
      return run<lru_cache>(r, ops);
    case 1:
      return run<lfu_cache>(r, ops);
    default:
      return run<dynamic>(r, ops);
  }
}

std::vector<uint8_t> random_script(uint64_t seed, int32_t policy, int32_t layout, bool accounts,
                                   size_t operations) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> s(header_bytes + operations * operation::encoded_bytes);
  for (uint8_t& b : s) b = static_cast<uint8_t>(random() >> 32);
  s[0] = static_cast<uint8_t>(policy);
  s[1] = static_cast<uint8_t>(layout);
  s[2] = accounts;
  return s;
}

}  // namespace kvcache::test
