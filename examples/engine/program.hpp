// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the engine's programs have in common: one JSON document on stdout under --json, progress and messages
// on stderr, errors that name field and value, exit codes 0 ok, 1 cannot run, 2 usage, 3 bad input.

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cache_kind.hpp"
#include "command_line.hpp"
#include "model.hpp"
#include "session_runner.hpp"
#include "tokenizer.hpp"

namespace engine {

using json = nlohmann::ordered_json;

/// The document as text: floats as %.9g (enough to get the same float32 back), not-a-number and infinities as
/// null, bytes that are not UTF-8 replaced by U+FFFD.
std::string to_text(const json& document);

/// {"schema": "kvcache.error.v1", "error": {...}}
json to_json(const error& e);

/// Options that every program has.
struct common_options {
  std::string model;
  std::string cache = "reference";
  std::string type = "f32";
  int block_size = 16;
  bool block_given = false;  ///< on the command line; if not, packed blocks are of 64 tokens
  int chunk = 128;
  int threads = 1;
  bool as_json = false;
};

/// Adds --model, --cache, --kv, --block, --chunk, --threads and --json to `line`.
void add_common_options(command_line& line, common_options& options);

/// Parses the command line, runs `body` and turns what comes back into output and exit code: the document, or
/// the error, on stdout under --json; otherwise the error on stderr. Lets no exception through.
int run_program(command_line& line, int argc, char** argv, const common_options& options,
                const std::function<result<json>()>& body);

/// Adds --policy (policy_text.hpp) and --mode to `line`; --drop is another name of the latter.
struct policy_options {
  std::string policy = "full";
  std::string mode = "oneshot";
};
void add_policy_options(command_line& line, policy_options& options);

/// The policy, the format, and when they act. Fails: as parse_cache_policy.
result<dropping> read_dropping(const policy_options& options);

/// The same; nothing for "full" alone.
result<std::optional<dropping>> read_policy(const policy_options& options);

/// Everything a program needs before it can open a cache. Not movable: parts refer to each other.
struct loaded {
  explicit loaded(int threads) : pool(threads) {}
  thread_pool pool;
  std::unique_ptr<llama_model> model;
  std::unique_ptr<tokenizer> text;
};

result<std::unique_ptr<loaded>> load_model(const common_options& options);

/// The value of --kv.
kv_type kv_type_of(std::string_view option);

/// The cache the options ask for, for sequences of at most `max_tokens`.
result<std::unique_ptr<cache_kind>> open_cache(const common_options& options, loaded& parts, int max_tokens,
                                               int max_sequences = 1);

/// What the options and a format say of a cache. Packed blocks hold 64 tokens unless --block says otherwise.
void use_format(const common_options& options, const dropping& how, cache_config& config);
/// Tokens of a block under these options.
int block_size_of(const common_options& options, bool packs);

/// The cache for one session, for texts of at most `max_tokens`; `blocks` of them, or enough if that is 0.
/// `how`: its format, exact where it is null.
result<std::unique_ptr<session_cache>> open_session_cache(const common_options& options, loaded& parts,
                                                          int max_tokens, std::int64_t blocks = 0,
                                                          const dropping* how = nullptr);

/// The whole file. Fails: bad_input "cannot_open".
result<std::string> read_file(const std::string& path, const char* field);

}  // namespace engine
