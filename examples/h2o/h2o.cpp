// SPDX-License-Identifier: Apache-2.0
//
// h2o: a bounded cache that keeps what was looked at (Zhang et al.: H2O, Heavy-Hitter Oracle for Efficient
// Generative Inference of Large Language Models, 2023, section 4). Every query adds its attention weights to
// one sum per token; when a token more than `heavy + recent` is held, the one with the smallest sum goes. The
// last `recent` are safe, because their sums have only begun. Each kv head has sums, and so tokens, of its
// own:
//
//   slot            0    1    2    3   ...   125   126   127 | 128
//   sum of weights  90   .2   7    .4        .1    .3    0   | 0        heavy: by sum, recent: the last ones
//                         ^ the smallest of the heavy ones makes room for the newcomer
//
// The counts are known before anything is computed (the plan is a function of lengths), so blocks can be
// accounted for by the host; which token goes is decided where keys and queries are. The program feeds one
// text token by token to three sessions in common steps: H2O, a window of as many tokens, and the full cache.

#include <algorithm>
#include <map>

#include "policies.hpp"

namespace {

using policies::token_id;

struct options : policies::options {
  std::string policy = "h2o:heavy=64,recent=64";
  int tokens = 1024;
};

struct lane {
  std::string policy;
  engine::session text;
  std::vector<float> rows;  // of the scored half
};

/// What two sessions say about the second half of the text, beside the full cache.
struct outcome {
  engine::damage policy, window;
  bool constant = true;  // bytes and tokens, at every step once the budget was full
};

/// Tokens that stay, and how many of them are safe because they are the last.
kvcache::keep_plan plan_of(const options& o) {
  return engine::parse_policy(o.policy)->policy.plan(
      {.held = o.tokens, .incoming = 0, .unit = 1, .prefill_end = true});
}

engine::result<outcome> run_text(const options& o, engine::report& out, const policies::world& w,
                                 std::vector<lane>& lanes, int keep) {
  outcome seen;
  std::size_t bytes = 0;
  std::vector<float> logits;
  for (int i = keep; i < o.tokens; ++i) {
    std::vector<engine::session*> texts;
    for (lane& l : lanes) texts.push_back(&l.text);
    const std::vector<token_id> tokens(lanes.size(), w.text[static_cast<std::size_t>(i)]);
    if (auto s = engine::session::advance(texts, tokens, logits); !s) return s.error();
    for (std::size_t l = 0; l < lanes.size() && i >= o.tokens / 2; ++l) {
      const auto row = engine::row_of(logits, w.model(), l);
      lanes[l].rows.insert(lanes[l].rows.end(), row.begin(), row.end());
    }
    const engine::session& text = lanes[0].text;
    if (i == keep) bytes = text.bytes_held();
    for (int layer = 0; layer < w.shape().layers; ++layer) {
      for (int h = 0; h < w.shape().kv_heads; ++h)
        seen.constant = seen.constant && static_cast<int>(text.kept(layer, h).size()) == keep;
    }
    seen.constant = seen.constant && text.bytes_held() == bytes;
    if ((i + 1) % (o.tokens / 4) == 0)
      out.print(
          "%8s %10s %12s %12s %12s\n", engine::thousands(i + 1).c_str(),
          engine::thousands(i + 1 - text.dropped()).c_str(), policies::mebibytes(text.bytes_held()).c_str(),
          policies::mebibytes(text.bytes_state()).c_str(), policies::mebibytes(text.bytes_full()).c_str());
  }
  const auto scored = std::span(w.text).last(static_cast<std::size_t>(o.tokens - o.tokens / 2));
  seen.policy = engine::compare(w.model(), lanes[2].rows, lanes[0].rows, scored);
  seen.window = engine::compare(w.model(), lanes[2].rows, lanes[1].rows, scored);
  return seen;
}

/// Kept tokens that are not recent, and how many heads hold each.
std::map<int, int> heavy_hitters(const policies::world& w, const engine::session& s, int recent) {
  std::map<int, int> heads;
  for (int layer = 0; layer < w.shape().layers; ++layer) {
    for (int h = 0; h < w.shape().kv_heads; ++h) {
      for (const int p : s.kept(layer, h)) {
        if (p < s.position() - recent) ++heads[p];
      }
    }
  }
  return heads;
}

void show_hitters(engine::report& out, const policies::world& w, const std::map<int, int>& heads, int all) {
  std::vector<std::pair<int, int>> most(heads.begin(), heads.end());
  std::stable_sort(most.begin(), most.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  most.resize(std::min<std::size_t>(most.size(), 12));
  out.print("\nheld by most of the %d heads (token at its position):", all);
  for (std::size_t i = 0; i < most.size(); ++i) {
    const token_id id = w.text[static_cast<std::size_t>(most[i].first)];
    out.print("%s'%s' at %d: %d", i % 4 == 0 ? "\n  " : "   ",
              engine::one_line(w.parts->text->decode({&id, 1})).c_str(), most[i].first, most[i].second);
    out.figures["heavy_hitters"].push_back(
        {{"position", most[i].first}, {"token", id}, {"heads", most[i].second}});
  }
  out.print("\n\n");
}

engine::result<std::string> run(const options& o, engine::report& out) {
  const kvcache::keep_plan plan = plan_of(o);
  const int keep = plan.form == kvcache::drop_form::nothing ? o.tokens / 4 : plan.keep;
  const auto w = policies::open_world(o, o.tokens, o.tokens, 3);
  if (!w) return w.error();
  std::vector<lane> lanes;
  for (const std::string& policy : {o.policy, "window:" + std::to_string(keep), std::string("full")}) {
    auto made = policies::begin(*w, policy, {.mode = engine::drop_mode::stream, .chunk = o.common.chunk});
    if (!made) return made.error();
    lanes.push_back({policy, std::move(*made), {}});
    const auto first = std::span(w->text).first(static_cast<std::size_t>(keep));
    if (auto s = lanes.back().text.feed(first, engine::observe::last); !s) return s.error();
  }
  out.print("%8s %10s %12s %12s %12s\n", "fed", "per head", "held", "sums", "full cache");
  const auto seen = run_text(o, out, *w, lanes, keep);
  if (!seen) return seen.error();

  const engine::session& text = lanes[0].text;
  const int heads = w->shape().layers * w->shape().kv_heads;
  out.print("\nwhat is held of %d tokens, from none ( ) to all (@):\n%s", o.tokens,
            policies::drawing_of(*w, text).c_str());
  const auto heavy = heavy_hitters(*w, text, plan.recent);
  show_hitters(out, *w, heavy, heads);
  out.print("%-32s %10s %10s %14s\n", "last half of the text", "KL", "NLL", "same choice");
  for (const auto& [l, d] : {std::pair(&lanes[0], &seen->policy), std::pair(&lanes[1], &seen->window)}) {
    out.print("%-32s %10.4f %10.4f %12.0f %%\n", l->policy.c_str(), d->kl, d->nll, 100 * d->same_choice);
    out.figures["policies"].push_back({{"policy", l->policy}, {"kl", d->kl}, {"nll", d->nll}});
  }
  out.claim("once the budget is full, every step leaves as many tokens per head in as many bytes",
            seen->constant);
  bool recent = plan.recent > 0;
  for (int layer = 0; layer < w->shape().layers; ++layer) {
    for (int h = 0; h < w->shape().kv_heads; ++h) {
      const auto last = text.kept(layer, h).last(static_cast<std::size_t>(plan.recent));
      recent = recent && last.front() == o.tokens - plan.recent && last.back() == o.tokens - 1;
    }
  }
  out.claim("every head holds the last tokens without a gap", recent);
  out.claim("the heads differ in what else they hold", policies::heads_differ(*w, text));
  out.claim("tokens that came after the budget was full have become heavy hitters",
            !heavy.empty() && heavy.rbegin()->first >= keep);
  out.claim("the first token, protected by nobody, is held by most heads",
            heavy.count(0) && heavy.at(0) > heads / 2);
  out.claim("a window of as many tokens is at least three times further from the full cache",
            seen->window.kl > 3 * seen->policy.kl && seen->policy.kl > 0);
  return engine::formatted(
      "%d of %s tokens per head in %s instead of %s at every step; KL %.3f, a window of as many "
      "tokens %.3f; %d of %d heads hold the first token",
      keep, engine::thousands(o.tokens).c_str(), policies::mebibytes(text.bytes_held()).c_str(),
      policies::mebibytes(text.bytes_full()).c_str(), seen->policy.kl, seen->window.kl,
      heavy.count(0) ? heavy.at(0) : 0, heads);
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line(
      "Heavy hitters and recent tokens while decoding, beside a window of as many tokens.", "h2o");
  options o;
  policies::add_options(line, o, true);
  policies::add_policy_option(line, o.policy);
  line.add("--tokens", o.tokens, "tokens of the text", 64, 8192);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
