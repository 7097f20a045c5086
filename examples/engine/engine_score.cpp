// SPDX-License-Identifier: Apache-2.0
//
// engine_score: how well the model predicts a text, token by token.

#include <cstdio>
#include <numeric>

#include "program.hpp"
#include "runner.hpp"

namespace {

using engine::json;

struct options {
  engine::common_options common;
  std::string text_file;
};

engine::result<json> run(const options& o) {
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
  auto cache = engine::open_cache(o.common, **parts, static_cast<int>(ids.size()));
  if (!cache) return cache.error();
  std::fprintf(stderr, "scoring %zu tokens\n", ids.size());
  const auto nll = engine::score(*(*parts)->model, **cache, ids, o.common.chunk);
  if (!nll) return nll.error();
  const double mean = std::accumulate(nll->begin(), nll->end(), 0.0) / static_cast<double>(nll->size());
  if (!o.common.as_json) std::printf("%zu tokens, mean negative log-likelihood %.9g\n", ids.size(), mean);
  return json{{"schema", "kvcache.engine_score.v1"}, {"ids", ids}, {"nll", *nll}, {"mean_nll", mean}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Scores a text with a Llama model from a GGUF file.", "engine_score");
  options o;
  o.common.chunk = 256;
  engine::add_common_options(app, o.common);
  app.add_option("--text-file", o.text_file, "file with the text")->required();
  return engine::run_program(app, argc, argv, o.common, [&] { return run(o); });
}
