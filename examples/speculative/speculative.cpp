// SPDX-License-Identifier: Apache-2.0
//
// speculative: several tokens per step, and still exactly the text of greedy decoding. A decode step costs
// almost the same for one row as for nine, because its time goes into reading the weights. So the program
// guesses how the text goes on, computes the guess as extra rows of the step, and keeps the part that greedy
// decoding would have chosen anyway (Leviathan, Kalman, Matias: Fast Inference from Transformers via
// Speculative Decoding, 2023, section 2). The guess needs no second model: the last words are looked up in
// the text so far, and what followed them then is the draft (Yang et al.: Inference with Reference, 2023,
// arXiv 2304.04487).
//
//   text    ... the lamp was lit at dusk. [...] the lamp was      "the lamp was" occurred before
//   rows    was | lit   at    dawn                                one certain token and three guesses
//   greedy  lit   at    dusk  ...                                 two are right: keep 3 rows, take back 1
//
// For the cache: draft(n) hands out slots that do not count yet, accept(k) keeps the first k and takes the
// rest back. Only what is accepted can be committed, so no other request ever meets a rejected token. (In the
// library these are sequence.extend(n, true) and sequence.accept(k).)

#include <algorithm>
#include <chrono>
#include <numeric>

#include "example.hpp"
#include "sampling.hpp"
#include "scheduler.hpp"

namespace {

using engine::token_id;

struct options {
  engine::common_options common;
  int draft = 8;  ///< most tokens guessed per step
  int match = 3;  ///< longest run of last tokens that is looked up
  int max_new = 48;
};

/// One text that repeats itself and one that does not: guessing pays where texts repeat, as in quotations,
/// corrected code or a form filled in.
struct task {
  const char* name;
  bool chat;
  const char* text;
};
constexpr task tasks[] = {
    {"copy", false,
     "The first ledger begins on the third of March. Wind from the north-west, moderate. Lamp lit at 5:52. "
     "Two ships seen, one schooner and one collier. Repaired the hinge of the store door. The boy from the "
     "farm asked how far the light can be seen. I told him eighteen miles. He asked who had measured it. I "
     "could not say.\n\nA fair copy "
     "of the same page:\n\nThe first ledger begins on the third of March. Wind"},
    {"story", true, "Write a short story about a lighthouse keeper and a storm."},
};

engine::result<std::vector<token_id>> tokens_of(const task& what, const engine::tokenizer& text) {
  if (!what.chat) return text.encode(what.text, engine::specials::as_text);
  const engine::chat_message message{"user", what.text};
  return text.encode_chat({&message, 1});
}

/// What followed the most recent earlier occurrence of the last tokens of `text`; longer runs are tried
/// first, since they are less often a coincidence. Empty when even the last token is new. Cost: O(text),
/// nothing beside a step of the model.
std::vector<token_id> look_up(std::span<const token_id> text, int longest, int most) {
  for (auto run = static_cast<std::size_t>(longest); run >= 2 && most > 0; --run) {
    if (text.size() <= run) continue;
    const auto last = text.last(run);
    for (std::size_t at = text.size() - run; at-- > 0;) {
      if (!std::equal(last.begin(), last.end(), text.begin() + static_cast<std::ptrdiff_t>(at))) continue;
      const auto after = text.subspan(at + run);
      const auto count = static_cast<std::ptrdiff_t>(std::min(after.size(), static_cast<std::size_t>(most)));
      return {after.begin(), after.begin() + count};
    }
  }
  return {};
}

struct speculation {
  std::vector<token_id> ids;
  std::uint64_t bits = engine::chain_start;  // stands for all logits that chose a token
  int steps = 0;
  int drafted = 0;
  int accepted = 0;
  double seconds = 0;
};

/// A sequence that is continued with drafts.
class writer {
 public:
  writer(const options& o, engine::loaded& parts, engine::cache_kind& cache, int slot,
         std::span<const token_id> prompt)
      : o_(o), model_(*parts.model), cache_(cache), slot_(slot), text_(prompt.begin(), prompt.end()) {}

  engine::result<speculation> write(std::size_t reused) {
    const auto choose = [&](int, std::span<const float> logits) { take(logits); };
    const auto rest = std::span<const token_id>(text_).subspan(reused);
    const std::vector<token_id> copy(rest.begin(), rest.end());  // take() adds to text_
    if (auto s = engine::feed(model_, cache_, slot_, copy, o_.common.chunk, engine::observe::last, choose);
        !s)
      return s.error();
    const auto start = std::chrono::steady_clock::now();
    while (left() > 0) {
      if (auto s = step(); !s) return s.error();
    }
    out_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    // The last token was chosen but never computed, so it is not in the cache.
    if (auto s = cache_.commit(slot_, std::span(text_).first(text_.size() - 1)); !s) return s.error();
    return out_;
  }

 private:
  int left() const { return o_.max_new - static_cast<int>(out_.ids.size()); }

  void take(std::span<const float> logits) {
    out_.bits = engine::chain(out_.bits, engine::fingerprint(logits));
    out_.ids.push_back(engine::greedy(logits));
    text_.push_back(out_.ids.back());
  }

  engine::status step() {
    // Each step yields one token more than it accepts, hence the −1: never guess beyond the end.
    std::vector<token_id> guess = look_up(text_, o_.match, std::min(o_.draft, left() - 1));
    const auto room = cache_.draft(slot_, 1 + static_cast<int>(guess.size()));
    if (!room) return room.error();
    // A packed block is not taken back: its last token goes alone, for certain.
    const bool certain = *room == 0;
    if (certain) {
      if (auto s = cache_.extend(slot_, 1); !s) return s.error();
    }
    const int rows = certain ? 1 : *room;
    guess.resize(static_cast<std::size_t>(rows) - 1);
    std::vector<token_id> tokens{text_.back()};
    tokens.insert(tokens.end(), guess.begin(), guess.end());

    // One step over the certain token and the guess. Each row sees only what is before it, so row i holds the
    // logits that plain decoding would have had after the same i tokens.
    const engine::step_segment segment{slot_, cache_.length(slot_), rows};
    std::vector<int> all(tokens.size());
    std::iota(all.begin(), all.end(), 0);
    logits_.resize(tokens.size() * static_cast<std::size_t>(model_.shape().vocabulary));
    if (auto s = model_.forward(tokens, {&segment, 1}, all, cache_.backend(), logits_); !s) return s;

    // Row 0 follows a certain token, so its choice stands. While that choice is what was guessed, the next
    // row was computed from the right text and its choice stands as well.
    std::size_t right = 0;
    take(engine::row_of(logits_, model_, 0));
    while (right < guess.size() && out_.ids.back() == guess[right])
      take(engine::row_of(logits_, model_, ++right));
    ++out_.steps;
    out_.drafted += static_cast<int>(guess.size());
    out_.accepted += static_cast<int>(right);
    return certain ? engine::status() : cache_.accept(slot_, 1 + static_cast<int>(right));
  }

  const options& o_;
  engine::llama_model& model_;
  engine::cache_kind& cache_;
  int slot_;
  std::vector<token_id> text_;
  std::vector<float> logits_;
  speculation out_;
};

struct comparison {
  speculation guessed;
  engine::recorded plain;
  bool leaves_no_trace = false;
};

engine::result<comparison> compare(const options& o, engine::loaded& parts, const task& what) {
  auto prompt = tokens_of(what, *parts.text);
  if (!prompt) return prompt.error();
  constexpr int more = 4;
  auto cache = engine::open_cache(o.common, parts, static_cast<int>(prompt->size()) + o.max_new + more, 2);
  if (!cache) return cache.error();
  const auto mine = engine::cache_scope::only("speculative");
  const auto other = engine::cache_scope::only("plain");

  comparison out;
  const auto opened = (*cache)->open(*prompt, mine);
  if (!opened) return opened.error();
  {
    const engine::open_slot sequence(**cache, opened->slot);
    auto made =
        writer(o, parts, **cache, opened->slot, *prompt).write(static_cast<std::size_t>(opened->reused));
    if (!made) return made.error();
    out.guessed = std::move(*made);
  }
  auto plain = engine::record(parts, **cache, *prompt, other, o.max_new, o.common.chunk);
  if (!plain) return plain.error();
  out.plain = std::move(*plain);

  // The text goes on twice, once on blocks that saw drafts come and go, once on blocks that did not.
  prompt->insert(prompt->end(), out.guessed.ids.begin(), out.guessed.ids.end());
  auto after_drafts = engine::record(parts, **cache, *prompt, mine, more, o.common.chunk);
  if (!after_drafts) return after_drafts.error();
  auto after_plain = engine::record(parts, **cache, *prompt, other, more, o.common.chunk);
  if (!after_plain) return after_plain.error();
  out.leaves_no_trace = after_drafts->same_answer(*after_plain) && after_drafts->made.reused > 0 &&
                        after_drafts->made.reused == after_plain->made.reused;
  return out;
}

engine::result<std::string> run(const options& o, engine::report& out) {
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  out.print("%-8s %7s %6s %12s %8s %9s %16s %12s\n", "task", "tokens", "steps", "tokens/step", "drafted",
            "accepted", "ms/token, plain", "with drafts");
  std::string last;
  for (const task& what : tasks) {
    auto made = compare(o, **parts, what);
    if (!made) return made.error();
    const speculation& g = made->guessed;
    // The first token comes from the prompt and needs no decode step, with drafts or without.
    const auto decoded = static_cast<double>(std::max<std::size_t>(1, g.ids.size() - 1));
    const double per_step = decoded / std::max(1, g.steps);
    const double share = g.drafted > 0 ? 100.0 * g.accepted / g.drafted : 0.0;
    const double plain_ms = 1e3 * made->plain.made.decode_seconds / decoded;
    out.print("%-8s %7zu %6d %12.2f %8d %8.0f%% %16.1f %12.1f\n", what.name, g.ids.size(), g.steps, per_step,
              g.drafted, share, plain_ms, 1e3 * g.seconds / decoded);
    out.print("    %s\n", engine::one_line((*parts)->text->decode(g.ids), 100).c_str());
    const std::string name = what.name;
    out.claim(name + ": the tokens of plain greedy decoding, from the same logits to the bit",
              g.ids == made->plain.made.ids && g.bits == made->plain.bits);
    out.claim(name + ": what was accepted serves a later request like any other prefix",
              made->leaves_no_trace);
    out.claim(name + ": every step keeps what it accepted and one token more",
              g.steps + g.accepted == decoded);
    out.figures[name] = {{"ids", g.ids},
                         {"steps", g.steps},
                         {"tokens_per_step", per_step},
                         {"drafted", g.drafted},
                         {"accepted", g.accepted},
                         {"plain_decode_seconds", made->plain.made.decode_seconds},
                         {"decode_seconds", g.seconds}};
    last += engine::formatted("%s%s %.2f tokens per step (%.0f %% of %d drafted tokens accepted)",
                              last.empty() ? "" : ", ", what.name, per_step, share, g.drafted);
    if (&what == tasks) out.claim("where the text repeats, steps are saved", g.steps < decoded);
  }
  return last + "; both texts exactly those of plain greedy decoding";
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line(
      "Greedy decoding with drafts looked up in the text, exactly equal to plain greedy decoding.",
      "speculative");
  options o;
  o.common.cache = "paged";
  engine::add_common_options(line, o.common);
  line.add("--draft", o.draft, "most tokens guessed per step", 0, 256);
  line.add("--match", o.match, "longest run of last tokens that is looked up", 2, 64);
  line.add("--new", o.max_new, "tokens of an answer", 2, 4096);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
