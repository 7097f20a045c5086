// SPDX-License-Identifier: Apache-2.0
#include "program.hpp"

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>

namespace engine {
namespace {

void append_float(double value, std::string& out) {
  if (!std::isfinite(value)) {
    out += "null";
    return;
  }
  char text[32];
  const int length = std::snprintf(text, sizeof(text), "%.9g", value);
  out.append(text, static_cast<std::size_t>(length));
}

void append(const json& node, std::string& out) {
  if (node.is_number_float()) return append_float(node.get<double>(), out);
  if (!node.is_structured()) {
    out += node.dump(-1, ' ', false, json::error_handler_t::replace);
    return;
  }
  out += node.is_object() ? '{' : '[';
  bool first = true;
  for (auto item = node.begin(); item != node.end(); ++item) {
    if (!first) out += ", ";
    first = false;
    if (node.is_object()) out += json(item.key()).dump(-1, ' ', false, json::error_handler_t::replace) + ": ";
    append(*item, out);
  }
  out += node.is_object() ? '}' : ']';
}

int report(const error& e, bool as_json) {
  if (as_json) {
    std::printf("%s\n", to_text(to_json(e)).c_str());
  } else {
    std::fprintf(stderr, "error: %s\n", describe(e).c_str());
  }
  return static_cast<int>(e.kind);
}

// CLI11 says "--new: message" when a value is wrong.
error usage_error(const std::string& message) {
  const std::size_t colon = message.find(": ");
  const bool names_option = message.rfind("--", 0) == 0 && colon != std::string::npos;
  return {failure::usage,
          "usage",
          names_option ? message.substr(0, colon) : "arguments",
          names_option ? message.substr(colon + 2) : message,
          {},
          -1};
}

bool asks_for_json(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) return true;
  }
  return false;
}

}  // namespace

std::string to_text(const json& document) {
  std::string out;
  append(document, out);
  return out;
}

json to_json(const error& e) {
  json inner = {
      {"code", e.code}, {"field", e.field}, {"value", e.value}, {"file", nullptr}, {"line", nullptr}};
  if (!e.file.empty()) inner["file"] = e.file;
  if (e.line >= 0) inner["line"] = e.line;
  return {{"schema", "kvcache.error.v1"}, {"error", inner}};
}

void add_common_options(command_line& line, common_options& options) {
  CLI::App& app = line.app();
  std::vector<std::string> kinds(cache_kind_names().begin(), cache_kind_names().end());
  app.add_option("--model", options.model, "model file (GGUF)")->required()->envname("KVCACHE_MODEL");
  app.add_option("--cache", options.cache, "cache kind")->check(CLI::IsMember(kinds))->capture_default_str();
  app.add_option("--kv", options.type, "number format of the cache")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
  const CLI::Validator power_of_two(
      [](std::string& text) {
        int value = 0;
        const bool ok = CLI::detail::lexical_cast(text, value) && value >= 1 && value <= 65536 &&
                        (value & (value - 1)) == 0;
        return ok ? std::string() : "Value " + text + " is not a power of two from 1 to 65536";
      },
      "POWER OF TWO");
  app.add_option("--block", options.block_size, "tokens per block; packed blocks: 32 to 128, default 64")
      ->check(power_of_two)
      ->capture_default_str()
      ->each([&options](const std::string&) { options.block_given = true; });
  app.add_option("--chunk", options.chunk, "prompt tokens per step")
      ->check(CLI::Range(1, 8192))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "threads")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_flag("--json", options.as_json, "one JSON document on stdout, progress on stderr");
}

void add_policy_options(command_line& line, policy_options& options) {
  CLI::App& app = line.app();
  app.add_option("--policy", options.policy,
                 "which tokens stay and how blocks are packed, such as h2o:heavy=64,recent=64, kv4, or both "
                 "joined by +")
      ->capture_default_str();
  app.add_option("--mode,--drop", options.mode,
                 "when others go and blocks are packed: at the end of the prompt, from the first token on, "
                 "or (go) when blocks run out")
      ->check(CLI::IsMember({"oneshot", "stream", "out_of_blocks"}))
      ->capture_default_str();
}

result<dropping> read_dropping(const policy_options& options) {
  auto policy = parse_cache_policy(options.policy);
  if (!policy) return policy.error();
  dropping how{std::move(policy->keep), drop_mode::oneshot, policy->format};
  if (options.mode == "stream") how.mode = drop_mode::stream;
  if (options.mode == "out_of_blocks") how.mode = drop_mode::out_of_blocks;
  return how;
}

result<std::optional<dropping>> read_policy(const policy_options& options) {
  auto how = read_dropping(options);
  if (!how) return how.error();
  if (how->policy.policy.get<kvcache::keep_all>() != nullptr && !how->packs())
    return std::optional<dropping>();
  return std::optional<dropping>(std::move(*how));
}

int run_program(command_line& line, int argc, char** argv, const common_options& options,
                const std::function<result<json>()>& body) {
  // No program takes positional arguments. This option collects them all the same, because the parser looks
  // an empty one up among its nameless option groups and does not come back.
  std::vector<std::string> unexpected;
  CLI::App& app = line.app();
  app.add_option("unexpected", unexpected)->group("");
  try {
    app.parse(argc, argv);
    if (!unexpected.empty()) throw CLI::ExtrasError(app.get_name(), unexpected);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help
    return report(usage_error(e.what()), asks_for_json(argc, argv));
  }
  try {
    const result<json> document = body();
    if (!document) return report(document.error(), options.as_json);
    if (options.as_json) std::printf("%s\n", to_text(*document).c_str());
    return 0;
  } catch (const std::bad_alloc&) {
    return report(cannot_run("out_of_memory", "memory", "exhausted"), options.as_json);
  } catch (const std::exception& e) {
    return report(cannot_run("failed", "exception", e.what()), options.as_json);
  }
}

result<std::unique_ptr<loaded>> load_model(const common_options& options) {
  auto parts = std::make_unique<loaded>(options.threads);
  std::fprintf(stderr, "loading %s\n", options.model.c_str());
  const auto file = gguf_file::open(options.model);
  if (!file) return file.error();
  auto text = tokenizer::load(*file);
  if (!text) return text.error();
  auto model = llama_model::load(*file, parts->pool);
  if (!model) return model.error();
  parts->text = std::make_unique<tokenizer>(std::move(*text));
  parts->model = std::move(*model);
  if (parts->text->size() != parts->model->shape().vocabulary) {
    error e = bad_input("bad_value", "tokenizer.ggml.tokens.count", std::to_string(parts->text->size()));
    e.file = options.model;
    return e;
  }
  return parts;
}

kv_type kv_type_of(std::string_view option) {
  if (option == "f16") return kv_type::f16;
  return option == "bf16" ? kv_type::bf16 : kv_type::f32;
}

static cache_config config_of(const common_options& options, loaded& parts, int max_tokens) {
  cache_config config;
  config.shape = parts.model->shape().kv;
  config.type = kv_type_of(options.type);
  config.block_size = options.block_size;
  config.max_tokens = max_tokens;
  config.pool = &parts.pool;
  return config;
}

result<std::unique_ptr<cache_kind>> open_cache(const common_options& options, loaded& parts, int max_tokens,
                                               int max_sequences) {
  cache_config config = config_of(options, parts, max_tokens);
  config.max_sequences = max_sequences;
  return make_cache(options.cache, config);
}

int block_size_of(const common_options& options, bool packs) {
  return packs && !options.block_given ? 64 : options.block_size;
}

void use_format(const common_options& options, const dropping& how, cache_config& config) {
  config.block_size = block_size_of(options, how.packs());
  if (!how.packs()) return;
  config.formats = {how.format};
  config.deferred = how.mode == drop_mode::oneshot;
  config.step_tokens = options.chunk + config.max_sequences;
}

result<std::unique_ptr<session_cache>> open_session_cache(const common_options& options, loaded& parts,
                                                          int max_tokens, std::int64_t blocks,
                                                          const dropping* how) {
  cache_config config = config_of(options, parts, max_tokens);
  config.blocks = blocks;
  if (how != nullptr) use_format(options, *how, config);
  return session_cache::create(config);
}

result<std::string> read_file(const std::string& path, const char* field) {
  std::ifstream in(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (!in || in.bad()) {
    error e = bad_input("cannot_open", field, std::strerror(errno));
    e.file = path;
    return e;
  }
  return text;
}

}  // namespace engine
