// SPDX-License-Identifier: Apache-2.0
//
// engine_generate: continues one prompt, with all tokens kept or under a retention policy, and with blocks as
// they are written or packed. With --repeat the same prompt runs again against the same cache, which shows
// what is reused; ids, text and steps are those of the last run.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <optional>

#include "program.hpp"
#include "runner.hpp"

namespace {

using engine::json;

struct options {
  engine::common_options common;
  engine::policy_options retention;
  std::int64_t blocks = 0;
  bool cache_given = false;
  std::optional<std::string> prompt, prompt_file, chat;
  std::vector<engine::token_id> ids;
  bool plain = false;
  int max_new = 0;
  engine::sampling how;
  bool ignore_end = false;
  int top = 5;
  std::string at = "generated";
  int repeat = 1;
};

void add_options(engine::command_line& line, options& o) {
  add_common_options(line, o.common);
  add_policy_options(line, o.retention);
  CLI::App& app = line.app();
  app.add_option("--blocks", o.blocks, "with a policy: size of the pool; default: enough for the text")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{INT32_MAX}));
  auto* source = app.add_option_group("source", "what to continue");
  source->add_option("--prompt", o.prompt, "text");
  source->add_option("--prompt-file", o.prompt_file, "file with the text");
  source->add_option("--chat", o.chat, "user message, put into the model's chat form");
  source->add_option("--ids", o.ids, "token ids")->delimiter(',');
  source->require_option(1);
  app.add_flag("--plain", o.plain, "special tokens spelled in --prompt and --prompt-file are plain text");
  app.add_option("--new", o.max_new, "tokens to generate")->required()->check(CLI::Range(0, 1 << 24));
  app.add_option("--seed", o.how.seed, "seed of the sampler")->capture_default_str();
  app.add_option("--temperature", o.how.temperature, "0: greedy")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  app.add_flag("--ignore-eos", o.ignore_end, "go on after an end token");
  app.add_option("--top", o.top, "largest logits to report per step")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--at", o.at, "report steps that generate, or all computed positions")
      ->check(CLI::IsMember({"generated", "all"}))
      ->capture_default_str();
  app.add_option("--repeat", o.repeat, "runs of the same prompt")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
}

engine::result<std::vector<engine::token_id>> read_prompt(const options& o, const engine::loaded& parts) {
  const auto handling = o.plain ? engine::specials::as_text : engine::specials::parse;
  std::vector<engine::token_id> ids = o.ids;
  if (o.chat) {
    const engine::chat_message message{"user", *o.chat};
    return parts.text->encode_chat({&message, 1});
  }
  if (o.prompt) ids = parts.text->encode(*o.prompt, handling);
  if (o.prompt_file) {
    const auto text = engine::read_file(*o.prompt_file, "--prompt-file");
    if (!text) return text.error();
    ids = parts.text->encode(*text, handling);
  }
  if (ids.empty()) return engine::bad_input("bad_value", "prompt", "no tokens");
  for (const engine::token_id id : ids) {
    if (id < 0 || id >= parts.model->shape().vocabulary)
      return engine::bad_input("bad_value", "--ids", std::to_string(id));
  }
  return ids;
}

json step_json(int position, std::span<const float> logits, int top) {
  char hash[17];
  std::snprintf(hash, sizeof(hash), "%016" PRIx64, engine::fingerprint(logits));
  json best = json::array();
  for (const auto& [id, logit] : engine::largest(logits, top)) best.push_back(json::array({id, logit}));
  return {{"pos", position}, {"lse", engine::log_sum_exp(logits)}, {"top", best}, {"fnv", hash}};
}

/// Where the text is kept: one of them.
struct cache {
  std::unique_ptr<engine::cache_kind> kind;
  std::unique_ptr<engine::session_cache> sessions;
  std::optional<engine::dropping> how;  ///< of the sessions
};

// One run; fills the parts of the document that describe the last run.
engine::status run_once(const options& o, engine::loaded& parts, cache& cache,
                        std::span<const engine::token_id> prompt, json& document) {
  engine::generation_options how;
  how.max_new = o.max_new;
  how.chunk = o.common.chunk;
  how.how = o.how;
  how.stop_at_end = !o.ignore_end;
  how.which = o.at == "all" ? engine::observe::all : engine::observe::last;
  json steps = json::array();
  engine::stream_decoder printer(*parts.text);
  std::FILE* progress = o.common.as_json ? stderr : stdout;
  const auto print = [&](const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), progress);
    std::fflush(progress);
  };
  const auto scope = engine::cache_scope::only("generate");
  const auto is_stop = [&](engine::token_id id) { return parts.text->is_stop(id); };
  const auto on_token = [&](engine::token_id id) { print(printer.push(id)); };
  const auto observer = [&](int position, std::span<const float> logits) {
    if (o.common.as_json) steps.push_back(step_json(position, logits, o.top));
  };
  const auto generate = [&]() -> engine::result<engine::kept_generation> {
    if (cache.sessions)
      return engine::generate(*parts.model, *cache.sessions, *cache.how, prompt, scope,
                              engine::kv_type_of(o.common.type), how, is_stop, on_token, observer);
    auto all = engine::generate(*parts.model, *cache.kind, prompt, scope, how, is_stop, on_token, observer);
    if (!all) return all.error();
    return engine::kept_generation{std::move(*all)};
  };
  const auto made = generate();
  if (!made) return made.error();
  print(printer.flush() + "\n");
  const int decoded = std::max(1, static_cast<int>(made->ids.size()) - 1);
  std::fprintf(stderr, "prompt: %d tokens reused, %d computed in %.3f s; %zu generated, %.1f ms each\n",
               made->reused, made->prefilled, made->prefill_seconds, made->ids.size(),
               made->decode_seconds * 1e3 / decoded);
  document["ids"] = made->ids;
  document["text"] = parts.text->decode(made->ids);
  document["stop"] = made->stop;
  document["steps"] = std::move(steps);
  document["runs"].push_back({{"reused", made->reused}, {"prefilled", made->prefilled}});
  document["bytes"] = {{"held", made->bytes.held}, {"reserved", made->bytes.reserved}};
  if (!cache.sessions) return {};
  document["dropped"] = made->dropped;
  std::fprintf(stderr, "%d tokens dropped; %.2f MiB in blocks\n", made->dropped,
               static_cast<double>(made->bytes.reserved) / (1 << 20));
  return {};
}

engine::result<cache> open(const options& o, std::optional<engine::dropping> how, engine::loaded& parts,
                           int longest) {
  cache out;
  out.how = std::move(how);
  if (out.how) {
    auto sessions = engine::open_session_cache(o.common, parts, longest, o.blocks, &*out.how);
    if (!sessions) return sessions.error();
    out.sessions = std::move(*sessions);
    return out;
  }
  auto kind = engine::open_cache(o.common, parts, longest);
  if (!kind) return kind.error();
  out.kind = std::move(*kind);
  return out;
}

engine::result<json> run(const options& o) {
  auto how = engine::read_policy(o.retention);
  if (!how) return how.error();
  if (*how && o.cache_given && o.common.cache != "paged")
    return engine::cannot_run("unsupported", "--cache", o.common.cache + "; a policy needs paged");
  if (!*how && o.blocks != 0) return engine::cannot_run("unsupported", "--blocks", "without a policy");
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  const auto prompt = read_prompt(o, **parts);
  if (!prompt) return prompt.error();
  const int context = (*parts)->model->shape().kv.max_positions;
  if (prompt->size() > static_cast<std::size_t>(context))
    return engine::bad_input("too_long", "prompt.tokens", std::to_string(prompt->size()));
  const auto longest = std::min<std::int64_t>(context, static_cast<std::int64_t>(prompt->size()) + o.max_new);
  const bool drops = how->has_value();
  auto cache = open(o, std::move(*how), **parts, static_cast<int>(longest));
  if (!cache) return cache.error();
  json document = {{"schema", "kvcache.engine_generate.v1"},
                   {"prompt_ids", *prompt},
                   {"ids", json::array()},
                   {"text", ""},
                   {"stop", ""},
                   {"steps", json::array()},
                   {"runs", json::array()},
                   {"bytes", json::object()}};
  if (drops) {
    document["policy"] = engine::policy_text(*cache->how);
    document["mode"] = engine::name_of(cache->how->mode);
  }
  for (int i = 0; i < o.repeat; ++i) {
    if (engine::status s = run_once(o, **parts, *cache, *prompt, document); !s) return s.error();
  }
  return document;
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("Continues a prompt with a Llama model from a GGUF file.", "engine_generate");
  options o;
  add_options(line, o);
  return engine::run_program(line, argc, argv, o.common, [&] {
    o.cache_given = line.app().count("--cache") > 0;
    return run(o);
  });
}
