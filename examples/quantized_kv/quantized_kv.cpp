// SPDX-License-Identifier: Apache-2.0
//
// quantized_kv: full blocks packed to 8 and 4 bits. A format is a property of blocks, so whatever else blocks
// are good for goes on working:
//
//   text      | sealed | sealed | ... | open |        64 tokens each; what is being written stays f16
//   fork      | the same blocks       | copy |        only the open one is copied, by the first who writes
//   hit       | the same blocks       | computed      the next prompt reads the codes that it would have made
//   draft     | the same blocks       | guess: ends before a block would be packed, as that is not undone
//
// The program asks the planner how many texts fit into the same bytes and opens so many; then each format
// reads one text, from the first token on (queries that come after a block is full read its codes, as they
// would in service), and is compared with f16: how far off are the next tokens, and what would it write?

#include <array>

#include "capacity.hpp"
#include "kvcache/quant/parse.hpp"
#include "kvcache/quant/sizes.hpp"
#include "library_terms.hpp"
#include "policies.hpp"
#include "sampling.hpp"
#include "scheduler.hpp"

namespace {

using engine::token_id;

struct options : policies::options {
  std::vector<std::string> formats = {"kv8", "kv6", "kv4"};  ///< K8V8, K8V4, K4V4
  int prompt = 568;
  int score = 128;
  int max_new = 20;
  int mebibytes = 1024;
  int longest = 2000;  ///< tokens of each text that has to fit
};

/// What one format showed.
struct outcome {
  std::string name;
  quantized::fit fit;
  double bits = 0;            // per value
  std::size_t held = 0;       // by the prompt, what is still open included
  std::vector<float> rows;    // of the scored tokens
  std::vector<token_id> ids;  // what it writes after the prompt
  std::uint64_t bits_of_all = 0;
  int accepted = 0, rejected = 0;
};

/// Greedy decoding. `last`: logits that predict the first token.
engine::status write(const options& o, engine::session& text, std::vector<float> last,
                     std::vector<token_id>& ids, std::uint64_t& bits) {
  bits = engine::chain_start;
  for (;;) {
    bits = engine::chain(bits, engine::fingerprint(last));
    ids.push_back(engine::greedy(last));
    if (static_cast<int>(ids.size()) == o.max_new) return {};
    auto logits = text.feed({&ids.back(), 1}, engine::observe::last);
    if (!logits) return logits.error();
    last = std::move(*logits);
  }
}

/// The same with drafts: the right continuation with every third token wrong, so that some are taken back.
engine::status write_with_drafts(const options& o, const policies::world& w, engine::session& text,
                                 std::span<const float> last, outcome& seen, std::vector<token_id>& ids) {
  ids.push_back(engine::greedy(last));
  while (static_cast<int>(ids.size()) < o.max_new) {
    std::vector<token_id> rows{ids.back()};
    for (std::size_t i = ids.size(); i < seen.ids.size() && rows.size() < 6; ++i)
      rows.push_back(i % 3 == 0 ? (seen.ids[i] + 1) % w.model().shape().vocabulary : seen.ids[i]);
    auto logits = text.draft(rows);
    if (!logits) return logits.error();
    const bool certain = logits->empty();  // the next token packs a block: no guess
    if (certain) logits = text.feed({rows.data(), 1}, engine::observe::last);
    if (!logits) return logits.error();
    const std::size_t computed = logits->size() / static_cast<std::size_t>(w.model().shape().vocabulary);
    std::size_t right = 0;
    ids.push_back(engine::greedy(engine::row_of(*logits, w.model(), 0)));
    while (right + 1 < computed && ids.back() == rows[right + 1])
      ids.push_back(engine::greedy(engine::row_of(*logits, w.model(), ++right)));
    seen.accepted += static_cast<int>(right);
    seen.rejected += static_cast<int>(computed - 1 - right);
    if (certain) continue;
    if (auto s = text.accept(static_cast<int>(right) + 1); !s) return s;
  }
  ids.resize(static_cast<std::size_t>(o.max_new));
  return {};
}

/// One format reads the text, and everything that shares blocks is done to it.
engine::status read_text(const options& o, engine::report& out, const policies::world& w,
                         const kvcache::kv_format& format, outcome& seen) {
  engine::cache_config config;
  config.shape = w.shape();
  config.type = engine::kv_type_of(o.common.type);
  config.max_sequences = 4;
  config.max_tokens = o.prompt + o.score + o.max_new;
  config.pool = &w.parts->pool;
  config.block_size = o.common.block_size;
  config.formats = {format};
  config.step_tokens = o.common.chunk;
  auto cache = engine::session_cache::create(config);
  if (!cache) return cache.error();
  const auto prompt = std::span(w.text).first(static_cast<std::size_t>(o.prompt));
  const auto begin = [&](std::span<const token_id> find) {
    return engine::session::create(w.model(), **cache, {}, {.chunk = o.common.chunk, .prompt = find});
  };
  auto cold = begin({});
  if (!cold) return cold.error();
  const auto last = cold->feed(prompt, engine::observe::last);
  if (!last) return last.error();
  seen.held = cold->bytes_held();

  const auto before = (*cache)->counts();
  auto writes = cold->fork(), drafts = cold->fork();
  if (!writes || !drafts) return writes ? drafts.error() : writes.error();
  const auto forked = (*cache)->counts();
  if (auto s = write(o, *writes, *last, seen.ids, seen.bits_of_all); !s) return s;
  const auto written = (*cache)->counts();
  const int full = o.prompt / o.common.block_size, all = kvcache::ceil_div(o.prompt, o.common.block_size);
  const int grown = kvcache::ceil_div(o.prompt + o.max_new - 1, o.common.block_size) - full;
  out.claim(seen.name + ": a prompt and two forks lie in its " + std::to_string(all) +
                " blocks; one that writes has " + std::to_string(grown) + " of its own and shares the " +
                std::to_string(full) + " that are full",
            before.blocks_used == all && forked.blocks_used == all && forked.copies == 0 &&
                written.blocks_used == all + grown && written.copies <= before.copies + 1);

  std::vector<token_id> ids;
  if (auto s = write_with_drafts(o, w, *drafts, *last, seen, ids); !s) return s;
  out.claim(seen.name + ": drafts accepted and taken back leave the same tokens",
            ids == seen.ids && seen.rejected > 0);

  if (auto s = cold->commit(prompt); !s) return s.error();
  auto hit = begin(prompt);
  if (!hit) return hit.error();
  const auto rest = prompt.subspan(static_cast<std::size_t>(hit->reused()));
  const auto again = hit->feed(rest, engine::observe::last);
  if (!again) return again.error();
  std::vector<token_id> found;
  std::uint64_t bits = 0;
  if (auto s = write(o, *hit, *again, found, bits); !s) return s;
  out.claim(seen.name + ": a prompt found in full blocks is continued as one that was computed, to the bit",
            hit->reused() == (o.prompt - 1) / o.common.block_size * o.common.block_size &&
                found == seen.ids && bits == seen.bits_of_all);

  auto rows = cold->feed(std::span(w.text).subspan(prompt.size()));
  if (!rows) return rows.error();
  seen.rows = std::move(*rows);
  return {};
}

engine::result<std::string> run(const options& o, engine::report& out) {
  const auto w = policies::open_world(o, o.prompt + o.score, o.prompt + o.score, 1);
  if (!w) return w.error();
  const kvcache::group_shape shape{.layers = w->shape().layers,
                                   .kv_heads = w->shape().kv_heads,
                                   .head_dim_k = w->shape().head_dim,
                                   .head_dim_v = w->shape().head_dim,
                                   .type = engine::element_of(engine::kv_type_of(o.common.type))};
  const quantized::demand demand{shape, o.common.block_size, o.longest, o.common.chunk,
                                 kvcache::mebibytes(o.mebibytes)};
  std::array<outcome, 4> seen;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    seen[i].name = i == 0 ? "f16" : o.formats[i - 1];
    const kvcache::parsed_format format = kvcache::parse_format(seen[i].name);
    if (!format.ok())
      return engine::bad_input("bad_format", std::string(format.key),
                               std::string(format.text) + "; allowed: " + format.allowed);
    seen[i].bits = kvcache::bits_per_value(format.value, shape, o.common.block_size, o.longest);
    const auto fit = quantized::most_texts(format.value, demand);
    if (!fit) return fit.error();
    seen[i].fit = *fit;
    if (auto s = read_text(o, out, *w, format.value, seen[i]); !s) return s.error();
  }

  out.print("\n%-6s %8s %12s %10s %10s %9s %11s %12s\n", "", "texts", "bytes/token", "bits/value", "prompt",
            "KL", "same choice", "same tokens");
  std::array<engine::damage, 4> damage;
  bool agree = true;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const outcome& s = seen[i];
    damage[i] = engine::compare(w->model(), seen[0].rows, s.rows,
                                std::span(w->text).last(static_cast<std::size_t>(o.score)));
    const auto same = std::mismatch(s.ids.begin(), s.ids.end(), seen[0].ids.begin()).first - s.ids.begin();
    out.print("%-6s %8d %12d %10.2f %10s %9.5f %9.1f %% %9d/%d\n", s.name.c_str(), s.fit.opened,
              static_cast<int>(s.fit.token.count), s.bits, policies::mebibytes(s.held).c_str(), damage[i].kl,
              100 * damage[i].same_choice, static_cast<int>(same), o.max_new);
    agree = agree && s.fit.planned == s.fit.opened && s.fit.memory <= demand.capacity;
    out.figures["formats"].push_back({{"format", s.name},
                                      {"texts", s.fit.opened},
                                      {"planned", s.fit.planned},
                                      {"bytes_per_token", s.fit.token.count},
                                      {"bits_per_value", s.bits},
                                      {"prompt_bytes", s.held},
                                      {"kl", damage[i].kl},
                                      {"same_choice", damage[i].same_choice},
                                      {"ids", s.ids},
                                      {"accepted", s.accepted},
                                      {"rejected", s.rejected}});
  }
  const auto end = std::span(w->text).subspan(static_cast<std::size_t>(o.prompt) - 12, 12);
  out.print("\n... %s\n", engine::one_line(w->parts->text->decode(end), 100).c_str());
  for (const outcome& s : seen)
    out.print("%-6s %s\n", s.name.c_str(), engine::one_line(w->parts->text->decode(s.ids), 100).c_str());
  out.print("\n");
  out.claim("as many texts could be opened as the planner said, in every format", agree);
  out.claim("of 8-bit codes nearly twice as many fit as of f16, of 4-bit codes more than three times as many",
            seen[1].fit.opened > 1.75 * seen[0].fit.opened && seen[3].fit.opened > 3 * seen[0].fit.opened);
  out.claim("fewer bits, larger KL",
            damage[1].kl > 0 && damage[1].kl < damage[2].kl && damage[2].kl < damage[3].kl);
  out.claim("8 bits change next to nothing: KL below 0.001", damage[1].kl < 0.001);
  out.claim("4 bits change little: KL below 0.02, and at least 9 of 10 choices are the same",
            damage[3].kl < 0.02 && damage[3].same_choice > 0.9);
  return engine::formatted(
      "%d texts of %s tokens in %s MiB as f16, %d as %s (KL %.5f), %d as %s (%.4f), %d as %s (%.4f); forks, "
      "prefix hits and drafts on packed blocks as on others",
      seen[0].fit.opened, engine::thousands(o.longest).c_str(), engine::thousands(o.mebibytes).c_str(),
      seen[1].fit.opened, seen[1].name.c_str(), damage[1].kl, seen[2].fit.opened, seen[2].name.c_str(),
      damage[2].kl, seen[3].fit.opened, seen[3].name.c_str(), damage[3].kl);
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line(
      "Packed blocks beside f16: texts that fit, what they change, and that blocks are shared as before.",
      "quantized_kv");
  options o;
  o.common.type = "f16";
  o.common.block_size = 64;
  policies::add_options(line, o, true);
  line.add("--formats", o.formats, "three formats (docs/quant.md), from many bits to few");
  line.add("--prompt", o.prompt, "tokens that are read before the scored ones", 65, 4096);
  line.add("--score", o.score, "tokens whose predictions are compared", 2, 1024);
  line.add("--new", o.max_new, "tokens written after the prompt", 4, 1024);
  line.add("--mib", o.mebibytes, "memory that texts have to fit into", 64, 1 << 20);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
