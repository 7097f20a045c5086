// SPDX-License-Identifier: Apache-2.0
#include "recall.hpp"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>

#include "constructed.hpp"
#include "generators.hpp"
#include "kvcache/retain/sliding_window.hpp"
#include "kvcache/retain/streaming_llm.hpp"
#include "matrix.hpp"
#include "sampling.hpp"
#include "session_bench.hpp"

namespace lab {
namespace {

using engine::json;
using engine::result;
using engine::session;
using kvcache::retention;

/// A control: keeps the positions it was told, then the lowest others, up to `capacity` per head.
struct chosen {
  std::int32_t capacity = 1;
  std::int32_t count = 0;
  const std::int32_t* positions = nullptr;  ///< [count], ascending; outlives the policy

  static constexpr kvcache::observe needs = kvcache::observe::nothing;

  kvcache::keep_plan plan(const kvcache::retain_lengths& n) const noexcept {
    return kvcache::keep_at_most(n, capacity, 0, 0, 1);
  }
  std::int32_t must_recompute() const noexcept { return 1; }
  kvcache::watch_options watch() const noexcept { return {}; }
  void score(const kvcache::observation& o, std::span<float> out) const noexcept {
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = std::binary_search(positions, positions + count, o.positions[i]) ? 1.0f : 0.0f;
  }
};
static_assert(kvcache::token_scorer<chosen>);

/// The policy of a text; a format is refused, since every answer here is exact.
result<retention> retention_of(const std::string& policy) {
  auto read = parse_lab_policy(policy);
  if (!read) return read.error();
  if (!read->packs()) return read->keep;
  return engine::error{
      engine::failure::usage, "unsupported", "--policy", policy + "; recall takes no format", {}, -1};
}

/// Pairs in some order, and which of them are asked for.
struct recall_text {
  std::vector<token_id> context;
  std::vector<std::int32_t> asked;  ///< positions, ascending
  std::vector<std::int32_t> order;  ///< the same, in the order of the questions
};

recall_text text_of(const recall_options& o, const recall_vocabulary& words) {
  recall_text out;
  out.context.resize(static_cast<std::size_t>(o.length));
  std::iota(out.context.begin(), out.context.end(), 0);  // token ids of pairs are their keys
  draws random(o.seed);
  random.shuffle(out.context);
  for (int i = 0; i < o.asked; ++i)
    out.asked.push_back(static_cast<std::int32_t>((2 * std::int64_t{i} + 1) * o.length / (2 * o.asked)));
  out.order = out.asked;
  random.shuffle(out.order);
  if (!o.question_inside) return out;
  for (const std::int32_t position : out.order)
    out.context.push_back(words.question(out.context[static_cast<std::size_t>(position)]));
  return out;
}

class recall_run {
 public:
  recall_run(const recall_options& o, const recall_vocabulary& words, engine::llama_model& model,
             engine::session_cache& cache)
      : o_(o), words_(words), text_(text_of(o, words)), model_(model), cache_(cache) {}

  engine::status prefill() {
    if (o_.how == mode::stream) return {};
    auto opened = open({}, true);
    if (!opened) return opened.error();
    prefilled_ = std::make_unique<session>(std::move(*opened));
    return {};
  }

  result<recall_row> row(const std::string& policy, const std::string& control) {
    recall_row out;
    out.policy = policy;
    out.control = control;
    const auto what = policy_of(policy, control);
    if (!what) return what.error();
    auto held = o_.how == mode::stream ? open(*what, false) : prefilled_->fork_as(*what);
    if (!held) return held.error();
    if (o_.how == mode::oneshot) {
      if (auto s = held->compress(); !s) return s.error();
    }
    out.bytes_held = held->bytes_held();
    out.bytes_full = held->bytes_full();
    out.tokens_held = static_cast<double>(held->values_kept()) / static_cast<double>(values_per_token());
    if (auto s = ask(*held, rule_of(*what, control), out); !s) return s.error();
    return out;
  }

  std::size_t values_per_token() const {
    const engine::kv_shape& s = model_.shape().kv;
    return std::size_t{2} * static_cast<std::size_t>(s.kv_heads) * static_cast<std::size_t>(s.head_dim);
  }

 private:
  /// Whether a position stays by the policy's rule.
  using position_rule = std::function<bool(std::int32_t)>;

  // "oracle:N": what is asked for, and more up to N tokens.
  result<retention> policy_of(const std::string& policy, const std::string& control) const {
    chosen oracle;
    if (control != "oracle") return retention_of(policy);
    if (std::sscanf(policy.c_str(), "oracle:capacity=%d", &oracle.capacity) != 1)
      return engine::cannot_run("bad_value", "oracle", policy);
    oracle.count = static_cast<std::int32_t>(text_.asked.size());
    oracle.positions = text_.asked.data();
    retention out;
    out.policy = oracle;
    return out;
  }

  result<session> open(const retention& what, bool remember) const {
    engine::session_options options;
    options.mode = o_.how == mode::stream ? engine::drop_mode::stream : engine::drop_mode::oneshot;
    options.chunk = o_.common.chunk;
    options.remember = remember;
    auto opened = session::create(model_, cache_, what, options);
    if (!opened) return opened;
    if (auto logits = opened->feed(text_.context, engine::observe::last); !logits) return logits.error();
    return opened;
  }

  engine::status ask(session& held, const position_rule& rule, recall_row& out) const {
    out.ruled = static_cast<bool>(rule);
    for (const std::int32_t position : text_.order) {
      const int key = text_.context[static_cast<std::size_t>(position)];
      const auto kept = held.kept(0, words_.head_of(key));
      const bool there = std::binary_search(kept.begin(), kept.end(), position);
      const token_id question = words_.question(key);
      const auto logits = held.feed({&question, 1}, engine::observe::last);
      if (!logits) return logits.error();
      const token_id said = engine::greedy(*logits);
      const bool right = said == words_.answer(words_.value_of(key));
      out.held += there ? 1 : 0;
      out.right += right ? 1 : 0;
      out.unknown += said == words_.unknown() ? 1 : 0;
      out.differs += (there ? right : said == words_.unknown()) ? 0 : 1;
      if (rule) out.breaks_rule += rule(position) == right ? 0 : 1;
    }
    return {};
  }

  // For policies that know nothing but lengths; null for others.
  position_rule rule_of(const retention& what, const std::string& control) const {
    const auto all = static_cast<std::int32_t>(text_.context.size());
    const auto ends = [all](std::int32_t first, std::int32_t last) {
      return [=](std::int32_t p) { return p < first || p >= all - last; };
    };
    if (control == "full") return ends(all, all);
    if (o_.how == mode::stream) return {};
    if (what.policy.get<kvcache::keep_all>() != nullptr) return ends(all, all);
    if (const auto* w = what.policy.get<kvcache::sliding_window>()) return ends(0, w->window);
    if (const auto* oracle = what.policy.get<chosen>(); oracle != nullptr && oracle->capacity >= o_.asked)
      return ends(all, all);
    const auto* s = what.policy.get<kvcache::streaming_llm>();
    if (s == nullptr) return {};
    if (s->positions == kvcache::streaming_llm::text_positions) return ends(s->sinks, s->window);
    const int block = o_.common.block_size;  // whole blocks go, behind whole blocks of sinks
    const int sinks = (s->sinks + block - 1) / block * block;
    return ends(sinks, all - sinks - std::max(0, all - sinks - s->window) / block * block);
  }

  const recall_options& o_;
  const recall_vocabulary& words_;
  const recall_text text_;
  engine::llama_model& model_;
  engine::session_cache& cache_;
  std::unique_ptr<session> prefilled_;
};

json row_json(const recall_row& row, const recall_options& o) {
  json out = {{"policy", row.policy},        {"control", row.control},         {"asked", o.asked},
              {"right", row.right},          {"unknown", row.unknown},         {"held", row.held},
              {"differs", row.differs},      {"tokens_held", row.tokens_held}, {"bytes_held", row.bytes_held},
              {"bytes_full", row.bytes_full}};
  out["breaks_rule"] = row.ruled ? json(row.breaks_rule) : json(nullptr);
  return out;
}

}  // namespace

result<std::vector<recall_row>> run_recall(const recall_options& o) {
  for (const std::string& text : o.policies) {
    if (const auto checked = retention_of(text); !checked) return checked.error();
  }
  const recall_vocabulary words{o.length, o.seed};
  engine::thread_pool pool(o.common.threads);
  const auto model = constructed_recall(words, pool);
  if (!model) return model.error();
  engine::cache_config config;
  config.shape = (*model)->shape().kv;
  config.type = engine::kv_type_of(o.common.type);
  config.block_size = o.common.block_size;
  config.max_sequences = 2;  // the text, and a fork under a policy
  config.max_tokens = o.length + 2 * o.asked;
  config.pool = &pool;
  const auto cache = engine::session_cache::create(config);
  if (!cache) return cache.error();
  recall_run run(o, words, **model, **cache);
  if (auto s = run.prefill(); !s) return s.error();
  std::vector<recall_row> rows;
  std::vector<std::pair<std::string, std::string>> wanted = {{"full", "full"}};
  const double token_bytes = static_cast<double>(run.values_per_token()) * (o.common.type == "f32" ? 4 : 2);
  for (const std::string& policy : o.policies) wanted.emplace_back(policy, "");
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto [policy, control] = wanted[i];
    auto row = run.row(policy, control);
    if (!row) return row.error();
    rows.push_back(*row);
    if (!control.empty() || row->bytes_held >= row->bytes_full) continue;
    std::vector<std::pair<std::string, std::string>> beside = {
        {window_of(row->bytes_held, token_bytes, o.common.block_size), "window"}};
    for (int seed = 1; seed <= o.random_seeds; ++seed)
      beside.emplace_back(random_of(row->bytes_held, token_bytes, o.common.block_size,
                                    o.seed + static_cast<std::uint64_t>(seed)),
                          "random");
    beside.emplace_back("oracle:capacity" + beside.front().first.substr(std::string("window:window").size()),
                        "oracle");
    // Policies of equal bytes share their controls.
    std::erase_if(beside, [&](const auto& one) {
      return std::find(wanted.begin(), wanted.end(), one) != wanted.end();
    });
    wanted.insert(wanted.begin() + static_cast<std::ptrdiff_t>(i) + 1, beside.begin(), beside.end());
  }
  return rows;
}

result<json> recall_document(const recall_options& o, const std::vector<recall_row>& rows) {
  json out = {{"schema", "kvcache.lab.recall.v1"},
              {"settings",
               {{"length", o.length},
                {"asked", o.asked},
                {"seed", o.seed},
                {"question", o.question_inside ? "inside" : "after"},
                {"mode", name_of(o.how)},
                {"kv", o.common.type},
                {"block", o.common.block_size},
                {"chunk", o.common.chunk}}},
              {"rows", json::array()}};
  for (const recall_row& row : rows) {
    out["rows"].push_back(row_json(row, o));
    if (row.differs > 0)
      return engine::cannot_run("differs", row.policy,
                                std::to_string(row.differs) + " of " + std::to_string(o.asked) +
                                    " answers are not as the kept positions say");
    if (row.breaks_rule > 0)
      return engine::cannot_run("differs", row.policy,
                                std::to_string(row.breaks_rule) + " of " + std::to_string(o.asked) +
                                    " answers are not as the policy's rule says");
  }
  return out;
}

}  // namespace lab
