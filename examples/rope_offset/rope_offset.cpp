// SPDX-License-Identifier: Apache-2.0
//
// rope_offset: why a cached passage cannot be reused at another place, although its tokens are the same.
//
//   cached      | document |                      keys turned for positions 0, 1, 2, ...
//   wanted      | instructions | document | ...   the same tokens at positions n, n+1, n+2, ...
//
// RoPE turns every key by an angle that grows with its position, and what a later layer stores depends on all
// tokens before it. An engine that finds blocks by the tokens in them gets keys for the wrong positions,
// computed without the instructions. Nothing fails: the text goes on, only worse. The program does exactly
// that on the real model, and measures what each of the two mistakes costs:
//
//   pasted as it was         keys of the old positions, computed without the instructions
//   turned                   keys of the new positions, computed without the instructions
//   right, but not turned    keys of the old positions, computed with the instructions
//
// In the library this cannot be asked for. A unit of tokens is found below its parent only, so finding it
// means that everything before it is the same too, and then its positions are the same. Where a token's key
// and value go is a slot, its position is a number of its own; neither is derived from the other.

#include <algorithm>
#include <numeric>

#include "example.hpp"
#include "kvcache/cache.hpp"
#include "pasted.hpp"
#include "sampling.hpp"

namespace {

using engine::token_id;
using rope_offset::kept;

struct options {
  engine::common_options common;
  int offset = 256;
};

constexpr const char* instructions =
    "You keep the archive of a small harbour. You answer in plain words, you do not invent anything, and you "
    "say from which ledger an answer comes. If two ledgers disagree you name both. You write dates in full "
    "and you leave the spelling of ships' names as it is. What the keepers wrote about their families is "
    "private; you do not repeat it. Visitors may read the ledgers on weekdays between nine and four, in the "
    "reading room on the first floor.\n\n";
constexpr const char* document =
    "The first ledger begins on the third of March. Wind from the north-west, moderate. Lamp lit at eight "
    "minutes to six. Two ships seen, the schooner Amalia and a collier from the south. The hinge of the "
    "store door was repaired. So it goes on for a page and a half. Then, without any heading, comes a line "
    "that does not belong: the boy from the farm asked how far the light can be seen. I told him eighteen "
    "miles. He asked who had measured it. I could not say. A week later there is another: I have asked the "
    "pilot how far the light can be seen.";
constexpr const char* continuation =
    " He says eighteen miles, because the chart says so. I asked who made the chart. He laughed. After that "
    "the question comes back every few days. The keeper asked the captain of the schooner Amalia, and he "
    "asked the boy from the farm.";

struct texts {
  std::vector<token_id> prefix, passage, rest;
};

/// The same tokens whatever stands beside them: encoded apart, and cut to whole blocks, so that an index that
/// looked at tokens alone would find the passage.
texts encode(const options& o, const engine::tokenizer& text) {
  texts t;
  const auto words = text.encode(instructions, engine::specials::as_text);
  for (int i = 0; i < o.offset; ++i) t.prefix.push_back(words[static_cast<std::size_t>(i) % words.size()]);
  t.passage = text.encode(document, engine::specials::as_text);
  t.passage.resize(t.passage.size() - t.passage.size() % static_cast<std::size_t>(o.common.block_size));
  t.rest = text.encode(continuation, engine::specials::as_text);
  return t;
}

std::vector<token_id> join(std::initializer_list<std::span<const token_id>> parts) {
  std::vector<token_id> out;
  for (const auto part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

/// Computes `tokens` behind what the sequence holds, in one step. With `from` their keys and values are
/// replaced.
engine::result<kept> forward(engine::llama_model& model, engine::cache_kind& cache, int slot,
                             std::span<const token_id> tokens, const kept* from, std::vector<float>& logits) {
  rope_offset::pasting_backend backend(cache.backend(), model.shape().kv, from);
  if (tokens.empty()) return backend.used;
  const int rows = static_cast<int>(tokens.size());
  if (const auto room = cache.extend(slot, rows); !room) return room.error();
  const engine::step_segment segment{slot, cache.length(slot), rows};
  std::vector<int> all(tokens.size());
  std::iota(all.begin(), all.end(), 0);
  logits.resize(tokens.size() * static_cast<std::size_t>(model.shape().vocabulary));
  if (auto s = model.forward(tokens, {&segment, 1}, all, backend, logits); !s) return s.error();
  return std::move(backend.used);
}

struct outcome {
  kept passage;               ///< its keys and values
  std::vector<float> logits;  ///< of the rest, [rest][vocabulary]
};

/// Prefix, passage, rest, with the passage's keys and values taken from elsewhere if `from` says so.
engine::result<outcome> run_with(const options& o, engine::loaded& parts, std::span<const token_id> prefix,
                                 const texts& t, const kept* from) {
  const std::size_t length = prefix.size() + t.passage.size() + t.rest.size();
  auto cache = engine::open_cache(o.common, parts, static_cast<int>(length));
  if (!cache) return cache.error();
  const auto opened = (*cache)->open(t.passage, engine::cache_scope::only("careless"));
  if (!opened) return opened.error();
  const engine::open_slot slot(**cache, opened->slot);
  outcome out;
  std::vector<float> unused;
  if (auto s = forward(*parts.model, **cache, slot.slot(), prefix, nullptr, unused); !s) return s.error();
  auto passage = forward(*parts.model, **cache, slot.slot(), t.passage, from, unused);
  if (!passage) return passage.error();
  out.passage = std::move(*passage);
  if (auto s = forward(*parts.model, **cache, slot.slot(), t.rest, nullptr, out.logits); !s) return s.error();
  return out;
}

/// The library in the same situation: the passage is cached from position 0, and wanted behind a prefix.
engine::status show_library(const options& o, engine::report& out, engine::loaded& parts, const texts& t,
                            const std::vector<float>& right) {
  const auto whole = join({t.prefix, t.passage, t.rest});
  auto cache = engine::open_cache(o.common, parts, static_cast<int>(whole.size()), 4);
  if (!cache) return cache.error();
  const auto everyone = engine::cache_scope::everyone();
  if (auto s = engine::record(parts, **cache, t.passage, everyone, 1, o.common.chunk); !s) return s.error();
  const std::size_t behind = t.prefix.size() + t.passage.size();
  bool equal = true;
  int reused[2] = {};
  for (int& found : reused) {
    const auto opened = (*cache)->open(whole, everyone);
    if (!opened) return opened.error();
    const engine::open_slot slot(**cache, opened->slot);
    found = opened->reused;
    const auto see = [&](int position, std::span<const float> logits) {
      if (static_cast<std::size_t>(position) < behind) return;
      const auto row = engine::row_of(right, *parts.model, static_cast<std::size_t>(position) - behind);
      equal = equal && std::equal(row.begin(), row.end(), logits.begin());
    };
    const auto left = std::span<const token_id>(whole).subspan(static_cast<std::size_t>(found));
    if (auto s =
            engine::feed(*parts.model, **cache, slot.slot(), left, o.common.chunk, engine::observe::all, see);
        !s)
      return s;
    if (auto s = (*cache)->commit(slot.slot(), whole); !s) return s;
  }
  const int block = o.common.block_size;
  out.claim("with the passage cached at position 0, the library finds nothing of it behind the instructions",
            reused[0] == 0);
  out.claim("once computed there, it is found there",
            reused[1] == (static_cast<int>(whole.size()) - 1) / block * block);
  out.claim("both times the logits are the right ones, to the bit", equal);
  return {};
}

/// The index by itself: equal tokens below different parents are different nodes.
engine::status show_index(const options& o, engine::report& out, const texts& t) {
  const auto whole = join({t.prefix, t.passage});
  const auto to_error = [](const kvcache::status& s) {
    return engine::cannot_run(kvcache::to_text(s.code), s.field, std::to_string(s.value));
  };
  auto made = kvcache::cache::create({.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 2},
                                      .block_size = o.common.block_size,
                                      .capacity = kvcache::mebibytes(1)});
  if (!made) return to_error(made.error());
  for (const auto& text : {t.passage, whole}) {
    auto sequence = made->open(text, kvcache::scope::shared());
    if (!sequence) return to_error(sequence.error());
    if (const auto s = sequence->extend(static_cast<int>(text.size()) - sequence->held()); !s)
      return to_error(s.error());
    if (const auto s = sequence->commit(text); !s) return to_error(s.error());
  }
  const auto units = static_cast<std::uint64_t>((t.passage.size() + whole.size()) /
                                                static_cast<std::size_t>(o.common.block_size));
  out.claim("the index holds the passage twice, once for each place", made->count().nodes == units);
  return {};
}

/// What each way to come by the passage's keys and values does to the text behind it.
engine::result<std::vector<engine::damage>> measure(const options& o, engine::report& out,
                                                    engine::loaded& parts, const texts& t,
                                                    const outcome& right, const outcome& alone) {
  // The backend turns a key by its new position, so one that shall look as if it came from `offset` positions
  // earlier is turned back by as much first.
  const kept old_positions = alone.passage.turned(parts.model->shape().kv, -o.offset);
  const kept right_but_old = right.passage.turned(parts.model->shape().kv, -o.offset);
  const std::pair<const char*, const kept*> cases[] = {{"recomputed (right)", &right.passage},
                                                       {"pasted as it was", &old_positions},
                                                       {"turned", &alone.passage},
                                                       {"right, but not turned", &right_but_old}};
  out.print("a passage of %zu tokens behind %d others; scored on the %zu tokens after it\n\n",
            t.passage.size(), o.offset, t.rest.size());
  out.print("%-24s %10s %10s %14s %18s\n", "keys and values", "KL", "NLL", "same choice",
            "largest difference");
  std::vector<engine::damage> all;
  for (const auto& [name, from] : cases) {
    const auto got = run_with(o, parts, t.prefix, t, from);
    if (!got) return got.error();
    const engine::damage& d =
        all.emplace_back(engine::compare(*parts.model, right.logits, got->logits, t.rest));
    out.print("%-24s %10.4f %10.4f %12.0f %% %18.3f\n", name, d.kl, d.nll, 100 * d.same_choice, d.difference);
    out.figures["cases"].push_back({{"case", name},
                                    {"kl", d.kl},
                                    {"nll", d.nll},
                                    {"same_choice", d.same_choice},
                                    {"largest_logit_difference", d.difference}});
  }
  out.print("\n");
  out.claim("putting back what was computed changes no bit, so what follows is not the method's fault",
            all[0].difference == 0);
  out.claim("a reuse at another offset changes the answers, and nothing reports it", all[1].kl > 0.01);
  out.claim("so does each mistake alone", all[2].kl > 0.001 && all[3].kl > 0.001);
  return all;
}

engine::error usage(const char* option, std::string what) {
  return {engine::failure::usage, "usage", option, std::move(what), {}, -1};
}

engine::result<std::string> run(const options& o, engine::report& out) {
  if (o.offset % o.common.block_size != 0)
    return usage("--offset", std::to_string(o.offset) + " is not a multiple of --block");
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  const texts t = encode(o, *(*parts)->text);
  if (t.passage.empty())
    return usage("--block", std::to_string(o.common.block_size) + " is longer than the passage");
  const auto right = run_with(o, **parts, t.prefix, t, nullptr);
  if (!right) return right.error();
  const auto alone = run_with(o, **parts, {}, t, nullptr);  // what an earlier request left in the cache
  if (!alone) return alone.error();

  const auto cases = measure(o, out, **parts, t, *right, *alone);
  if (!cases) return cases.error();
  const std::vector<engine::damage>& all = *cases;
  if (auto s = show_library(o, out, **parts, t, right->logits); !s) return s.error();
  if (auto s = show_index(o, out, t); !s) return s.error();
  return engine::formatted(
      "reuse %d tokens away: KL %.3f, NLL %.3f instead of %.3f, another choice at %.0f %% of the tokens "
      "(keys alone KL %.3f, context alone %.3f); the library recomputes, KL 0",
      o.offset, all[1].kl, all[1].nll, all[0].nll, 100 * (1 - all[1].same_choice), all[3].kl, all[2].kl);
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("What goes wrong when a cached passage is reused at another position.",
                            "rope_offset");
  options o;
  o.common.cache = "paged";
  engine::add_common_options(line, o.common);
  line.add("--offset", o.offset, "tokens in front of the passage; whole blocks", 0, 4096);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
