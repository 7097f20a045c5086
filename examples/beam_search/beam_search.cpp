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
// How do we know that the result is right? Every beam is scored again from an empty cache, alone; the score
// must be the same number to the bit. And on a small case all texts there are get scored, one by one. With v
// tokens to choose from and a width of v^(depth-1) the search drops no candidate before the last step, so it
// must find the best of all v^depth texts; with fewer beams it must follow the same choices among scores that
// are looked up.

#include <algorithm>
#include <map>

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

/// The scores of a continuation after each of its tokens, computed alone in memory that was never shared.
engine::result<std::vector<double>> score_alone(const options& o, engine::loaded& parts,
                                                std::span<const token_id> prompt,
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
  std::vector<double> scores;
  const auto add = [&](int position, std::span<const float> logits) {
    const std::size_t next = static_cast<std::size_t>(position) + 1;
    if (next < prompt.size()) return;
    const auto id = static_cast<std::size_t>(ids[next - prompt.size()]);
    scores.push_back((scores.empty() ? 0 : scores.back()) + (logits[id] - engine::log_sum_exp(logits)));
  };
  if (auto s =
          engine::feed(*parts.model, **cache, slot.slot(), text, o.common.chunk, engine::observe::all, add);
      !s)
    return s.error();
  return scores;
}

engine::result<outcome> search(const options& o, engine::loaded& parts, std::span<const token_id> prompt,
                               int width, int depth, candidates choose) {
  auto cache = engine::open_cache(o.common, parts, static_cast<int>(prompt.size()) + depth, width);
  if (!cache) return cache.error();
  return beams::searcher(*parts.model, **cache, std::move(choose), width).run(prompt, depth, o.common.chunk);
}

/// The score of every text of up to `depth` tokens over a few tokens, each computed by itself.
using score_table = std::map<std::vector<token_id>, double>;

engine::result<score_table> enumerate(const options& o, engine::loaded& parts,
                                      std::span<const token_id> prompt,
                                      const std::vector<token_id>& vocabulary, int depth) {
  std::vector<std::vector<token_id>> texts{{}};
  for (int i = 0; i < depth; ++i) {
    std::vector<std::vector<token_id>> longer;
    for (const auto& text : texts) {
      for (const token_id id : vocabulary) longer.emplace_back(text).push_back(id);
    }
    texts = std::move(longer);
  }
  score_table table;
  for (const auto& text : texts) {
    const auto scores = score_alone(o, parts, prompt, text);
    if (!scores) return scores.error();
    for (std::size_t i = 0; i < scores->size(); ++i)
      table[{text.begin(), text.begin() + static_cast<std::ptrdiff_t>(i + 1)}] = (*scores)[i];
  }
  return table;
}

/// The best `width` texts of `length` tokens in the table, of those whose beginning is in `from`.
std::vector<beam> best_of(const score_table& table, std::size_t length, std::size_t width,
                          const std::vector<beam>* from) {
  std::vector<beam> out;
  for (const auto& [ids, score] : table) {
    const auto parent = [&ids = ids](const beam& b) {
      return std::equal(b.ids.begin(), b.ids.end(), ids.begin());
    };
    if (ids.size() == length && (from == nullptr || std::any_of(from->begin(), from->end(), parent)))
      out.push_back({ids, score});
  }
  std::sort(out.begin(), out.end(), better);
  if (out.size() > width) out.resize(width);
  return out;
}

/// The small case: searches against the table of all texts. Returns how many texts of full length it holds.
engine::result<std::size_t> check_small(const options& o, engine::loaded& parts,
                                        std::span<const token_id> prompt,
                                        const std::vector<token_id>& vocabulary, engine::report& out) {
  const auto depth = static_cast<std::size_t>(o.small_depth);
  const auto table = enumerate(o, parts, prompt, vocabulary, o.small_depth);
  if (!table) return table.error();
  const std::vector<beam> all = best_of(*table, depth, table->size(), nullptr);
  const std::size_t complete = all.size() / vocabulary.size();
  const auto finds = [&](std::size_t width, const std::vector<beam>& expected) -> engine::result<bool> {
    const auto found = search(o, parts, prompt, static_cast<int>(width), o.small_depth,
                              [&](std::span<const float>) { return vocabulary; });
    if (!found) return found.error();
    return std::equal(found->beams.begin(), found->beams.end(), expected.begin(), expected.end(),
                      [](const beam& a, const beam& b) { return a.ids == b.ids && a.score == b.score; });
  };
  const auto best = finds(complete, {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(complete)});
  if (!best) return best.error();
  const std::string texts = std::to_string(all.size()) + " texts of " + std::to_string(depth) + " tokens";
  out.claim("a width of " + std::to_string(complete) + " finds the best of all " + texts +
                ", with the same scores to the bit",
            *best);
  // With fewer beams candidates are dropped on the way; which ones, the table tells as well.
  std::vector<beam> kept{{}};
  for (std::size_t length = 1; length <= depth; ++length)
    kept = best_of(*table, length, static_cast<std::size_t>(o.width), &kept);
  const auto followed = finds(static_cast<std::size_t>(o.width), kept);
  if (!followed) return followed.error();
  out.claim("a width of " + std::to_string(o.width) + " keeps in every step the best that the table has",
            *followed);
  return all.size();
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

struct totals : step_cost {
  std::int64_t moved = 0;   ///< tokens that a cache without sharing copies for the same reassignments
  int separate_blocks = 0;  ///< that the beams would hold if they shared nothing
};

/// The search on the whole vocabulary: every beam against itself alone, and what the cache did for it.
engine::result<totals> check_search(const options& o, engine::loaded& parts, std::span<const token_id> prompt,
                                    const outcome& found, engine::report& out) {
  totals sum;
  bool one_block_each = true;
  for (std::size_t i = 0; i < found.steps.size(); ++i) {
    const step_cost& c = found.steps[i];
    sum.entries += c.entries;
    sum.reassigned += c.reassigned;
    sum.copies += c.copies;
    sum.moved += c.reassigned * static_cast<std::int64_t>(prompt.size() + i);
    one_block_each = one_block_each && c.copies < o.width;
  }
  bool same = true;
  for (const beam& b : found.beams) {
    const auto alone = score_alone(o, parts, prompt, b.ids);
    if (!alone) return alone.error();
    same = same && alone->back() == b.score;
  }
  const int block = o.common.block_size;
  const auto shared = static_cast<int>(prompt.size()) / block;
  const int each = (static_cast<int>(prompt.size()) + o.depth - 1 + block - 1) / block;
  sum.separate_blocks = o.width * each;
  out.claim("every beam has the score of the same text alone in an empty cache, to the bit", same);
  out.claim("the blocks of the prompt are stored once", found.blocks <= shared + o.width * (each - shared));
  out.claim("no step copies more than one block per beam that shares its last one", one_block_each);
  out.claim("beams were reassigned", sum.reassigned > 0);
  return sum;
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

  const auto total = check_search(o, **parts, prompt, *found, out);
  if (!total) return total.error();
  const auto vocabulary = most_likely(o.small_vocabulary, text)(greedy->first_logits);
  const auto enumerated = check_small(o, **parts, prompt, vocabulary, out);
  if (!enumerated) return enumerated.error();

  out.figures["greedy_log_probability"] = greedy->beams.front().score;
  out.figures["blocks_held"] = found->blocks;
  out.figures["blocks_of_separate_beams"] = total->separate_blocks;
  out.figures["tokens_moved_without_sharing"] = total->moved;
  out.figures["texts_enumerated"] = *enumerated;
  return engine::formatted(
      "%d reassignments of %d beams changed %d table entries and copied %s blocks instead of %s tokens, %s "
      "blocks held instead of %d; best log-probability %.3f (greedy %.3f); equal to all %zu texts of the "
      "small case",
      total->reassigned, o.width, total->entries, engine::thousands(total->copies).c_str(),
      engine::thousands(total->moved).c_str(), engine::thousands(found->blocks).c_str(),
      total->separate_blocks, found->beams.front().score, greedy->beams.front().score, *enumerated);
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line(
      "Beam search over one cache: beams share blocks and are reordered by changing tables.", "beam_search");
  options o;
  o.common.cache = "paged";
  engine::add_common_options(line, o.common);
  line.add("--prompt", o.prompt, "text to continue");
  line.add("--width", o.width, "beams", 2, 64);
  line.add("--depth", o.depth, "tokens of a beam", 1, 1024);
  line.add("--small-vocabulary", o.small_vocabulary, "tokens of the small case", 2, 8);
  line.add("--small-depth", o.small_depth, "length of the small case", 1, 4);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
