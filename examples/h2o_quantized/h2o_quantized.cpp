// SPDX-License-Identifier: Apache-2.0
//
// h2o_quantized: both levers together. Fewer tokens (H2O drops those that were looked at least) times fewer
// bits (what stays is packed): half of the tokens at a quarter of the bits are a seventh of the bytes.
//
//   prompt      | exact ............................... |     deferred format: nothing is packed yet,
//   compress()  | x |   | x | x |   |   | x |   | x | x |     so scores and choice are those of f16
//               | packed | packed |                           what stays is moved together, then packed
//
// "Quantise after eviction": the other way round, dropping would tear codes apart that share a scale. A
// format that packs blocks as they fill goes only with policies that drop whole blocks where they lie; the
// second part shows which ones those are, and what the others are told.
//
// Either lever alone can reach the same bytes by being pulled further. The table holds all combinations, so
// that each can be compared with what it competes with: cells of about as many bytes.

#include <algorithm>
#include <array>

#include "kvcache/quant/parse.hpp"
#include "policies.hpp"

namespace {

using engine::token_id;

struct options : policies::options {
  std::string scorer = "h2o";
  std::string four = "kv4", two = "kv2";
  int prompt = 1024;
  int score = 128;
};

constexpr std::array shares{1, 2, 4, 8};  // one of so many tokens stays

struct cell {
  std::size_t held = 0;
  engine::damage damage;
};
/// A format with every share of the tokens.
struct column {
  std::string name;
  double exact = 0;  // KL of the prompt's last token before anything was dropped or packed
  std::array<cell, shares.size()> cells;
};

std::string policy_of(const options& o, int share) {
  if (share == 1) return "full";
  const std::string keep = std::to_string(o.prompt / share), half = std::to_string(o.prompt / share / 2);
  if (o.scorer == "snapkv") return "snapkv:capacity=" + keep + ",window=32";
  if (o.scorer == "window") return "window:" + keep;
  return "h2o:heavy=" + half + ",recent=" + half;
}

engine::result<std::unique_ptr<engine::session_cache>> open_cache(const options& o, const policies::world& w,
                                                                  const kvcache::kv_format& format,
                                                                  bool deferred) {
  engine::cache_config config;
  config.shape = w.shape();
  config.type = engine::kv_type_of(o.common.type);
  config.block_size = o.common.block_size;
  config.max_sequences = 3;
  config.max_tokens = o.prompt + o.score;
  config.pool = &w.parts->pool;
  config.formats = {format};
  config.step_tokens = o.common.chunk;
  config.deferred = deferred;
  return engine::session_cache::create(config);
}

engine::result<kvcache::kv_format> format_of(const std::string& text) {
  const kvcache::parsed_format read = kvcache::parse_format(text);
  if (!read.ok())
    return engine::bad_input("bad_format", std::string(read.key),
                             std::string(read.text) + "; allowed: " + read.allowed);
  return read.value;
}

/// What the full f16 cache says of the text.
struct truth {
  std::vector<float> last;  // after the prompt
  std::vector<float> rows;  // of the scored tokens
};

/// Reads the prompt once and drops, then packs, a copy of it for every share. The first column is the truth.
engine::result<column> read_text(const options& o, const policies::world& w, const std::string& name,
                                 truth& right) {
  const auto format = format_of(name);
  if (!format) return format.error();
  auto cache = open_cache(o, w, *format, true);
  if (!cache) return cache.error();
  auto base = engine::session::create(w.model(), **cache, {}, {.chunk = o.common.chunk, .remember = true});
  if (!base) return base.error();
  const auto prompt = std::span(w.text).first(static_cast<std::size_t>(o.prompt));
  const auto scored = std::span(w.text).subspan(prompt.size());
  auto last = base->feed(prompt, engine::observe::last);
  if (!last) return last.error();
  if (right.last.empty()) right.last = *last;
  column out{name, policies::kl_of(right.last, *last), {}};
  for (std::size_t i = 0; i < shares.size(); ++i) {
    auto text = policies::compressed(*base, policy_of(o, shares[i]));
    if (!text) return text.error();
    out.cells[i].held = text->bytes_held();
    auto rows = text->feed(scored);  // these stay as they are written
    if (!rows) return rows.error();
    if (right.rows.empty()) right.rows = *rows;
    out.cells[i].damage = engine::compare(w.model(), right.rows, *rows, scored);
  }
  return out;
}

/// A policy and a format that are in force from the first token on, and whether they can be.
struct pair_of {
  const char* policy;
  const char* exempt;  // setting behind the preset
  bool fits;
};
constexpr pair_of pairs[] = {{"streaming_llm:sinks=4,window=252,positions=text", "", true},
                             {"streaming_llm:sinks=4,window=252", "", false},
                             {"window:256", ":exempt=none", true},
                             {"window:256", "", false},
                             {"h2o:heavy=128,recent=128", "", false},
                             {"far_rms:capacity=256", "", false}};

/// Which of them are refused, and what the first one holds while the text is read.
engine::status from_first_token(const options& o, engine::report& out, const policies::world& w,
                                const truth& right, std::size_t full) {
  bool as_said = true;
  out.print("\nin force from the first token:\n");
  for (const pair_of& p : pairs) {
    const auto format = format_of(o.four + p.exempt);
    if (!format) return format.error();
    const auto policy = engine::parse_policy(p.policy);
    if (!policy) return policy.error();
    auto cache = open_cache(o, w, *format, false);
    if (!cache) return cache.error();
    auto text = engine::session::create(w.model(), **cache, *policy,
                                        {.mode = engine::drop_mode::stream, .chunk = o.common.chunk});
    as_said = as_said && static_cast<bool>(text) == p.fits && (text || text.error().code == "unsupported");
    out.print("  %-50s %-18s %s\n", p.policy, (o.four + p.exempt).c_str(),
              text ? "goes" : engine::describe(text.error()).c_str());
    if (&p != pairs || !text) continue;
    std::size_t most = 0;
    const auto prompt = std::span(w.text).first(static_cast<std::size_t>(o.prompt));
    for (std::size_t at = 0; at < prompt.size(); at += 64) {
      const auto now = prompt.subspan(at, std::min<std::size_t>(64, prompt.size() - at));
      if (auto s = text->feed(now, engine::observe::last); !s) return s.error();
      most = std::max(most, text->bytes_held());
    }
    const auto scored = std::span(w.text).subspan(prompt.size());
    const auto rows = text->feed(scored);
    if (!rows) return rows.error();
    const engine::damage d = engine::compare(w.model(), right.rows, *rows, scored);
    out.print("  %-50s %-18s at most %s, KL %.4f\n", "", "", policies::mebibytes(most).c_str(), d.kl);
    out.figures["streaming"] = {{"policy", p.policy}, {"most_bytes", most}, {"kl", d.kl}};
    out.claim("whole blocks leave a packed text where they lie: never half of the full cache's bytes",
              2 * most < full && text->dropped() > 0);
  }
  out.claim("policies of whole blocks that stay in place fit such a format; others are refused with a reason",
            as_said);
  return {};
}

void print_table(const options& o, engine::report& out, const std::vector<column>& columns) {
  const double full = static_cast<double>(columns[0].cells[0].held);
  out.print("%-24s", o.scorer.c_str());
  for (const column& c : columns) out.print(" | %10s %6s %8s %6s", c.name.c_str(), "", "KL", "NLL");
  out.print("\n");
  for (std::size_t i = 0; i < shares.size(); ++i) {
    out.print("%5.1f %% of %5s tokens ", 100.0 / shares[i], engine::thousands(o.prompt).c_str());
    for (const column& c : columns) {
      const cell& at = c.cells[i];
      const double share = static_cast<double>(at.held) / full;
      out.print(" | %10s %5.1f%% %8.4f %6.3f", policies::mebibytes(at.held).c_str(), 100 * share,
                at.damage.kl, at.damage.nll);
      out.figures["cells"].push_back({{"format", c.name},
                                      {"share", 1.0 / shares[i]},
                                      {"bytes", at.held},
                                      {"kl", at.damage.kl},
                                      {"nll", at.damage.nll}});
    }
    out.print("\n");
  }
  out.print("\n");
}

engine::result<std::string> run(const options& o, engine::report& out) {
  const auto w = policies::open_world(o, o.prompt + o.score, 64, 1);
  if (!w) return w.error();
  truth right;
  std::vector<column> columns;
  for (const std::string& name : {std::string("f16"), o.four, o.two}) {
    auto read = read_text(o, *w, name, right);
    if (!read) return read.error();
    columns.push_back(std::move(*read));
  }
  print_table(o, out, columns);
  const cell& full = columns[0].cells[0];
  const cell& both = columns[1].cells[1];   // half of the tokens, four bits
  const cell& fewer = columns[0].cells[3];  // an eighth of the tokens
  const cell& bits = columns[2].cells[0];   // two bits
  const double half = columns[0].cells[1].damage.kl, four = columns[1].cells[0].damage.kl;
  out.claim("before compress() a deferred format changes nothing but the last bits of f16",
            columns[1].exact < 1e-3 && columns[2].exact < 1e-3);
  out.claim("half of the tokens at four bits are a seventh of the bytes", 7 * both.held <= full.held);
  out.claim("what both levers cost is about what each costs, together",
            both.damage.kl < 2 * (half + four) && both.damage.kl > 0.5 * std::max(half, four));
  out.claim(
      "an eighth of the tokens, or two bits, pulled alone to about as few bytes, cost at least twice that",
      fewer.damage.kl > 2 * both.damage.kl && bits.damage.kl > 2 * both.damage.kl &&
          fewer.held > 0.8 * static_cast<double>(both.held) && bits.held > both.held);
  if (auto s = from_first_token(o, out, *w, right, full.held); !s) return s.error();
  return engine::formatted(
      "%.1f %% of the bytes at KL %.3f with both levers (%s of %s); %s alone %.1f %% at %.3f, %s alone %.1f "
      "%% "
      "at %.3f",
      100.0 * static_cast<double>(both.held) / static_cast<double>(full.held), both.damage.kl,
      policies::mebibytes(both.held).c_str(), policies::mebibytes(full.held).c_str(), o.scorer.c_str(),
      100.0 * static_cast<double>(fewer.held) / static_cast<double>(full.held), fewer.damage.kl,
      o.two.c_str(), 100.0 * static_cast<double>(bits.held) / static_cast<double>(full.held), bits.damage.kl);
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("Fewer tokens and fewer bits: both levers on one prompt, beside each alone.",
                            "h2o_quantized");
  options o;
  o.common.type = "f16";
  o.common.block_size = 64;
  policies::add_options(line, o, true);
  line.add("--scorer", o.scorer, "which tokens stay", {"h2o", "snapkv", "window"});
  line.add("--format", o.four, "of what stays (docs/quant.md)");
  line.add("--alone", o.two, "a format of about as few bits as both levers leave");
  line.add("--prompt", o.prompt, "tokens that are read, then dropped from", 512, 4096);
  line.add("--score", o.score, "tokens that follow", 2, 1024);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
