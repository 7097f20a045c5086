// SPDX-License-Identifier: Apache-2.0
#include "policies.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <numeric>

#include "generators.hpp"
#include "sampling.hpp"

namespace policies {

void add_options(engine::command_line& line, options& o, bool text) {
  engine::add_common_options(line, o.common);
  CLI::App& app = line.app();
  app.remove_option(app.get_option("--cache"));
  if (text)
    app.add_option("--text-file", o.text_file, "a text to read, such as tests/data/text.txt")->required();
}

void add_policy_option(engine::command_line& line, std::string& policy) {
  const CLI::Validator readable(
      [](std::string& text) {
        const auto parsed = engine::parse_policy(text);
        return parsed ? std::string() : engine::describe(parsed.error());
      },
      "POLICY");
  line.app()
      .add_option("--policy", policy, "the policy shown (docs/retain.md)")
      ->check(readable)
      ->capture_default_str();
}

engine::result<world> open_world(const options& o, int tokens, int longest, int sessions) {
  world w;
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  w.parts = std::move(*parts);
  if (!o.text_file.empty()) {
    const auto text = engine::read_file(o.text_file, "--text-file");
    if (!text) return text.error();
    w.text = w.parts->text->encode(*text, engine::specials::as_text);
    if (w.text.size() < static_cast<std::size_t>(tokens))
      return engine::bad_input("too_short", "--text-file", std::to_string(w.text.size()) + " tokens");
    w.text.resize(static_cast<std::size_t>(tokens));
  }
  engine::cache_config config;
  config.shape = w.shape();
  config.type = engine::kv_type_of(o.common.type);
  config.block_size = o.common.block_size;
  config.max_sequences = sessions;
  config.max_tokens = longest;
  config.pool = &w.parts->pool;
  auto cache = engine::session_cache::create(config);
  if (!cache) return cache.error();
  w.cache = std::move(*cache);
  return w;
}

engine::result<engine::session> begin(const world& w, const std::string& policy,
                                      const engine::session_options& how) {
  const auto parsed = engine::parse_policy(policy);
  if (!parsed) return parsed.error();
  return engine::session::create(w.model(), *w.cache, *parsed, how);
}

engine::result<engine::session> compressed(const engine::session& prompt, const std::string& policy) {
  const auto parsed = engine::parse_policy(policy);
  if (!parsed) return parsed.error();
  auto made = prompt.fork_as(*parsed);
  if (!made) return made;
  if (auto s = made->compress(); !s) return s.error();
  return made;
}

hidden_key make_hidden_key(const engine::tokenizer& text, int trial) {
  const auto encode = [&](const std::string& s) { return text.encode(s, engine::specials::parse); };
  const lab::prompt_text made = lab::pass_key(static_cast<std::uint64_t>(512000 + trial), 38,
                                              150 + 200 * (trial % 4), lab::key_style::chat_sp);
  hidden_key d{encode(made.context), encode(made.question), encode(made.answer), {}};
  // From the space before the first sentence to the end of the last; words are tokenised by themselves.
  constexpr std::string_view last = "is the pass key.";
  const std::size_t from = made.context.find(" The pass key is ");
  const std::size_t to = made.context.find(last, from) + last.size();
  const std::size_t before = encode(made.context.substr(0, from)).size();
  d.told.resize(encode(made.context.substr(0, to)).size() - before);
  std::iota(d.told.begin(), d.told.end(), static_cast<int>(before));
  return d;
}

engine::result<answer> ask(const world& w, const engine::session& held, std::span<const token_id> question,
                           std::span<const token_id> digits, bool skip_first) {
  auto branch = held.fork();
  if (!branch) return branch.error();
  std::vector<token_id> tokens(question.begin(), question.end());
  tokens.insert(tokens.end(), digits.begin(), digits.end() - 1);
  const auto rows = branch->feed(tokens);
  if (!rows) return rows.error();
  const auto scored = digits.subspan(skip_first ? 1 : 0);
  answer out{0, true};
  for (std::size_t i = 0; i < scored.size(); ++i) {
    const auto row = engine::row_of(*rows, w.model(), tokens.size() - scored.size() + i);
    out.nll += nll_of(row, scored[i]) / static_cast<double>(scored.size());
    out.right = out.right && engine::greedy(row) == scored[i];
  }
  return out;
}

double nll_of(std::span<const float> row, token_id token) {
  return engine::log_sum_exp(row) - row[static_cast<std::size_t>(token)];
}

double kl_of(std::span<const float> right, std::span<const float> row) {
  const double of_right = engine::log_sum_exp(right);
  const double of_row = engine::log_sum_exp(row);
  double kl = 0;
  for (std::size_t i = 0; i < right.size(); ++i) {
    const double log_p = right[i] - of_right;
    kl += std::exp(log_p) * (log_p - (row[i] - of_row));
  }
  return kl;
}

engine::result<engine::damage> read_on(const world& w, const engine::session& s,
                                       std::span<const token_id> tokens, std::span<const float> right) {
  auto copy = s.fork();
  if (!copy) return copy.error();
  const auto got = copy->feed(tokens);
  if (!got) return got.error();
  return engine::compare(w.model(), right, *got, tokens);
}

std::string drawing_of(const world& w, const engine::session& s) {
  constexpr int columns = 64;
  constexpr int layers_per_line = 3;
  constexpr std::string_view shades = " .:-=+*#%@";
  std::string out;
  for (int first = 0; first < w.shape().layers; first += layers_per_line) {
    const int last = std::min(first + layers_per_line, w.shape().layers) - 1;
    std::vector<double> held(columns), all(columns);
    for (int p = 0; p < s.position(); ++p) all[static_cast<std::size_t>(p * columns / s.position())] += 1;
    for (int layer = first; layer <= last; ++layer) {
      for (int h = 0; h < w.shape().kv_heads; ++h) {
        for (const int p : s.kept(layer, h)) held[static_cast<std::size_t>(p * columns / s.position())] += 1;
      }
    }
    out += engine::formatted("  layers %2d to %2d |", first, last);
    for (std::size_t c = 0; c < held.size(); ++c) {
      const double of = all[c] * (last - first + 1) * w.shape().kv_heads;
      const double share = of > 0 ? held[c] / of : 0;
      // Anything above none is drawn, and only all is drawn as all.
      const auto most = static_cast<double>(shades.size() - 2);
      out += shades[held[c] == 0 ? 0
                    : share >= 1 ? shades.size() - 1
                                 : 1 + static_cast<std::size_t>(share * most)];
    }
    out += "|\n";
  }
  return out;
}

bool heads_differ(const world& w, const engine::session& s) {
  for (int layer = 0; layer < w.shape().layers; ++layer) {
    const auto first = s.kept(layer, 0);
    for (int h = 1; h < w.shape().kv_heads; ++h) {
      const auto other = s.kept(layer, h);
      if (!std::equal(first.begin(), first.end(), other.begin(), other.end())) return true;
    }
  }
  return false;
}

std::string mebibytes(std::size_t bytes) {
  return engine::formatted("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace policies
