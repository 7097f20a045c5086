// SPDX-License-Identifier: Apache-2.0
#pragma once

// Texts on a paged cache that drops tokens: a session is one text under one retention policy.
//
//   session_cache ── blocks, tables, planes of all sessions
//     session ── feed ──> logits of every token fed        oneshot: all stay until compress() is called
//        │        └─ the policy drops after any token      stream:  the policy is in force from the first
//        token ├─ compress   applies the policy once: the end of a prompt └─ fork       the same text, shared
//        blocks; under another policy if it remembers its queries
//
// While all heads hold as many tokens they share one block table (sequence::retain, gathered in place). A
// budget divided by score gives every head a length of its own: its tokens then move to a table per layer
// and kv head, one sequence each of a second cache.

#include <memory>
#include <span>
#include <vector>

#include "cache_kind.hpp"
#include "kvcache/retain/any_retention.hpp"
#include "model.hpp"
#include "policy_text.hpp"
#include "runner.hpp"

namespace engine {

/// When tokens go.
enum class drop_mode {
  oneshot,  ///< when compress() is called
  stream,   ///< after every token that makes the policy's plan say so; results do not depend on chunks
  /// When there is no block for the next token, down to the policy's budget, and only if that gives one back.
  /// Which token that is depends on who else holds blocks, not on chunks.
  out_of_blocks,
};

/// "oneshot", "stream", "out_of_blocks".
const char* name_of(drop_mode mode);

struct session_options {
  drop_mode mode = drop_mode::oneshot;
  int chunk = 128;                                ///< most rows of one step
  cache_scope scope = cache_scope::only("text");  ///< who may share the prefix
  std::span<const token_id> prompt{};             ///< looked up in the cache; see session::reused()
  /// Text positions that are never dropped, ascending. Refused with a policy that drops whole blocks, unless
  /// they are among its sinks.
  std::vector<int> pinned{};
  /// Keeps every query, so that a fork may be under any policy (fork_as). Memory: a query per token and
  /// layer.
  bool remember = false;
  /// Drops also where that gives no block back: beside a fork, or a few tokens.
  bool at_a_loss = true;
  /// Where a plan says drop_form::overwrite, the next token takes the slot of the one that went. If not, what
  /// stays is gathered: the same tokens stay, in order of the text, and sums are rounded in another order.
  bool in_place = true;
};

/// The policy as packed blocks allow it: what would drop token by token from the middle of a text drops whole
/// blocks (window, streaming_llm with positions=text), so up to a block less one more stays at either end.
kvcache::retention in_blocks(const kvcache::retention& policy, const cache_config& config);

/// Whether texts under the policy can lie in packed blocks (cache_config::formats). Fails: cannot_run
/// "unsupported" with the reason: codes that were packed together are not moved apart, nor turned.
status check_together(const kvcache::retention& policy, drop_mode mode, const cache_config& config);

/// Where the sessions' keys and values lie. Must outlive its sessions.
class session_cache {
 public:
  /// `config` as for a paged cache kind: shape, type, block_size, max_sequences, max_tokens, pool.
  static result<std::unique_ptr<session_cache>> create(const cache_config& config);
  ~session_cache();
  session_cache(const session_cache&) = delete;
  session_cache& operator=(const session_cache&) = delete;

  /// What the model writes through in a step of the caller's: see session::extend.
  kv_backend& backend();
  /// As of a cache kind: what its sessions hold. Blocks of single heads count as parts of whole ones.
  cache_bytes bytes() const;
  cache_counts counts() const;
  /// Blocks of both caches that are in use or cached, as bytes.
  std::size_t bytes_used() const;
  /// Null, or the name of the first broken invariant.
  const char* check() const;

 private:
  friend class session;
  struct parts;
  explicit session_cache(std::unique_ptr<parts> p);
  std::unique_ptr<parts> parts_;
};

/// One text under one policy. Closes when it is destroyed.
class session {
 public:
  /// Begins a text. Fails: cannot_run out_of_sequences; as check_together; bad_input for pinned positions out
  /// of order.
  static result<session> create(llama_model& model, session_cache& cache, const kvcache::retention& policy,
                                const session_options& options = {});
  session(session&&) noexcept;
  session& operator=(session&&) noexcept;
  ~session();

  /// Leading tokens of options.prompt that need not be fed: the cache has them.
  int reused() const;
  /// Computes `tokens`, which follow what was fed. Returns logits [tokens][vocabulary], or of the last token
  /// only. Fails: out_of_blocks, too_long; position() then says how many were computed.
  result<std::vector<float>> feed(std::span<const token_id> tokens, observe which = observe::all);
  /// Applies the policy once, as at the end of a prompt. Does nothing where the plan says so. Deferred
  /// formats: then packs what stays, but for the newest tokens; what is fed afterwards stays as it is
  /// written. Fails: out_of_blocks; no_gain unless at_a_loss.
  status compress();
  /// The same text under the same policy: what it saw so far is copied, blocks are shared.
  result<session> fork() const;
  /// The same text under another policy, as if it had been under that from the start. Requires: remember,
  /// nothing dropped.
  result<session> fork_as(const kvcache::retention& policy, drop_mode mode = drop_mode::oneshot) const;
  /// Makes whole units of `text`, all tokens fed, available to other sessions of the scope. Returns how many
  /// tokens are: none after a drop.
  result<int> commit(std::span<const token_id> text);

  /// As feed for tokens that may be taken back: computes the first of them, up to the next drop or until a
  /// block would be packed, and returns their logits. accept() must follow. Nothing is returned, and nothing
  /// drafted, where the next token packs a block: it is fed for certain.
  result<std::vector<float>> draft(std::span<const token_id> tokens);
  /// Keeps the first `n` of the draft. The others leave no trace, also not in what the policy saw.
  status accept(int n);

  /// One token for each of several sessions of one cache, in one step. logits: [sessions][vocabulary].
  static status advance(std::span<session* const> sessions, std::span<const token_id> tokens,
                        std::vector<float>& logits);

  /// Room for a step of the caller's, which may hold rows of other sessions as well: at most `tokens` of this
  /// text, up to the next drop. Returns how many; llama_model::forward then computes them through
  /// session_cache::backend(), as the segment {slot(), position(), how many}. feed() is made of this.
  /// Fails: as feed; nothing is lost, it may be tried again.
  result<int> extend(int tokens);
  /// Lets go what is due to go since the last step: extend() does so at the latest. Fails: out_of_blocks.
  status settle();
  /// The text's name in a step.
  int slot() const;
  /// Copies what is stored for the token at a text position, widened to f32; not-a-number for a head that has
  /// dropped it. k (after RoPE) and v: [kv_heads][head_dim].
  void read(int layer, int position, float* k, float* v) const;

  /// Tokens fed or reused: the text position of the next one.
  int position() const;
  /// Tokens that left, on average over the heads, rounded down.
  int dropped() const;
  /// Text positions that a kv head holds, ascending.
  std::span<const int> kept(int layer, int kv_head) const;
  /// Tokens held by all heads of all layers together, times 2 x head_dim: what is stored of K and V.
  std::size_t values_kept() const;
  /// Bytes of the blocks in its tables, also where they are shared.
  std::size_t bytes_held() const;
  /// Bytes of the blocks that the whole text would take.
  std::size_t bytes_full() const;
  /// Bytes of what the policy remembers: sums, and queries kept.
  std::size_t bytes_state() const;
  /// Whether every head has a table of its own.
  bool split() const;

 private:
  struct state;
  explicit session(std::unique_ptr<state> s);
  result<session> copy() const;
  std::unique_ptr<state> state_;
  friend class session_cache;
  friend struct session_cache::parts;
};

}  // namespace engine
