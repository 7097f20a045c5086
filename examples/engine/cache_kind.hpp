// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the scheduler knows of the cache: which sequences exist, whether there is room, what was reused. A
// cache kind is one class that answers these questions and gives out the backend the model writes through.
//
//   open(prompt) -> slot, reused      the first `reused` tokens are there already
//   extend(slot, n) -> rows           then a model step over so many tokens, any number of times
//   commit(slot, text)                what was written may serve others
//   fork(slot), close(slot)
//   draft(slot, n) -> accept(slot, k)  n tokens of a guess, of which k turn out to be right
//   assign(slot, from)                 one branch becomes a copy of another

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kv_backend.hpp"
#include "kvcache/quant/format.hpp"
#include "thread_pool.hpp"

namespace engine {

/// Numeric format in which keys and values are stored.
enum class kv_type { f32, f16, bf16 };

std::string_view name_of(kv_type type);

/// Who may share a prompt's cache. There is no default: isolation is chosen.
struct cache_scope {
  bool shared = false;
  std::string tenant;     ///< used when not shared
  int public_tokens = 0;  ///< of a tenant's prompt: its first tokens are everyone's

  static cache_scope everyone() { return {true, {}, 0}; }
  static cache_scope only(std::string tenant) { return {false, std::move(tenant), 0}; }
  /// A public prefix of `tokens`, such as the server's own system prompt; the tenant's alone behind it.
  static cache_scope only_after(int tokens, std::string tenant) { return {false, std::move(tenant), tokens}; }
};

struct cache_config {
  kv_shape shape;
  kv_type type = kv_type::f32;
  int block_size = 16;           ///< tokens per block; kinds without blocks ignore it
  std::int64_t blocks = 0;       ///< size of the pool; 0: enough for max_sequences full sequences
  int max_sequences = 1;         ///< open at the same time
  int max_tokens = 0;            ///< longest sequence
  std::string eviction = "lru";  ///< which cached prefix goes first, as evict/parse.hpp reads it; paged only
  thread_pool* pool = nullptr;   ///< must outlive the cache
  /// How full blocks are packed: one format for all layers, or one per layer; empty: as they were written.
  /// For blocks of 32 to 128 tokens; paged only.
  std::vector<kvcache::kv_format> formats{};
  /// Packed blocks: new tokens of all sequences in one step, at most.
  int step_tokens = 512;
  /// Packed blocks: nothing is packed before it is asked for (session::compress).
  bool deferred = false;
};

struct opened_sequence {
  int slot = 0;
  int reused = 0;  ///< tokens of the prompt already cached; less than its length
};

struct cache_bytes {
  std::size_t held = 0;      ///< used by tokens that are stored
  std::size_t reserved = 0;  ///< taken from the system or set aside for sequences
};

/// Counters of the kinds that are made of blocks; zero for the others.
struct cache_counts {
  std::int64_t blocks_total = 0;
  std::int64_t blocks_used = 0;    ///< set aside for open sequences, shared ones once
  std::int64_t blocks_cached = 0;  ///< hold prefixes that nobody uses at the moment
  std::int64_t evictions = 0;      ///< prefixes thrown out to make room, ever
  std::int64_t copies = 0;         ///< blocks copied because they were shared, ever
  std::size_t block_bytes = 0;     ///< of one block over all layers
};

/// One way of keeping keys and values.
/// Thread safety: one thread at a time.
class cache_kind {
 public:
  virtual ~cache_kind() = default;

  virtual std::string_view name() const = 0;
  virtual kv_backend& backend() = 0;

  /// Begins a sequence that is going to hold `prompt`. At least its last token is left to compute.
  /// Fails: cannot_run "out_of_sequences"; bad_input when the prompt is empty or too long.
  virtual result<opened_sequence> open(std::span<const token_id> prompt, const cache_scope& scope) = 0;

  /// Makes room for `tokens` more tokens. Returns how many of them one step may compute: all, but where
  /// tokens leave in between. Fails: cannot_run "out_of_blocks" (close another sequence and try again) or
  /// "too_long"; nothing changed.
  virtual result<int> extend(int slot, int tokens) = 0;

  /// As open, for a text that was closed before its end: `prompt` tokens, and what was generated after them.
  virtual result<opened_sequence> resume(std::span<const token_id> text, int prompt,
                                         const cache_scope& scope);

  /// Tells which tokens the sequence holds, from its first one, so that they can serve other prompts.
  /// Requires: text.size() is at most the number of tokens written.
  virtual status commit(int slot, std::span<const token_id> text) = 0;

  /// A second sequence with the same content. Fails: as open.
  virtual result<int> fork(int slot) = 0;

  virtual void close(int slot) = 0;

  /// Makes room for `tokens` that may be taken back. Returns how many of them: all, but where a block is
  /// packed next, as that is not taken back; none, where the next token does that: it is computed for
  /// certain. The rows are then computed in one step, and accept() follows it. Fails: as extend;
  /// "unsupported".
  virtual result<int> draft(int slot, int tokens);

  /// Keeps the first `tokens` of the draft; the others were never written, as far as anyone can tell.
  /// Fails: bad_argument when that many were not drafted; "unsupported".
  virtual status accept(int slot, int tokens);

  /// `slot` becomes a copy of `from`, as if it had been closed and forked anew, but only table entries that
  /// differ are touched. Returns how many those were. Fails: "bad_argument" unless both are of one scope;
  /// "unsupported".
  virtual result<int> assign(int slot, int from);

  /// Tokens written to the sequence.
  virtual int length(int slot) const = 0;

  /// Of these, tokens that a retention policy has let go, on average over the heads, rounded down. What is to
  /// go before the next step is not among them yet.
  virtual int dropped(int) const { return 0; }

  virtual cache_bytes bytes() const = 0;

  virtual cache_counts counts() const { return {}; }

  /// Copies what is stored for one token, widened to f32, for tests and diagnosis.
  /// k (after RoPE) and v: [kv_heads][head_dim].
  virtual void read(int slot, int layer, int position, float* k, float* v) const = 0;
};

/// The kinds this build offers, by the names the programs use.
std::span<const std::string_view> cache_kind_names();

/// Fails: cannot_run when the kind does not support the shape, type or block size.
result<std::unique_ptr<cache_kind>> make_cache(std::string_view kind, const cache_config& config);

}  // namespace engine
