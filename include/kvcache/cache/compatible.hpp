// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which ways of dropping tokens go with which formats. Codes that were packed together cannot be moved apart
// without packing them anew, so a token may be moved or written over only while it is open:
//
//   form           packed blocks exist    all blocks open          both: the exempt tokens are among the
//   sinks whole_blocks   yes                    yes                      without moved sinks: keys are codes
//   gather         no                     yes: open blocks move, later seals pack what stayed
//   overwrite      no                     yes: open slots
//
// The verb `retain` asks check_drop; `compatible` asks it for every plan of a policy, before there is a
// cache.
#include <algorithm>
#include <cstdint>
#include <span>

#include "kvcache/cache/config.hpp"
#include "kvcache/quant/format.hpp"
#include "kvcache/retain/any_retention.hpp"

namespace kvcache {
namespace detail {

/// Whether a drop in this form may be carried out on a sequence of which `sealed[g]` tokens of group g are
/// packed. Fails: unsupported "move_sinks", "sinks", "sealed".
inline status check_drop(const geometry& geo, const int32_t (&sealed)[max_groups],
                         const keep_plan& p) noexcept {
  for (int32_t g = 0; g < geo.groups; ++g) {
    const group_geometry& x = geo.group[g];
    if (!x.format.lossy && !x.first_only) continue;
    if (p.form == drop_form::whole_blocks && p.move_sinks) return {errc::unsupported, "move_sinks", g};
    const int32_t exempt = x.first_only ? x.block_size : x.format.exempt;
    if (p.sinks < exempt) return {errc::unsupported, "sinks", p.sinks};
    if (p.form != drop_form::whole_blocks && sealed[g] != 0) return {errc::unsupported, "sealed", sealed[g]};
  }
  return {};
}

/// A text that is decoded under a policy, as far as lengths go: what is packed, and whether every drop may be
/// carried out.
struct imagined_text {
  const geometry& geo;
  int32_t held = 0;
  int32_t sealed[max_groups] = {};

  void seal(bool deferred_too) noexcept {
    for (int32_t g = 0; g < geo.groups; ++g) {
      const block_format& f = geo.group[g].format;
      if (!f.lossy || (f.deferred && !deferred_too)) continue;
      sealed[g] = std::max(sealed[g], geo.group[g].sealed_at(held));
    }
  }
  status drop(const keep_plan& p) noexcept {
    if (p.form == drop_form::nothing) return {};
    if (status s = check_drop(geo, sealed, p); !s) return s;
    const int32_t gone = std::clamp(held - p.keep, 0, held);
    for (int32_t& n : sealed) n -= std::clamp(n - p.sinks, 0, gone);
    held -= gone;
    return {};
  }
};

/// A prompt of `prompt` tokens, dropped from when it is computed, then `steps` tokens one by one.
inline status imagine(const any_retention& policy, const geometry& geo, int32_t prompt,
                      int32_t steps) noexcept {
  imagined_text t{.geo = geo, .held = prompt};
  t.seal(false);
  retain_lengths n{.held = prompt, .incoming = 1, .unit = geo.unit, .prefill_end = true};
  status s = t.drop(policy.plan(n));
  for (int32_t i = 0; s && i < steps; ++i) {
    t.seal(true);
    ++t.held;
    n = {.held = t.held, .incoming = 1, .unit = geo.unit, .prefill_end = false};
    t.seal(false);
    s = t.drop(policy.plan(n));
  }
  return s;
}

}  // namespace detail

/// When an engine asks a policy for a plan.
enum class drop_times : uint8_t {
  prompt_end,  ///< once, when the prompt is computed
  every_token  ///< then, and after every token that follows
};

/// Whether every drop that `how` plans may be carried out on a cache of this geometry, whatever the length of
/// the prompt. A deferred format is taken to be settled when the prompt's drop is done, and after every token
/// from then on. Fails: unsupported "move_sinks" (the group), "sinks" (as many as the policy keeps: fewer
/// than the format exempts), "sealed" (tokens that are packed when the policy wants to move some: defer the
/// packing and drop at the prompt's end, or drop whole blocks). Cost: up to 120,000 plans. A policy that
/// drops more rarely than every 4,096 tokens is not seen to its first drop.
inline status compatible(const retention& how, const geometry& geo, drop_times when) noexcept {
  const int32_t steps = when == drop_times::every_token ? 4096 : 0;
  for (int32_t prompt = 1; prompt <= 1 << 28; prompt *= 2) {
    if (status s = detail::imagine(how.policy, geo, prompt, steps); !s) return s;
  }
  return {};
}

/// The same for the formats of a cache's layers, one for all or one each; `block_size` in tokens, `deferred`
/// as in block_format. Formats that round nothing go with everything. Fails: also bad_argument "residual" or
/// "exempt" where layers differ in them.
inline status compatible(const retention& how, std::span<const kv_format> layers, int32_t block_size,
                         bool deferred, drop_times when) noexcept {
  geometry geo;
  geo.groups = 1;
  geo.unit = std::max(block_size, 1);
  group_geometry& x = geo.group[0];
  x.block_size = geo.unit;
  for (const kv_format& f : layers) {
    if (f.residual != layers[0].residual) return {errc::bad_argument, "residual", f.residual};
    if (f.exempt != layers[0].exempt) return {errc::bad_argument, "exempt", f.exempt};
    x.format.lossy = x.format.lossy || lossy(f);
    x.format.residual = f.residual;
    x.format.exempt = f.exempt;
  }
  if (!x.format.lossy) return {};
  x.format.deferred = deferred;
  return compatible(how, geo, when);
}

}  // namespace kvcache
