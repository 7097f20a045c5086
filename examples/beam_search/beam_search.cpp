// SPDX-License-Identifier: Apache-2.0
//
// beam_search: the most likely continuation among several that are followed at the same time. After each step
// the best candidates are chosen among all children of all beams, so one beam may have several children and
// another none. A cache that gives each beam memory of its own has to copy the whole text of a beam for every
// child; here a child is a change of the block table:
//
//   beam 0  | p p p p | a a |          beam 0  | p p p p | a a |    stays
//   beam 1  | p p p p | b b |   ──>    beam 1  | p p p p | a a |    assign(1, 0) changes one entry
//   beam 2  | p p p p | c c |          beam 2  | p p p p | c c |    stays
//
// `p` are the blocks of the prompt, which all beams share. The last block is shared after an assign too,
// until one of the two writes: the writer gets a copy of that one block.
//
// How do we know that the result is right? Two checks. Every beam is scored again from an empty cache, alone;
// the score must be the same number to the bit. And on a small case the search is provably complete: with v
// tokens to choose from and a width of v^(depth-1), no candidate is ever dropped before the last step, so the
// beams must be the best of all v^depth texts, which are scored one by one.

#include <cmath>

#include "searcher.hpp"

namespace {

using beams::beam;
using beams::better;
using beams::candidates;
using beams::outcome;
using beams::step_cost;
using engine::token_id;

struct options {
  engine::common_options common;
  std::string prompt =
      "The keeper of the lighthouse wrote down everything that happened on the rock: the weather, the ships, "
      "the oil that was burnt, and every visitor. On the last page of the last book he wrote:";
  int width = 4;
  int depth = 24;
  int small_vocabulary = 3;
  int small_depth = 3;
};

/// The `count` most likely tokens that do not end the text: all beams then have the same length, and their
/// scores can be compared as they are. No child beyond the `width` best of its beam can be among the `width`
/// best of all.
candidates most_likely(int count, const engine::tokenizer& text) {
  return [count, &text](std::span<const float> logits) {
    std::vector<token_id> ids;
    for (const auto& [id, logit] : engine::largest(logits, count + 8)) {
      if (!text.is_stop(id) && static_cast<int>(ids.size()) < count) ids.push_back(id);
    }
    return ids;
  };
}

/// The score of one continuation, computed alone in memory that was never shared.
engine::result<double> score_alone(const options& o, engine::loaded& parts, std::span<const token_id> prompt,
                                   const std::vector<token_id>& ids) {
  engine::common_options cold = o.common;
  cold.cache = "contiguous";
  std::vector<token_id> text(prompt.begin(), prompt.end());
  text.insert(text.end(), ids.begin(), ids.end() - 1);
  auto cache = engine::open_cache(cold, parts, static_cast<int>(text.size()));
  if (!cache) return cache.error();
  const auto opened = (*cache)->open(text, engine::cache_scope::only("alone"));
  if (!opened) return opened.error();
  const engine::open_slot slot(**cache, opened->slot);
  double score = 0;
  const auto add = [&](int position, std::span<const float> logits) {
    const std::size_t next = static_cast<std::size_t>(position) + 1;
    if (next < prompt.size()) return;
    score += logits[static_cast<std::size_t>(ids[next - prompt.size()])] - engine::log_sum_exp(logits);
  };
  if (auto s =
          engine::feed(*parts.model, **cache, slot.slot(), text, o.common.chunk, engine::observe::all, add);
      !s)
    return s.error();
  return score;
}

engine::result<outcome> search(const options& o, engine::loaded& parts, std::span<const token_id> prompt,
                               int width, int depth, candidates choose) {
  auto cache = engine::open_cache(o.common, parts, static_cast<int>(prompt.size()) + depth, width);
  if (!cache) return cache.error();
  return beams::searcher(*parts.model, **cache, std::move(choose), width).run(prompt, depth, o.common.chunk);
}

/// All texts of `depth` tokens over a few tokens, scored one by one.
engine::result<std::vector<beam>> enumerate(const options& o, engine::loaded& parts,
                                            std::span<const token_id> prompt,
                                            const std::vector<token_id>& vocabulary, int depth) {
  std::vector<beam> all{{}};
  for (int i = 0; i < depth; ++i) {
    std::vector<beam> longer;
    for (const beam& b : all) {
      for (const token_id id : vocabulary) {
        longer.push_back(b);
        longer.back().ids.push_back(id);
      }
    }
    all = std::move(longer);
  }
  for (beam& b : all) {
    const auto score = score_alone(o, parts, prompt, b.ids);
    if (!score) return score.error();
    b.score = *score;
  }
  std::sort(all.begin(), all.end(), better);
  return all;
}

/// The small case: the search against the enumeration. Returns how many texts were enumerated.
engine::result<std::size_t> check_small(const options& o, engine::loaded& parts,
                                        std::span<const token_id> prompt,
                                        const std::vector<token_id>& vocabulary, engine::report& out) {
  auto all = enumerate(o, parts, prompt, vocabulary, o.small_depth);
  if (!all) return all.error();
  const int complete = static_cast<int>(all->size() / vocabulary.size());
  auto found =
      search(o, parts, prompt, complete, o.small_depth, [&](std::span<const float>) { return vocabulary; });
  if (!found) return found.error();
  const auto equal = [](const beam& a, const beam& b) { return a.ids == b.ids && a.score == b.score; };
  out.claim("a width of " + std::to_string(complete) + " finds the best " + std::to_string(complete) +
                " of all " + std::to_string(all->size()) + " texts of " + std::to_string(o.small_depth) +
                " tokens out of " + std::to_string(vocabulary.size()) + ", with the same scores to the bit",
            found->beams.size() == static_cast<std::size_t>(complete) &&
                std::equal(found->beams.begin(), found->beams.end(), all->begin(), equal));
  return all->size();
}

void print_search(engine::report& out, const engine::loaded& parts, const outcome& found, double greedy) {
  for (const beam& b : found.beams) {
    out.print("%10.4f  %s\n", b.score, engine::one_line(parts.text->decode(b.ids), 96).c_str());
    out.figures["beams"].push_back({{"ids", b.ids}, {"log_probability", b.score}});
  }
  out.print("%10.4f  is what greedy decoding reaches\n\ntable entries changed per step:", greedy);
  for (const step_cost& c : found.steps) {
    out.print(" %d", c.entries);
    out.figures["steps"].push_back(
        {{"reassigned", c.reassigned}, {"entries", c.entries}, {"copies", c.copies}});
  }
  out.print("\n\n");
}

engine::result<std::string> run(const options& o, engine::report& out) {
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  const auto prompt = (*parts)->text->encode(o.prompt, engine::specials::as_text);
  if (prompt.empty()) return engine::bad_input("bad_value", "--prompt", "no tokens");
  const engine::tokenizer& text = *(*parts)->text;
  auto found = search(o, **parts, prompt, o.width, o.depth, most_likely(o.width, text));
  if (!found) return found.error();
  const auto greedy = search(o, **parts, prompt, 1, o.depth, most_likely(1, text));
  if (!greedy) return greedy.error();
  print_search(out, **parts, *found, greedy->beams.front().score);

  step_cost sum;
  std::int64_t moved = 0;  // tokens that a cache without sharing copies for the same reassignments
  bool one_block_each = true;
  for (std::size_t i = 0; i < found->steps.size(); ++i) {
    const step_cost& c = found->steps[i];
    sum.entries += c.entries;
    sum.reassigned += c.reassigned;
    sum.copies += c.copies;
    moved += c.reassigned * static_cast<std::int64_t>(prompt.size() + i);
    one_block_each = one_block_each && c.copies < o.width;
  }
  bool same = true;
  for (const beam& b : found->beams) {
    const auto alone = score_alone(o, **parts, prompt, b.ids);
    if (!alone) return alone.error();
    same = same && *alone == b.score;
  }
  const int block = o.common.block_size;
  const auto shared = static_cast<int>(prompt.size()) / block;
  const int each = (static_cast<int>(prompt.size()) + o.depth - 1 + block - 1) / block;
  out.claim("every beam has the score of the same text alone in an empty cache, to the bit", same);
  out.claim("the blocks of the prompt are stored once", found->blocks <= shared + o.width * (each - shared));
  out.claim("no step copies more than one block per beam that shares its last one", one_block_each);
  out.claim("beams were reassigned", sum.reassigned > 0);
  const auto vocabulary = most_likely(o.small_vocabulary, text)(greedy->first_logits);
  const auto enumerated = check_small(o, **parts, prompt, vocabulary, out);
  if (!enumerated) return enumerated.error();

  out.figures["greedy_log_probability"] = greedy->beams.front().score;
  out.figures["blocks_held"] = found->blocks;
  out.figures["blocks_of_separate_beams"] = o.width * each;
  out.figures["tokens_moved_without_sharing"] = moved;
  out.figures["texts_enumerated"] = *enumerated;
  char last[320];
  std::snprintf(
      last, sizeof last,
      "%d reassignments of %d beams changed %d table entries and copied %s blocks instead of %s tokens, %s "
      "blocks held instead of %d; best log-probability %.3f (greedy %.3f); equal to all %zu texts of the "
      "small case",
      sum.reassigned, o.width, sum.entries, engine::thousands(sum.copies).c_str(),
      engine::thousands(moved).c_str(), engine::thousands(found->blocks).c_str(), o.width * each,
      found->beams.front().score, greedy->beams.front().score, *enumerated);
  return std::string(last);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Beam search over one cache: beams share blocks and are reordered by changing tables.",
               "beam_search");
  options o;
  o.common.cache = "paged";
  engine::add_common_options(app, o.common);
  app.add_option("--prompt", o.prompt, "text to continue")->capture_default_str();
  app.add_option("--width", o.width, "beams")->check(CLI::Range(2, 64))->capture_default_str();
  app.add_option("--depth", o.depth, "tokens of a beam")->check(CLI::Range(1, 1024))->capture_default_str();
  app.add_option("--small-vocabulary", o.small_vocabulary, "tokens of the small case")
      ->check(CLI::Range(2, 8))
      ->capture_default_str();
  app.add_option("--small-depth", o.small_depth, "length of the small case")
      ->check(CLI::Range(1, 4))
      ->capture_default_str();
  return engine::run_example(app, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
