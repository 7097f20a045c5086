// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kvcache/plan.hpp"
#include "plan/catalogue.hpp"
#include "plan/plan_report.hpp"

namespace kvcache::cli {
namespace {

// A number, or null for "not known" and "not asked".
template <class T>
json or_null(T value, bool known) {
  return known ? json(value) : json(nullptr);
}
json or_null(const std::optional<std::int64_t>& value) {
  return value ? json(*value) : json(nullptr);
}

const pool* pool_of_layer(const plan& p, const layer& l) {
  const auto at = std::find_if(p.pools.begin(), p.pools.end(), [&](const pool& q) {
    return q.kind == l.kind && q.window == l.window && q.shape.kv_heads == l.kv_heads &&
           q.shape.head_dim_k == l.head_dim_k && q.shape.head_dim_v == l.head_dim_v;
  });
  return at == p.pools.end() ? nullptr : &*at;
}

// Whole where it is whole.
json ratio(std::int64_t a, std::int64_t b) {
  return a % b == 0 ? json(a / b) : json(static_cast<double>(a) / static_cast<double>(b));
}

json layer_document(const plan& p, std::size_t index) {
  const layer& l = p.asked.subject.layers[index];
  json out = {{"layer", index}, {"kind", name_of(l.kind)}, {"window", or_null(l.window, l.window != 0)}};
  const pool* q = l.kind == layer_kind::none ? nullptr : pool_of_layer(p, l);
  out["kv_heads"] = l.kv_heads;
  out["head_dim_k"] = l.head_dim_k;
  out["head_dim_v"] = l.head_dim_v;
  out["values_per_token"] = q == nullptr ? 0 : values_per_token_layer(q->shape);
  out["bytes_per_token"] =
      q == nullptr
          ? json(0)
          : ratio(block_bytes(q->shape, q->block_size, q->block).count / q->shape.layers, q->block_size);
  return out;
}

json pool_document(const pool& q) {
  return {{"layers", q.shape.layers},
          {"kind", name_of(q.kind)},
          {"window", or_null(q.window, q.window != 0)},
          {"kv_heads", q.shape.kv_heads},
          {"head_dim_k", q.shape.head_dim_k},
          {"head_dim_v", q.shape.head_dim_v},
          {"block_bytes", block_bytes(q.shape, q.block_size, q.block).count},
          {"open_block_bytes", open_block_bytes(q.shape, q.block_size, q.block).count}};
}

void add_holding(const holding& h, json& out) {
  out["bytes_per_token"] = h.bytes_per_token;
  out["sequence_bytes"] = h.sequence_bytes;
  out["kv_bytes"] = h.kv_bytes;
  out["blocks_needed"] = h.blocks_needed;
  out["open_blocks_needed"] = h.open_needed;
  out["blocks"] = h.blocks ? *h.blocks : h.blocks_needed;
  out["open_blocks"] = or_null(h.open_blocks);
  out["max_batch"] = or_null(h.max_batch);
  out["max_context"] = h.max_context && *h.max_context < 0 ? json(nullptr) : or_null(h.max_context);
}

json model_document(const model& m) {
  return {{"name", m.name},
          {"source", m.source},
          {"file", or_null(m.file, !m.file.empty())},
          {"layers", m.layers.size()},
          {"q_heads", or_null(m.q_heads, m.q_heads != 0)},
          {"trained_context", or_null(m.context, m.context != 0)},
          {"parameters", or_null(m.parameters, m.parameters != 0)},
          {"parameters_by", or_null(m.parameters_by, !m.parameters_by.empty())},
          {"experts", or_null(m.experts, m.experts != 0)},
          {"experts_used", or_null(m.experts_used, m.experts != 0)}};
}

json kv_document(const plan& p) {
  const pool& q = p.pools[0];
  const double values = static_cast<double>(read_values(p.pools, p.asked.context));
  return {{"format", p.asked.kv.text},
          {"packed", q.block.lossy},
          {"block_size", p.block_size},
          {"residual", q.block.residual},
          {"exempt", q.block.exempt},
          {"bits_per_value", 8 * static_cast<double>(read_bytes(p.pools, p.asked.context)) / values}};
}

// The same for all layers that cache anything, or null.
json values_per_layer(const plan& p) {
  const std::int64_t first = values_per_token_layer(p.pools[0].shape);
  const bool same = std::all_of(p.pools.begin(), p.pools.end(),
                                [&](const pool& q) { return values_per_token_layer(q.shape) == first; });
  return or_null(first, same);
}

json step_document(const plan& p) {
  const step_traffic step{bytes{p.weights_read}, bytes{p.kv_read}};
  const bool known = p.weight_bytes != 0;
  json out = {{"weights_read_bytes", or_null(p.weights_read, known)},
              {"kv_read_bytes", p.kv_read},
              {"kv_written_bytes", p.kv_written},
              {"kv_over_weights", known ? json(step.cache_over_weights()) : json(nullptr)},
              {"seconds", nullptr},
              {"tokens_per_second", nullptr}};
  if (known && p.asked.bandwidth > 0) {
    out["seconds"] = step.seconds(p.asked.bandwidth);
    out["tokens_per_second"] = p.asked.batch / step.seconds(p.asked.bandwidth);
  }
  return out;
}

json levers_document(const plan& p) {
  json out = json::array();
  for (const lever& l : p.levers) {
    out.push_back({{"name", l.name},
                   {"step_time_factor", l.step_time_factor},
                   {"weights_bits", l.weights_bits},
                   {"kv_bits_per_value", l.kv_bits},
                   {"kv_format", or_null(l.kv_format, !l.kv_format.empty())}});
  }
  return out;
}

const char* regime_text(const plan& p) {
  const step_traffic step{bytes{p.weights_read}, bytes{p.kv_read}};
  return step.dominated_by() == regime::cache_dominated ? "cache_dominated" : "weight_dominated";
}

}  // namespace

json to_document(const plan& p) {
  const plan_request& r = p.asked;
  const bool known = p.weight_bytes != 0;
  json out = {{"schema", "kvcache.plan.v1"},
              {"model", model_document(r.subject)},
              {"kv", kv_document(p)},
              {"context", r.context},
              {"batch", r.batch},
              {"memory_bytes", or_null(r.memory)}};
  out["bandwidth_bytes_per_second"] = or_null(r.bandwidth, r.bandwidth > 0);
  out["values_per_token_layer"] = values_per_layer(p);
  add_holding(p.held, out);
  out["weight_bytes"] = or_null(p.weight_bytes, known);
  out["weights_bits"] = or_null(p.weights_bits, known);
  out["fits"] = p.held.max_batch ? json(*p.held.max_batch >= r.batch) : json(nullptr);
  out["kv_over_weights"] =
      known ? json(static_cast<double>(p.held.kv_bytes) / static_cast<double>(p.weight_bytes))
            : json(nullptr);
  out["regime"] = known ? json(regime_text(p)) : json(nullptr);
  out["step"] = step_document(p);
  out["levers"] = levers_document(p);
  out["without_windows"] = nullptr;
  if (p.library) {
    out["without_windows"] = json::object();
    add_holding(*p.library, out["without_windows"]);
  }
  out["pools"] = json::array();
  for (const pool& q : p.pools) out["pools"].push_back(pool_document(q));
  out["layers"] = json::array();
  for (std::size_t i = 0; i < r.subject.layers.size(); ++i) out["layers"].push_back(layer_document(p, i));
  out["notes"] = p.notes;
  return out;
}

json catalogue_document() {
  json models = json::array();
  for (const architecture& a : catalogue()) {
    const model m = model_of(a);
    const auto full =
        std::count_if(m.layers.begin(), m.layers.end(), [](const layer& l) { return l.window == 0; });
    const std::int64_t values =
        a.latent != 0 ? a.latent + a.rope_dim : std::int64_t{2} * a.kv_heads * a.head_dim;
    models.push_back({{"name", a.name},
                      {"parameters", m.parameters},
                      {"layers", a.layers},
                      {"full_layers", full},
                      {"window", or_null(a.window, a.window != 0)},
                      {"values_per_token_layer", values},
                      {"bytes_per_token", values * a.layers * 2},
                      {"trained_context", a.context}});
  }
  return {{"schema", "kvcache.models.v1"}, {"models", models}};
}

}  // namespace kvcache::cli
