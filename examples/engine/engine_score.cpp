// SPDX-License-Identifier: Apache-2.0
//
// engine_score: how well the model predicts a text, token by token; with --policy, while tokens leave or
// blocks are packed.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <numeric>
#include <optional>

#include "program.hpp"
#include "runner.hpp"

namespace {

using engine::json;

struct options {
  engine::common_options common;
  engine::policy_options retention;
  std::string text_file;
  bool cache_given = false;
};

engine::result<std::vector<double>> score(const options& o, const std::optional<engine::dropping>& how,
                                          engine::loaded& parts, std::span<const engine::token_id> ids) {
  const auto longest = static_cast<int>(ids.size());
  std::fprintf(stderr, "scoring %d tokens\n", longest);
  if (how) {
    auto cache = engine::open_session_cache(o.common, parts, longest, 0, &*how);
    if (!cache) return cache.error();
    return engine::score(*parts.model, **cache, *how, ids, o.common.chunk);
  }
  auto cache = engine::open_cache(o.common, parts, longest);
  if (!cache) return cache.error();
  return engine::score(*parts.model, **cache, ids, o.common.chunk);
}

engine::result<json> run(const options& o) {
  const auto how = engine::read_policy(o.retention);
  if (!how) return how.error();
  if (*how && o.cache_given && o.common.cache != "paged")
    return engine::cannot_run("unsupported", "--cache", o.common.cache + "; a policy needs paged");
  const auto text = engine::read_file(o.text_file, "--text-file");
  if (!text) return text.error();
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  const auto ids = (*parts)->text->encode(*text, engine::specials::as_text);
  const auto refuse = [&](const char* code) {
    engine::error e = engine::bad_input(code, "text.tokens", std::to_string(ids.size()));
    e.file = o.text_file;
    return e;
  };
  if (ids.size() < 2) return refuse("too_short");
  if (ids.size() > static_cast<std::size_t>((*parts)->model->shape().kv.max_positions))
    return refuse("too_long");
  const auto nll = score(o, *how, **parts, ids);
  if (!nll) return nll.error();
  const double mean = std::accumulate(nll->begin(), nll->end(), 0.0) / static_cast<double>(nll->size());
  if (!o.common.as_json) std::printf("%zu tokens, mean negative log-likelihood %.9g\n", ids.size(), mean);
  json document{{"schema", "kvcache.engine_score.v1"}, {"ids", ids}, {"nll", *nll}, {"mean_nll", mean}};
  if (*how) document["policy"] = engine::policy_text(**how);
  return document;
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("Scores a text with a Llama model from a GGUF file.", "engine_score");
  options o;
  o.common.chunk = 256;
  o.retention.mode = "stream";  // a text that is scored has no prompt
  engine::add_common_options(line, o.common);
  CLI::App& app = line.app();
  app.add_option("--text-file", o.text_file, "file with the text")->required();
  app.add_option("--policy", o.retention.policy,
                 "which tokens stay and how blocks are packed, from the first token on, such as kv4")
      ->capture_default_str();
  return engine::run_program(line, argc, argv, o.common, [&] {
    o.cache_given = app.count("--cache") > 0;
    return run(o);
  });
}
