// SPDX-License-Identifier: Apache-2.0
#include "plan/plan_report.hpp"

namespace kvcache::cli {
namespace {

std::string count(const json& n) {
  return count_text(n.get<std::int64_t>());
}

std::string bytes(const json& n) {
  return bytes_text(n.get<std::int64_t>());
}

std::string word(const json& text) {
  return text.get<std::string>();
}

std::string billions(const json& n) {
  const double x = n.get<double>() / 1e9;
  return concat({number_text(x, x < 1 ? 3 : 2), "e9"});
}

std::string pool_line(const json& q) {
  const std::string layers = count(q["layers"]), dim = count(q["head_dim_k"]);
  if (q["kind"] == "latent") return concat({"  ", layers, " x latent of ", dim, " values\n"});
  std::string out = concat({"  ", layers, " x ", count(q["kv_heads"]), " kv heads of ", dim});
  if (q["head_dim_v"] != q["head_dim_k"]) out += concat({" (V ", count(q["head_dim_v"]), ")"});
  if (!q["window"].is_null()) out += concat({", window ", count(q["window"])});
  return out += '\n';
}

std::string head(const json& d) {
  const json& m = d["model"];
  std::string out = concat({word(m["name"]), ": ", count(m["layers"]), " layers"});
  if (!m["parameters"].is_null()) {
    out += concat({", ", billions(m["parameters"]), " parameters (", word(m["parameters_by"]), ")"});
  }
  out += '\n';
  for (const json& q : d["pools"]) out += pool_line(q);
  const json& kv = d["kv"];
  return out += concat({"  cache ", word(kv["format"]), ", ", number_text(kv["bits_per_value"], 3),
                        " bits per value, blocks of ", count(kv["block_size"]), " tokens\n"});
}

std::string sizes(const json& d) {
  table t;
  t.add({"per token", bytes(d["bytes_per_token"])});
  t.add({"per sequence", bytes(d["sequence_bytes"])});
  t.add({"cache", bytes(d["kv_bytes"])});
  if (!d["weight_bytes"].is_null()) {
    t.add({concat({"weights, ", number_text(d["weights_bits"], 2), " bits"}), bytes(d["weight_bytes"])});
    t.add({"cache over weights", number_text(d["kv_over_weights"], 2)});
  }
  return concat({"\nBatch ", count(d["batch"]), " x ", count(d["context"]), " tokens\n", t.text()});
}

std::string context_text(const json& n) {
  return n.is_null() ? "no limit (windows)" : concat({count(n), " tokens"});
}

std::string capacity(const json& d) {
  if (d["memory_bytes"].is_null()) {
    return concat({"  blocks needed: ", count(d["blocks_needed"]), " (--memory says how many fit)\n"});
  }
  const std::string batch = concat({"largest batch of ", count(d["context"]), " tokens"});
  const std::string context = concat({"longest context of batch ", count(d["batch"])});
  table t;
  t.add({"blocks", count(d["blocks"])});
  t.add({batch, count(d["max_batch"])});
  t.add({context, context_text(d["max_context"])});
  if (const json& w = d["without_windows"]; !w.is_null()) {
    t.add({concat({"windows in full: ", batch}), count(w["max_batch"])});
    t.add({concat({"windows in full: ", context}), context_text(w["max_context"])});
  }
  return concat({"\nIn ", bytes(d["memory_bytes"]),
                 ", weights taken off: ", d["fits"].get<bool>() ? "fits\n" : "DOES NOT FIT\n", t.text()});
}

std::string step(const json& d) {
  const json& s = d["step"];
  table t;
  if (!s["weights_read_bytes"].is_null()) t.add({"reads weights", bytes(s["weights_read_bytes"])});
  t.add({"reads cache", bytes(s["kv_read_bytes"])});
  t.add({"writes cache", bytes(s["kv_written_bytes"])});
  const char* which = d["regime"].is_null()              ? ""
                      : d["regime"] == "cache_dominated" ? ": the cache is the larger part"
                                                         : ": the weights are the larger part";
  std::string out = concat({"\nA decode step", which, "\n", t.text()});
  if (!s["seconds"].is_null()) {
    out += concat({"  at best ", number_text(s["seconds"].get<double>() * 1e3, 2), " ms, ",
                   number_text(s["tokens_per_second"], 1), " tokens/s\n"});
  }
  return out;
}

std::string levers(const json& d) {
  if (d["levers"].empty()) return {};
  table t;
  t.add({"step time, with", "factor", "weights bits", "kv bits", "format"});
  for (const json& l : d["levers"]) {
    t.add({word(l["name"]), number_text(l["step_time_factor"], 3), number_text(l["weights_bits"], 2),
           number_text(l["kv_bits_per_value"], 2), l["kv_format"].is_null() ? "" : word(l["kv_format"])});
  }
  return concat({"\n", t.text()});
}

std::string list(const json& d) {
  table t;
  t.add(
      {"model", "parameters", "layers", "full", "window", "values/token/layer", "KiB/token f16", "context"});
  for (const json& m : d["models"]) {
    t.add({word(m["name"]), billions(m["parameters"]), count(m["layers"]), count(m["full_layers"]),
           m["window"].is_null() ? "" : count(m["window"]), count(m["values_per_token_layer"]),
           number_text(m["bytes_per_token"].get<double>() / 1024, 2), count(m["trained_context"])});
  }
  return t.text(0);
}

}  // namespace

std::string plan_text(const json& d) {
  if (d.contains("models")) return list(d);
  std::string out = head(d) + sizes(d) + capacity(d) + step(d) + levers(d);
  if (!d["notes"].empty()) out += '\n';
  for (const json& note : d["notes"]) out += concat({"note: ", word(note), "\n"});
  return out;
}

}  // namespace kvcache::cli
