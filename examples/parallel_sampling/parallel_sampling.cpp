// SPDX-License-Identifier: Apache-2.0
//
// parallel_sampling: several answers to one prompt, drawn at random (the `n` of a chat API). The prompt is
// computed once and then forked. A fork shares every block, also the last one, which is only partly filled;
// whoever writes into a shared block first gets a copy of it, and the last writer keeps the original:
//
//   prompt    | p p p p | p p p p | p p . . |
//   sample 0  |    "    |    "    | p p a a | a a . .      the original last block
//   sample 1  |    "    |    "    | p p b b | b b . .      a copy: n - 1 copies of one block each, or none
//   sample 2  |    "    |    "    | p p c c | c c . .      if the prompt ends where a block ends
//
// Each sample draws from a random stream of its own. So it must be the very text that the same seed gives
// when the prompt is sent alone, in memory shared with nobody: that run is made too, and compared.

#include <algorithm>
#include <chrono>

#include "example.hpp"
#include "sampling.hpp"
#include "scheduler.hpp"

namespace {

using engine::token_id;

struct options {
  engine::common_options common;
  std::string prompt =
      "Here is a note about a ferry. The ferry between the two towns has been running for a hundred and "
      "twenty years. It is painted white and green, it carries six cars and forty people, and it needs "
      "eleven minutes for the crossing, or thirteen when the tide is against it. The captain is called "
      "Marta. She knows every passenger by name, and in winter she brings coffee for those who stand on the "
      "deck. Next year a bridge is going to be opened. Write one sentence that the captain might say on the "
      "last day.";
  int samples = 4;
  int max_new = 32;
  double temperature = 0.8;
  std::uint64_t seed = 1;
};

/// One answer on its way.
struct sample {
  explicit sample(int sequence, std::uint64_t seed) : slot(sequence), random(seed) {}

  void draw(std::span<const float> logits, double temperature) {
    bits = engine::chain(bits, engine::fingerprint(logits));
    ids.push_back(engine::sample(logits, temperature, random));
  }

  int slot;
  engine::splitmix64 random;
  std::vector<token_id> ids;
  std::uint64_t bits = engine::chain_start;  // stands for all logits
};

struct outcome {
  std::vector<sample> samples;
  int computed = 0;          ///< prompt tokens
  std::int64_t blocks = 0;   ///< in use when all answers are complete
  std::int64_t copies = 0;   ///< blocks copied before a write
  std::int64_t entries = 0;  ///< of all block tables, to set against `blocks`
  double seconds = 0;
};

/// Opens a sequence, computes the prompt, and gives the logits that follow it.
engine::result<int> prefill(const options& o, engine::loaded& parts, engine::cache_kind& cache,
                            std::span<const token_id> prompt, const engine::cache_scope& scope,
                            std::vector<float>& logits) {
  const auto opened = cache.open(prompt, scope);
  if (!opened) return opened.error();
  const auto keep = [&](int, std::span<const float> row) { logits.assign(row.begin(), row.end()); };
  const auto rest = prompt.subspan(static_cast<std::size_t>(opened->reused));
  if (auto s =
          engine::feed(*parts.model, cache, opened->slot, rest, o.common.chunk, engine::observe::last, keep);
      !s)
    return s.error();
  return opened->slot;
}

/// One prefill, n - 1 forks, then all samples advance together: one row each per step.
engine::status sample_forked(const options& o, engine::loaded& parts, engine::cache_kind& cache,
                             std::span<const token_id> prompt, outcome& out) {
  std::vector<float> logits;
  const auto first = prefill(o, parts, cache, prompt, engine::cache_scope::everyone(), logits);
  if (!first) return first.error();
  out.computed = static_cast<int>(prompt.size());
  for (int i = 0; i < o.samples; ++i) {
    // All keys and values of the prompt are written by now, as fork requires: a copy may be taken from them
    // at any time.
    const auto slot = i == 0 ? *first : cache.fork(*first);
    if (!slot) return slot.error();
    out.samples.emplace_back(*slot, o.seed + static_cast<std::uint64_t>(i)).draw(logits, o.temperature);
  }
  std::vector<int> slots;
  for (const sample& s : out.samples) slots.push_back(s.slot);
  for (int step = 1; step < o.max_new; ++step) {
    std::vector<token_id> last;
    for (const sample& s : out.samples) last.push_back(s.ids.back());
    if (auto s = engine::advance(*parts.model, cache, slots, last, logits); !s) return s;
    for (std::size_t i = 0; i < out.samples.size(); ++i)
      out.samples[i].draw(engine::row_of(logits, *parts.model, i), o.temperature);
  }
  return {};
}

/// The same prompt n times, each in a scope of its own, so that nothing is found, and each advancing alone.
engine::status sample_apart(const options& o, engine::loaded& parts, engine::cache_kind& cache,
                            std::span<const token_id> prompt, outcome& out) {
  std::vector<float> logits;
  for (int i = 0; i < o.samples; ++i) {
    const auto alone = engine::cache_scope::only("sample " + std::to_string(i));
    const auto slot = prefill(o, parts, cache, prompt, alone, logits);
    if (!slot) return slot.error();
    out.computed += static_cast<int>(prompt.size());
    sample& s = out.samples.emplace_back(*slot, o.seed + static_cast<std::uint64_t>(i));
    s.draw(logits, o.temperature);
    for (int step = 1; step < o.max_new; ++step) {
      if (auto done = engine::advance(*parts.model, cache, {&s.slot, 1}, {&s.ids.back(), 1}, logits); !done)
        return done;
      s.draw(logits, o.temperature);
    }
  }
  return {};
}

engine::result<outcome> measure(const options& o, engine::loaded& parts, std::span<const token_id> prompt,
                                bool forked) {
  auto cache = engine::open_cache(o.common, parts, static_cast<int>(prompt.size()) + o.max_new, o.samples);
  if (!cache) return cache.error();
  outcome out;
  const auto start = std::chrono::steady_clock::now();
  const auto done = (forked ? sample_forked : sample_apart)(o, parts, **cache, prompt, out);
  if (!done) return done.error();
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  out.blocks = (*cache)->counts().blocks_used;
  out.copies = (*cache)->counts().copies;
  for (const sample& s : out.samples) {
    out.entries += ((*cache)->length(s.slot) + o.common.block_size - 1) / o.common.block_size;
    (*cache)->close(s.slot);
  }
  return out;
}

void check(const options& o, engine::report& out, const outcome& forked, const outcome& apart, int prompt) {
  bool equal = true;
  bool varied = false;
  for (std::size_t i = 0; i < forked.samples.size(); ++i) {
    equal = equal && forked.samples[i].ids == apart.samples[i].ids &&
            forked.samples[i].bits == apart.samples[i].bits;
    varied = varied || forked.samples[i].ids != forked.samples[0].ids;
  }
  const int block = o.common.block_size;
  const int full = prompt / block;                                // blocks that no sample ever writes to
  const int each = (prompt + o.max_new - 1 + block - 1) / block;  // the last token drawn is never computed
  const int copies = prompt % block == 0 || o.max_new == 1 ? 0 : o.samples - 1;
  out.claim("every sample is the text that its seed gives alone, from the same logits to the bit", equal);
  out.claim("the samples are not all the same", varied);
  out.claim("forked: the prompt's full blocks once, and each sample's own from there on",
            forked.blocks == full + (each - full) * o.samples);
  out.claim("apart: every block for each sample", apart.blocks == each * o.samples && apart.copies == 0);
  out.claim("one copied block for each sample but the last one to write", forked.copies == copies);
}

engine::result<std::string> run(const options& o, engine::report& out) {
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  const engine::chat_message message{"user", o.prompt};
  const auto prompt = (*parts)->text->encode_chat({&message, 1});
  if (!prompt) return prompt.error();
  const auto forked = measure(o, **parts, *prompt, true);
  if (!forked) return forked.error();
  const auto apart = measure(o, **parts, *prompt, false);
  if (!apart) return apart.error();

  for (const sample& s : forked->samples) {
    out.print("%s\n", engine::one_line((*parts)->text->decode(s.ids), 110).c_str());
    out.figures["samples"].push_back({{"ids", s.ids}, {"text", (*parts)->text->decode(s.ids)}});
  }
  out.print("\n%-34s %10s %10s\n", "", "forked", "apart");
  const auto row = [&](const char* name, const char* key, std::int64_t a, std::int64_t b) {
    out.print("%-34s %10s %10s\n", name, engine::thousands(a).c_str(), engine::thousands(b).c_str());
    out.figures["forked"][key] = a;
    out.figures["apart"][key] = b;
  };
  row("prompt tokens computed", "tokens_computed", forked->computed, apart->computed);
  row("entries in the block tables", "table_entries", forked->entries, apart->entries);
  row("blocks held", "blocks_held", forked->blocks, apart->blocks);
  row("blocks copied", "blocks_copied", forked->copies, apart->copies);
  out.print("%-34s %8.2f s %8.2f s\n\n", "time", forked->seconds, apart->seconds);
  out.figures["forked"]["seconds"] = forked->seconds;
  out.figures["apart"]["seconds"] = apart->seconds;
  check(o, out, *forked, *apart, static_cast<int>(prompt->size()));
  return engine::formatted(
      "%d samples of %zu + %d tokens in %s blocks instead of %s, %s of them copied; %s prompt tokens "
      "computed instead of %s; all texts equal to independent runs",
      o.samples, prompt->size(), o.max_new, engine::thousands(forked->blocks).c_str(),
      engine::thousands(apart->blocks).c_str(), engine::thousands(forked->copies).c_str(),
      engine::thousands(forked->computed).c_str(), engine::thousands(apart->computed).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("Several random answers to one prompt by forking it.", "parallel_sampling");
  options o;
  o.common.cache = "paged";
  engine::add_common_options(line, o.common);
  line.add("--prompt", o.prompt, "user message");
  line.add("--samples", o.samples, "answers", 1, 64);
  line.add("--new", o.max_new, "tokens of an answer", 1, 4096);
  line.add("--temperature", o.temperature, "0: greedy", 0.0, 100.0);
  line.add("--seed", o.seed, "of the first sample");
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
