// SPDX-License-Identifier: Apache-2.0
#pragma once

// A cache kind made of sessions: every sequence is a text under one retention policy, so a scheduler serves
// many of them in common steps while tokens leave.
//
//   extend(slot, n) -> rows     what is due goes, then room for a step that ends where the policy drops next
//   commit, open                a prefix is shared up to the first drop
//   out_of_blocks               the scheduler closes the youngest; resume() drops again what had gone
//
// oneshot and stream: what a request gets depends on its text alone. out_of_blocks: also on who else holds
// blocks. A text whose tokens leave takes blocks of its own for what stays, if they were shared. So nothing
// is shared where the pool has no room for the text and for that copy: a text that fits alone is then still
// served; nor in the mode out_of_blocks, where there is never room for it.
// Of drafts and assign() a session has its own form; here they are unsupported.

#include <memory>

#include "cache_kind.hpp"
#include "model.hpp"
#include "session_runner.hpp"

namespace engine {

/// The model must outlive it. Fails: as session_cache::create; cannot_run "unsupported" for an eviction other
/// than lru.
result<std::unique_ptr<cache_kind>> make_session_kind(llama_model& model, const dropping& how,
                                                      const cache_config& config);

}  // namespace engine
