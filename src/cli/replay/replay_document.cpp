// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "replay/study.hpp"

namespace kvcache::cli {
namespace {

/// Rises of the curve that a document holds at most; more are thinned out.
constexpr std::size_t most_points = std::size_t{1} << 16;

json or_null(std::int64_t value) {
  return value >= 0 ? json(value) : json(nullptr);
}

json hits(const hit_count& h) {
  return {{"hit_blocks", h.blocks}, {"hit_tokens", h.tokens}, {"requests_with_hit", h.requests}};
}

json lost(const hit_count& h) {
  return {{"blocks", h.blocks}, {"tokens", h.tokens}, {"requests", h.requests}};
}

json share(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? json(static_cast<double>(part) / static_cast<double>(whole)) : json(nullptr);
}

// A time that is a whole number is printed as one.
json seconds(double s) {
  if (s < 0) return nullptr;
  const auto whole = static_cast<std::int64_t>(s);
  return static_cast<double>(whole) == s ? json(whole) : json(s);
}

json trace_document(const study& s) {
  const trace_facts& f = s.source;
  return {{"requests", f.requests},
          {"blocks", f.blocks},
          {"unique_blocks", f.unique_blocks},
          {"tokens", f.tokens},
          {"block_tokens", f.block_tokens},
          {"format", f.format},
          {"files", s.asked.files},
          {"sessions", f.sessions > 0 ? json(f.sessions) : json(nullptr)},
          {"seconds", f.seconds},
          {"longest_request_blocks", f.longest}};
}

json capacity_bytes(const study& s, std::int64_t blocks) {
  std::int64_t bytes = 0;
  if (blocks < 0 || !s.asked.size || __builtin_mul_overflow(blocks, s.source.block_tokens, &bytes) ||
      __builtin_mul_overflow(bytes, s.asked.size->bytes, &bytes)) {
    return nullptr;
  }
  return bytes;
}

json row_document(const study& s, const study_row& row) {
  const replay_result& r = row.result;
  json out = {{"policy", r.policy},
              {"capacity_blocks", or_null(r.capacity_blocks)},
              {"ttl_s", seconds(r.ttl_s)},
              {"workers", r.workers},
              {"route", r.workers > 1 ? json(name_of(r.routing)) : json(nullptr)},
              {"hit_blocks", r.hit_blocks},
              {"hit_tokens", r.hit_tokens},
              {"requests_with_hit", r.requests_with_hit},
              {"evictions", r.evictions},
              {"resident_end", r.resident_end},
              {"mean_resident_blocks", r.mean_resident_blocks}};
  out["block_hit_rate"] = share(r.hit_blocks, s.source.blocks);
  out["token_hit_rate"] = share(r.hit_tokens, s.source.tokens);
  out["of_optimum"] = share(r.hit_tokens, row.optimum_tokens);
  out["lost_to_capacity"] = lost(row.lost_to_capacity);
  out["lost_to_routing"] = lost(row.lost_to_routing);
  out["capacity_bytes"] = capacity_bytes(s, r.capacity_blocks);
  out["asked"] = row.asked;
  return out;
}

json point_document(const curve_point& p) {
  return {{"capacity_blocks", p.capacity_blocks}, {"hit_blocks", p.hit_blocks}, {"hit_tokens", p.hit_tokens}};
}

// Where it rises, and beside that at the capacities of the rows and at powers of two, so that nobody has to
// look between two points for them.
json curve_document(const study& s) {
  if (!s.asked.curve) return nullptr;
  std::vector<curve_point> points = s.curve.thinned(most_points);
  const std::int64_t end = points.back().capacity_blocks;
  const auto add = [&](std::int64_t capacity) {
    curve_point p = s.curve.at(capacity);
    p.capacity_blocks = capacity;
    points.push_back(p);
  };
  for (const study_row& row : s.rows) {
    if (row.result.capacity_blocks >= 0) add(row.result.capacity_blocks);
  }
  for (std::int64_t c = 1; c < end; c *= 2) add(c);
  const auto before = [](const curve_point& a, const curve_point& b) {
    return a.capacity_blocks < b.capacity_blocks;
  };
  const auto same = [](const curve_point& a, const curve_point& b) {
    return a.capacity_blocks == b.capacity_blocks;
  };
  std::sort(points.begin(), points.end(), before);
  points.erase(std::unique(points.begin(), points.end(), same), points.end());
  json out = json::array();
  for (const curve_point& p : points) out.push_back(point_document(p));
  return out;
}

json summary_document(const study& s) {
  return {{"ceiling", hits(s.summary.ceiling)},
          {"requests", s.summary.requests},
          {"share_less_than_block", s.summary.share_less_than_block},
          {"shorter_than_block", s.summary.shorter_than_block}};
}

json model_document(const study& s) {
  if (!s.asked.size) return nullptr;
  return {{"name", s.asked.size->model}, {"kv", s.asked.size->kv}, {"bytes_per_token", s.asked.size->bytes}};
}

}  // namespace

json to_document(const study& s) {
  json out = {{"schema", "kvcache.replay.v1"}, {"trace", trace_document(s)}, {"model", model_document(s)}};
  out["results"] = json::array();
  for (const study_row& row : s.rows) out["results"].push_back(row_document(s, row));
  out["curve"] = curve_document(s);
  out["curve_rate"] = s.curve.rate;
  out["curve_exact_from"] = s.curve.exact_from;
  out["knee"] = point_document(s.knee);
  out["summary"] = summary_document(s);
  out["findings"] = s.findings;
  out["advice"] = s.advice;
  out["notes"] = s.notes;
  return out;
}

}  // namespace kvcache::cli
