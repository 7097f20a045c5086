// SPDX-License-Identifier: Apache-2.0
// The C API of sequences: scopes, verbs, tables.
#include <cstddef>
#include <cstring>

#include "capi.hpp"

namespace kvcache::detail {
namespace {

bool well_formed(const kvc_bytes& b) noexcept {
  return b.data != nullptr || b.size == 0;
}

// Longer values are refused by scope itself; a size near the end of the address space must not reach it.
kvc_status check_bytes(const kvc_bytes& b, int32_t field, int64_t level, kvc_error* error) noexcept {
  if (well_formed(b) && b.size <= scope::max_bytes) return KVC_OK;
  return fail(error, KVC_BAD_ARGUMENT, field, static_cast<int64_t>(b.size), level);
}

kvc_status check_level(const kvc_scope& s, int64_t level, kvc_error* error) noexcept {
  const auto refuse = [&](int32_t field, int64_t value) {
    return fail(error, KVC_BAD_ARGUMENT, field, value, level);
  };
  if (s.struct_size != sizeof s) return fail(error, KVC_ABI, KVC_FIELD_SCOPE, s.struct_size, level);
  if (s.kind != KVC_SCOPE_SHARED && s.kind != KVC_SCOPE_TENANT) return refuse(KVC_FIELD_SCOPE_KIND, s.kind);
  if (s.reserved != 0) return refuse(KVC_FIELD_RESERVED, s.reserved);
  // A tenant without a salt, or a salt that nobody looks at, is an isolation that was meant and not stated.
  if ((s.salt.data != nullptr) != (s.kind == KVC_SCOPE_TENANT)) return refuse(KVC_FIELD_SCOPE_SALT, s.kind);
  if (s.generation != 0 && s.adapter.data == nullptr) {
    return refuse(KVC_FIELD_SCOPE_ADAPTER, static_cast<int64_t>(s.generation));
  }
  if (level == 0 ? s.first_token != 0 : s.first_token <= 0)
    return refuse(KVC_FIELD_SCOPE_FROM, s.first_token);
  KVC_TRY(check_bytes(s.salt, KVC_FIELD_SCOPE_SALT, level, error));
  KVC_TRY(check_bytes(s.adapter, KVC_FIELD_SCOPE_ADAPTER, level, error));
  return check_bytes(s.media, KVC_FIELD_SCOPE_MEDIA, level, error);
}

std::string_view text(const kvc_bytes& b) noexcept {
  return {static_cast<const char*>(b.data), b.size};
}

scope level_of(const kvc_scope& s) noexcept {
  scope out = s.kind == KVC_SCOPE_SHARED ? scope::shared() : scope::tenant(text(s.salt));
  if (s.adapter.data != nullptr) out.adapter(text(s.adapter), s.generation);
  if (s.media.data != nullptr) out.media(text(s.media));
  if (s.weights != 0) out.weights(s.weights);
  return out;
}

kvc_status convert(const kvc_scope* in, scope& out, kvc_error* error) noexcept {
  KVC_TRY(need(in != nullptr, KVC_FIELD_SCOPE, error));
  KVC_TRY(check_level(*in, 0, error));
  out = level_of(*in);
  int64_t level = 0;
  for (const kvc_scope* s = in->narrower; s != nullptr; s = s->narrower) {
    // Also what ends a chain that leads back into itself.
    if (++level == scope::max_segments) return fail(error, KVC_BAD_ARGUMENT, KVC_FIELD_SCOPE, level, level);
    KVC_TRY(check_level(*s, level, error));
    out.from(s->first_token, level_of(*s));
  }
  return fail(error, out.check());
}

kvc_status check_tokens(const int32_t* tokens, int32_t n, int32_t field, kvc_error* error) noexcept {
  KVC_TRY(need(n >= 0, KVC_FIELD_N, error, n));
  return need(tokens != nullptr || n == 0, field, error);
}

// The options before they had levels: where `priority` is now stood a reserved 0, and no more.
constexpr uint32_t options_without_levels = offsetof(kvc_open_options, priority) + sizeof(int32_t);

kvc_status check_options(const kvc_open_options* in, open_options& out, kvc_error* error) noexcept {
  if (in == nullptr) return KVC_OK;
  kvc_open_options o{};
  if (in->struct_size == options_without_levels) {
    std::memcpy(&o, in, options_without_levels);
    KVC_TRY(need(o.priority == 0, KVC_FIELD_RESERVED, error, o.priority));
  } else {
    KVC_TRY(check_struct(in, KVC_FIELD_OPTIONS, error));
    o = *in;
  }
  KVC_TRY(need(o.reserved == 0, KVC_FIELD_RESERVED, error, o.reserved));
  out = {.account = o.account,
         .recompute = o.recompute != 0 ? o.recompute : 1,
         .priority = o.priority,
         .priority_ms = o.priority_ms};
  return KVC_OK;
}

// Puts a new sequence at its place and names it.
kvc_sequence keep(host_cache& h, host_sequence&& s) noexcept {
  const auto place = static_cast<size_t>(s.place());
  h.sequence[place] = std::move(s);
  h.id[place] = next_serial() << 20 | place;
  return {h.id[place]};
}

kvc_status convert(const kvc_drop* in, keep_plan& out, kvc_error* error) noexcept {
  KVC_TRY(check_struct(in, KVC_FIELD_PLAN, error));
  KVC_TRY(need(in->form >= KVC_DROP_NOTHING && in->form <= KVC_DROP_GATHER, KVC_FIELD_PLAN, error, in->form));
  out = {.form = static_cast<drop_form>(in->form),
         .keep = in->keep,
         .sinks = in->sinks,
         .recent = in->recent,
         .move_sinks = in->move_sinks != 0};
  return KVC_OK;
}
static_assert(static_cast<int32_t>(drop_form::whole_blocks) == KVC_DROP_WHOLE_BLOCKS &&
              static_cast<int32_t>(drop_form::overwrite) == KVC_DROP_OVERWRITE &&
              static_cast<int32_t>(drop_form::gather) == KVC_DROP_GATHER);

kvc_status view_table(kvc_cache cache, kvc_sequence sequence, int32_t group, bool open, const int32_t** ids,
                      int32_t* n, kvc_error* error) noexcept {
  host_cache* h = nullptr;
  host_sequence* s = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(find(*h, sequence, s, error));
  KVC_TRY(need(group >= 0 && group < h->cache.shape().groups, KVC_FIELD_GROUP, error, group));
  KVC_TRY(need(ids != nullptr, KVC_FIELD_IDS, error));
  KVC_TRY(need(n != nullptr, KVC_FIELD_N, error));
  const std::span<const block_id> table = open ? s->open_table(group) : s->table(group);
  static_assert(sizeof(block_id) == sizeof(int32_t));
  *ids = reinterpret_cast<const int32_t*>(table.data());
  *n = static_cast<int32_t>(table.size());
  return KVC_OK;
}

}  // namespace
}  // namespace kvcache::detail

using namespace kvcache;
using namespace kvcache::detail;

kvc_status kvc_open(kvc_cache cache, const kvc_scope* scope, const int32_t* prompt, int32_t n,
                    const kvc_open_options* options, kvc_sequence* sequence, int32_t* reused,
                    kvc_error* error) {
  host_cache* h = nullptr;
  kvcache::scope who = kvcache::scope::shared();
  open_options o;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(convert(scope, who, error));
  KVC_TRY(check_tokens(prompt, n, KVC_FIELD_PROMPT, error));
  KVC_TRY(check_options(options, o, error));
  KVC_TRY(need(sequence != nullptr, KVC_FIELD_SEQUENCE, error));
  auto opened = h->cache.open({prompt, static_cast<size_t>(n)}, who, o);
  if (!opened) return fail(error, opened.error());
  if (reused != nullptr) *reused = opened->reused();
  *sequence = keep(*h, std::move(*opened));
  return KVC_OK;
}

kvc_status kvc_peek(kvc_cache cache, const kvc_scope* scope, const int32_t* prompt, int32_t n,
                    int32_t recompute, int32_t* reusable, kvc_error* error) {
  host_cache* h = nullptr;
  kvcache::scope who = kvcache::scope::shared();
  KVC_TRY(find(cache, h, error));
  KVC_TRY(convert(scope, who, error));
  KVC_TRY(check_tokens(prompt, n, KVC_FIELD_PROMPT, error));
  KVC_TRY(need(recompute >= 0, KVC_FIELD_RECOMPUTE, error, recompute));
  KVC_TRY(need(reusable != nullptr, KVC_FIELD_OUT, error));
  const int32_t keep_out = recompute != 0 ? recompute : 1;
  *reusable = h->cache.peek({prompt, static_cast<size_t>(n)}, who, h->scratch.view(), keep_out);
  return KVC_OK;
}

kvc_status kvc_extend(kvc_cache cache, kvc_sequence sequence, int32_t n, int32_t draft, int32_t* got,
                      kvc_error* error) {
  host_sequence* s = nullptr;
  KVC_TRY(find(cache, sequence, s, error));
  KVC_TRY(need(got != nullptr || draft == 0, KVC_FIELD_OUT, error));
  const result<int32_t> r = s->extend(n, draft != 0);
  if (!r) return fail(error, r.error());
  if (got != nullptr) *got = *r;
  return KVC_OK;
}

kvc_status kvc_accept(kvc_cache cache, kvc_sequence sequence, int32_t n, kvc_error* error) {
  host_sequence* s = nullptr;
  KVC_TRY(find(cache, sequence, s, error));
  return fail(error, s->accept(n));
}

kvc_status kvc_settle(kvc_cache cache, kvc_sequence sequence, kvc_error* error) {
  host_sequence* s = nullptr;
  KVC_TRY(find(cache, sequence, s, error));
  return fail(error, s->settle());
}

kvc_status kvc_truncate(kvc_cache cache, kvc_sequence sequence, int32_t n, int32_t* reached,
                        kvc_error* error) {
  host_sequence* s = nullptr;
  KVC_TRY(find(cache, sequence, s, error));
  KVC_TRY(need(reached != nullptr, KVC_FIELD_OUT, error));
  const result<int32_t> r = s->truncate(n);
  if (!r) return fail(error, r.error());
  *reached = *r;
  return KVC_OK;
}

kvc_status kvc_commit(kvc_cache cache, kvc_sequence sequence, const int32_t* text, int32_t n,
                      int32_t* indexed, kvc_error* error) {
  host_sequence* s = nullptr;
  KVC_TRY(find(cache, sequence, s, error));
  KVC_TRY(check_tokens(text, n, KVC_FIELD_TEXT, error));
  const result<int32_t> r = s->commit({text, static_cast<size_t>(n)});
  if (!r) return fail(error, r.error());
  if (indexed != nullptr) *indexed = *r;
  return KVC_OK;
}

kvc_status kvc_retain(kvc_cache cache, kvc_sequence sequence, const kvc_drop* drop, int32_t* dropped,
                      int32_t* returned, kvc_error* error) {
  host_sequence* s = nullptr;
  keep_plan plan;
  KVC_TRY(find(cache, sequence, s, error));
  KVC_TRY(convert(drop, plan, error));
  const result<retained> r = s->retain(plan, drop->overwritten, drop->at_a_loss != 0);
  if (!r) return fail(error, r.error());
  if (dropped != nullptr) *dropped = r->dropped;
  if (returned != nullptr) *returned = r->blocks_returned;
  return KVC_OK;
}

kvc_status kvc_fork(kvc_cache cache, kvc_sequence sequence, kvc_sequence* branch, kvc_error* error) {
  host_cache* h = nullptr;
  host_sequence* s = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(find(*h, sequence, s, error));
  KVC_TRY(need(branch != nullptr, KVC_FIELD_OUT, error));
  auto forked = s->fork();
  if (!forked) return fail(error, forked.error());
  *branch = keep(*h, std::move(*forked));
  return KVC_OK;
}

kvc_status kvc_assign(kvc_cache cache, kvc_sequence to, kvc_sequence from, int32_t* touched,
                      kvc_error* error) {
  host_cache* h = nullptr;
  host_sequence *t = nullptr, *f = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(find(*h, to, t, error, 0));
  KVC_TRY(find(*h, from, f, error, 1));
  const result<int32_t> r = t->assign(*f);
  if (!r) return fail(error, r.error());
  if (touched != nullptr) *touched = *r;
  return KVC_OK;
}

kvc_status kvc_close(kvc_cache cache, kvc_sequence sequence, kvc_error* error) {
  host_cache* h = nullptr;
  host_sequence* s = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(find(*h, sequence, s, error));
  h->id[static_cast<size_t>(s->place())] = 0;
  return fail(error, s->close());
}

kvc_status kvc_get_lengths(kvc_cache cache, kvc_sequence sequence, kvc_lengths* lengths, kvc_error* error) {
  host_cache* h = nullptr;
  host_sequence* s = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(find(*h, sequence, s, error));
  KVC_TRY(check_struct(lengths, KVC_FIELD_LENGTHS, error));
  *lengths = {sizeof *lengths, s->held(), s->accepted(), s->committed(), s->reused(),
              s->place(),      {},        s->dropped(),  s->position()};
  for (int32_t g = 0; g < h->cache.shape().groups; ++g) lengths->sealed[g] = s->sealed(g);
  return KVC_OK;
}

kvc_status kvc_sealed_at(kvc_cache cache, kvc_sequence sequence, int32_t group, int32_t tokens,
                         int32_t* sealed, kvc_error* error) {
  host_cache* h = nullptr;
  host_sequence* s = nullptr;
  KVC_TRY(find(cache, h, error));
  KVC_TRY(find(*h, sequence, s, error));
  KVC_TRY(need(group >= 0 && group < h->cache.shape().groups, KVC_FIELD_GROUP, error, group));
  KVC_TRY(need(tokens >= 0 && tokens <= s->held(), KVC_FIELD_TOKENS, error, tokens));
  KVC_TRY(need(sealed != nullptr, KVC_FIELD_SEALED, error));
  *sealed = s->sealed_at(tokens, group);
  return KVC_OK;
}

kvc_status kvc_table(kvc_cache cache, kvc_sequence sequence, int32_t group, const int32_t** ids, int32_t* n,
                     kvc_error* error) {
  return view_table(cache, sequence, group, false, ids, n, error);
}

kvc_status kvc_open_table(kvc_cache cache, kvc_sequence sequence, int32_t group, const int32_t** ids,
                          int32_t* n, kvc_error* error) {
  return view_table(cache, sequence, group, true, ids, n, error);
}
