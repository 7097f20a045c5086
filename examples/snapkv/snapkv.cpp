// SPDX-License-Identifier: Apache-2.0
//
// snapkv: a long prompt that is compressed where it ends (Li et al.: SnapKV, LLM Knows What You are Looking
// for Before Generation, 2024, section 4). The last queries of the prompt vote on what stays, so everything
// depends on whether the question is among them:
//
//   inside   | document ..................... question |  compress  | answer        the question votes
//   after    | document ............ |  compress  | question | answer               it comes too late
//                                    └── fork: two questions to one prefill
//
// The document hides two keys, and each of them is asked for. A policy that was tested with the question
// inside and is used for a document that is kept between questions fails in silence. The second part is about
// memory: what compression gives back, and that it can also cost memory, where others read the same prefix.

#include <algorithm>

#include "generators.hpp"
#include "policies.hpp"
#include "sampling.hpp"

namespace {

using policies::token_id;

struct options : policies::options {
  std::string policy = "snapkv:capacity=252,window=32,kernel=7";
  int sentences = 38;
  int trials = 4;
};

/// One question to a document, and the five digits that answer it.
struct question {
  std::vector<token_id> ask, answer;
};

/// The last four digits are scored: the first is known before a prompt that ends with the question is
/// compressed.
struct score {
  double nll = 0;
  int right = 0;  // questions of which every digit was the most likely one
};

engine::status ask(const policies::world& w, const engine::session& held, std::span<const token_id> feed,
                   const question& q, score& to) {
  const auto got = policies::ask(w, held, feed, q.answer, true);
  if (!got) return got.error();
  to.nll += got->nll;
  to.right += got->right ? 1 : 0;
  return {};
}

struct document {
  std::vector<token_id> tokens;
  std::vector<question> questions;
};

/// A text with a red and a blue key, and the questions for both.
document make_document(const options& o, const engine::tokenizer& text, int trial) {
  const auto encode = [&](const std::string& s) { return text.encode(s, engine::specials::parse); };
  const lab::prompt_text made =
      lab::two_keys(static_cast<std::uint64_t>(1000 + trial), o.sentences, 100 + 200 * (trial % 5));
  document d;
  d.tokens = encode(made.context);
  const bool red_asked = made.question.find("red") != std::string::npos;
  for (const std::string colour : {"red", "blue"}) {
    std::string ask = made.question;
    const std::string other = red_asked ? "red" : "blue";
    for (std::size_t at = ask.find(other); at != std::string::npos; at = ask.find(other, at + colour.size()))
      ask.replace(at, other.size(), colour);
    const std::string before = "The " + colour + " pass key is ";
    d.questions.push_back(
        {encode(ask), encode(made.context.substr(made.context.find(before) + before.size(), 5))});
  }
  return d;
}

struct scores {
  score full, inside, after, window;
  std::size_t held = 0, of = 0;
};

engine::status run_trial(const options& o, const policies::world& w, const document& d, scores& to) {
  auto base = policies::begin(w, "full", {.chunk = o.common.chunk, .remember = true});
  if (!base) return base.error();
  if (auto s = base->feed(d.tokens, engine::observe::last); !s) return s.error();
  const auto after = policies::compressed(*base, o.policy);
  if (!after) return after.error();
  to.held = after->bytes_held();
  to.of = base->bytes_held();
  const auto window = policies::compressed(*base, "window:" + std::to_string(after->kept(0, 0).size()));
  if (!window) return window.error();
  for (const question& q : d.questions) {
    if (auto s = ask(w, *base, q.ask, q, to.full); !s) return s;
    if (auto s = ask(w, *after, q.ask, q, to.after); !s) return s;
    if (auto s = ask(w, *window, q.ask, q, to.window); !s) return s;
    auto asked = base->fork();
    if (!asked) return asked.error();
    if (auto s = asked->feed(q.ask, engine::observe::last); !s) return s.error();
    const auto inside = policies::compressed(*asked, o.policy);
    if (!inside) return inside.error();
    if (auto s = ask(w, *inside, {}, q, to.inside); !s) return s;
  }
  return {};
}

/// What compression does to the memory of all.
engine::result<std::string> show_memory(const options& o, engine::report& out, const policies::world& w,
                                        const document& d) {
  const auto everyone = engine::cache_scope::everyone();
  const auto read = [&](const std::string& policy, const engine::session_options& how) {
    auto s = policies::begin(w, policy, how);
    if (!s) return s;
    const auto rest = std::span(d.tokens).subspan(static_cast<std::size_t>(s->reused()));
    if (auto fed = s->feed(rest, engine::observe::last); !fed)
      return engine::result<engine::session>(fed.error());
    return s;
  };
  std::size_t alone = 0;
  {
    auto own = read(o.policy, {.at_a_loss = false});
    if (!own) return own.error();
    alone = w.cache->bytes_used();
    if (auto s = own->compress(); !s) return s.error();
    out.claim("alone, compression gives the blocks back that it does not fill",
              own->bytes_held() < alone && w.cache->bytes_used() == own->bytes_held());
    alone -= w.cache->bytes_used();
  }
  auto reader = read("full", {.scope = everyone});
  if (!reader) return reader.error();
  if (auto s = reader->commit(d.tokens); !s) return s.error();
  const std::size_t before = w.cache->bytes_used();
  auto refused = read(o.policy, {.scope = everyone, .prompt = d.tokens, .at_a_loss = false});
  if (!refused) return refused.error();
  const auto at_a_loss = refused->compress();
  out.claim("beside a reader of the same prefix there is nothing to give back: refused, nothing dropped",
            !at_a_loss && at_a_loss.error().code == "no_gain" && refused->dropped() == 0);
  auto told = read(o.policy, {.scope = everyone, .prompt = d.tokens, .at_a_loss = true});
  if (!told) return told.error();
  const int window = engine::parse_policy(o.policy)->policy.must_recompute();
  out.claim("of a cached prompt all is reused but what the policy must see",
            told->reused() > 0 && told->reused() <= static_cast<int>(d.tokens.size()) - window);
  if (auto s = told->compress(); !s) return s.error();
  const std::size_t cost = told->bytes_held();
  const auto third = policies::begin(w, "full", {.scope = everyone, .prompt = d.tokens});
  if (!third) return third.error();
  out.claim("told otherwise, it copies what it keeps, and the prefix is there for the next reader as before",
            told->dropped() > 0 && w.cache->bytes_used() > before &&
                third->reused() >= static_cast<int>(d.tokens.size()) - o.common.block_size);
  out.figures["bytes"] = {{"given_back_alone", alone}, {"copied_beside_a_reader", cost}};
  return policies::mebibytes(alone) + " given back alone, " + policies::mebibytes(cost) +
         " copied beside a reader";
}

engine::result<std::string> run(const options& o, engine::report& out) {
  const auto w = policies::open_world(o, 0, 4096, 8);
  if (!w) return w.error();
  scores total;
  for (int trial = 0; trial < o.trials; ++trial) {
    if (auto s = run_trial(o, *w, make_document(o, *w->parts->text, trial), total); !s) return s.error();
  }
  const int questions = 2 * o.trials;
  out.print("%-48s %10s %10s %12s\n", "", "right", "NLL", "held");
  const std::tuple<const char*, const score*, std::size_t> rows[] = {
      {"full cache", &total.full, total.of},
      {"question inside the compressed prompt", &total.inside, total.held},
      {"question after compression", &total.after, total.held},
      {"window of as many tokens, question after", &total.window, total.held}};
  for (const auto& [name, s, bytes] : rows) {
    out.print("%-48s %7d/%-2d %10.3f %12s\n", name, s->right, questions, s->nll / questions,
              policies::mebibytes(bytes).c_str());
    out.figures["questions"].push_back(
        {{"case", name}, {"right", s->right}, {"nll", s->nll / questions}, {"bytes", bytes}});
  }
  const double full = total.full.nll / questions, inside = total.inside.nll / questions;
  const double after = total.after.nll / questions;
  out.claim("the full cache knows both keys", full < 0.5);
  out.claim("with the question inside, what it asks for stays", inside < full + 0.5);
  out.claim("with the question after compression, it is lost", after > inside + 1);
  const auto memory = show_memory(o, out, *w, make_document(o, *w->parts->text, 0));
  if (!memory) return memory.error();
  return engine::formatted(
      "%d of %d answers with the question inside (NLL %.2f), %d after (NLL %.2f), full cache %d "
      "(NLL %.2f); %s",
      total.inside.right, questions, inside, total.after.right, after, total.full.right, full,
      memory->c_str());
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line(
      "A long prompt compressed at its end: two questions to one prefill, and whose memory it is.", "snapkv");
  options o;
  policies::add_options(line, o, false);
  policies::add_policy_option(line, o.policy);
  line.add("--sentences", o.sentences, "of the document", 4, 180);
  line.add("--trials", o.trials, "documents", 1, 100);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
