// SPDX-License-Identifier: Apache-2.0
#include "replay/summary.hpp"

#include <cstdio>

namespace kvcache::cli {
namespace {

std::string percent(std::int64_t part, std::int64_t whole) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%",
                whole > 0 ? 100.0 * static_cast<double>(part) / static_cast<double>(whole) : 0.0);
  return text;
}

hit_count minus(const hit_count& a, const hit_count& b) {
  return {a.blocks - b.blocks, a.tokens - b.tokens, a.requests - b.requests};
}
hit_count hits_of(const replay_result& r) {
  return {r.hit_blocks, r.hit_tokens, r.requests_with_hit};
}

}  // namespace

loss_summary summarize(const traffic& of, const replay_options& how, const replay_result& run,
                       const replay_progress& tell) {
  hit_count alone = hits_of(run);
  if (how.workers > 1) {
    replay_options one = how;
    one.workers = 1;
    alone = hits_of(replay(of, one, tell));
  }
  loss_summary s;
  s.ceiling = of.ceiling();
  s.lost_to_capacity = minus(s.ceiling, alone);
  s.lost_to_routing = minus(alone, hits_of(run));
  s.requests = static_cast<std::int64_t>(of.source().requests.size());
  s.share_less_than_block = s.requests - s.ceiling.requests;
  for (const request& r : of.source().requests) {
    s.shorter_than_block += r.input_tokens < of.source().block_tokens && r.count == 0;
  }
  return s;
}

std::string loss_summary::text(const traffic& of) const {
  const std::string block = std::to_string(of.source().block_tokens);
  std::string t = percent(ceiling.tokens, of.tokens());
  t.append(" of the tokens could be found in a cache without bound.\n");
  t.append(percent(lost_to_capacity.tokens, of.tokens())).append(" are lost to capacity.\n");
  t.append(percent(lost_to_routing.tokens, of.tokens())).append(" are lost to routing.\n");
  t.append(percent(share_less_than_block, requests));
  t.append(" of the requests share less than one block (").append(block);
  t.append(" tokens) with any earlier request");
  if (shorter_than_block > 0) {
    t.append("; ").append(percent(shorter_than_block, requests)).append(" are shorter than a block");
  }
  return t.append(".\n");
}

}  // namespace kvcache::cli
