// SPDX-License-Identifier: Apache-2.0
//
// own_policy: what a user adds to the library's policies without changing it.
//
//   a scorer        a plan and a score, in eleven lines: scorers.hpp
//   a predictor     the same with weights that were trained elsewhere
//   pinned ranges   "never drop these", under any policy
//
// A scorer says how many tokens stay and gives each a number; observing attention, protecting, dividing a
// budget, selecting, moving and accounting are the library's. So a rule written anew must choose exactly what
// the library's own does, which the program checks for TOVA and for Scissorhands. Pinning is for what the
// caller knows and attention cannot: that a question about one sentence will come.

#include <algorithm>

#include "policies.hpp"
#include "scorers.hpp"

namespace {

struct options : policies::options {
  std::string policy = "h2o:heavy=64,recent=64";
  int trials = 3;
};

bool same_tokens(const policies::world& w, const engine::session& a, const engine::session& b) {
  for (int layer = 0; layer < w.shape().layers; ++layer) {
    for (int h = 0; h < w.shape().kv_heads; ++h) {
      const auto x = a.kept(layer, h), y = b.kept(layer, h);
      if (!std::equal(x.begin(), x.end(), y.begin(), y.end())) return false;
    }
  }
  return true;
}

/// A prompt that was computed once, under a policy of the caller's own.
engine::result<engine::session> compressed(const engine::session& prompt,
                                           const kvcache::any_retention& policy) {
  auto made = prompt.fork_as({policy, {}});
  if (!made) return made;
  if (auto s = made->compress(); !s) return s.error();
  return made;
}

engine::status compare_rules(engine::report& out, const policies::world& w, const policies::hidden_key& d,
                             int keep) {
  auto prompt = policies::begin(w, "full", {.remember = true});
  if (!prompt) return prompt.error();
  if (auto s = prompt->feed(d.context, engine::observe::last); !s) return s.error();
  const std::string capacity = ":capacity=" + std::to_string(keep);
  static constexpr float hits_alone[] = {1, 0, 0};
  static constexpr float hits_and_values[] = {1, 0, 0.1f};
  const auto tova = policies::compressed(*prompt, "tova" + capacity);
  const auto mine = compressed(*prompt, own::last_look{keep});
  const auto scissorhands = policies::compressed(*prompt, "scissorhands" + capacity);
  const auto untrained = compressed(*prompt, own::trained{hits_alone, keep});
  const auto weighted = compressed(*prompt, own::trained{hits_and_values, keep});
  for (const auto* made : {&tova, &mine, &scissorhands, &untrained, &weighted}) {
    if (!*made) return made->error();
  }
  out.claim("a scorer of one's own with TOVA's rule keeps exactly TOVA's tokens, in every layer",
            same_tokens(w, *mine, *tova) && mine->dropped() > 0);
  out.claim("a predictor that gives hits the weight 1 keeps exactly Scissorhands' tokens",
            same_tokens(w, *untrained, *scissorhands) && untrained->dropped() > 0);
  out.claim(
      "other weights choose other tokens, as many",
      !same_tokens(w, *weighted, *scissorhands) && weighted->values_kept() == scissorhands->values_kept());
  return {};
}

struct answered {
  double nll = 0;
  std::size_t values = 0;
  bool holds_all = true;  // of the pinned positions, in every head
};

/// Compresses the document under the policy and asks for the key.
engine::status ask(const options& o, const policies::world& w, const policies::hidden_key& d,
                   const std::string& policy, std::vector<int> pinned, answered& to) {
  auto s = policies::begin(w, policy, {.chunk = o.common.chunk, .pinned = pinned});
  if (!s) return s.error();
  if (auto fed = s->feed(d.context, engine::observe::last); !fed) return fed.error();
  if (auto done = s->compress(); !done) return done;
  to.values = s->values_kept();
  for (int layer = 0; layer < w.shape().layers; ++layer) {
    for (int h = 0; h < w.shape().kv_heads; ++h) {
      const auto kept = s->kept(layer, h);
      to.holds_all = to.holds_all && std::includes(kept.begin(), kept.end(), d.told.begin(), d.told.end());
    }
  }
  const auto got = policies::ask(w, *s, d.question, d.digits);
  if (!got) return got.error();
  to.nll += got->nll / o.trials;
  return {};
}

engine::result<std::string> run(const options& o, engine::report& out) {
  const auto w = policies::open_world(o, 0, 4096, 6);
  if (!w) return w.error();
  answered full, dropped, pinned;
  std::size_t told = 0;
  for (int trial = 0; trial < o.trials; ++trial) {
    const policies::hidden_key d = policies::make_hidden_key(*w->parts->text, trial);
    told = d.told.size();
    if (trial == 0) {
      if (auto s = compare_rules(out, *w, d, static_cast<int>(d.context.size() / 4)); !s) return s.error();
    }
    if (auto s = ask(o, *w, d, "full", {}, full); !s) return s.error();
    if (auto s = ask(o, *w, d, o.policy, {}, dropped); !s) return s.error();
    if (auto s = ask(o, *w, d, o.policy, d.told, pinned); !s) return s.error();
  }
  out.print("\n%-52s %8s %12s\n", "a pass key, asked for after compression", "NLL", "values kept");
  for (const auto& [name, a] : {std::pair(std::string("full"), &full),
                                {o.policy, &dropped},
                                {o.policy + ", the sentences pinned", &pinned}}) {
    out.print("%-52s %8.3f %12s\n", name.c_str(), a->nll,
              engine::thousands(static_cast<std::int64_t>(a->values)).c_str());
    out.figures["answers"].push_back({{"policy", name}, {"nll", a->nll}, {"values", a->values}});
  }
  out.claim("unasked, the policy drops the sentences that tell the key", !dropped.holds_all);
  out.claim("pinned, every head of every layer holds all of them", pinned.holds_all);
  out.claim("pinned tokens count in the budget: as many values are kept", pinned.values == dropped.values);
  out.claim("the key is lost without the pins and known with them",
            dropped.nll > full.nll + 1 && pinned.nll < dropped.nll / 2);
  return engine::formatted(
      "a scorer of 11 lines chooses as the library's; %zu pinned tokens bring a lost key back: NLL "
      "%.2f instead of %.2f (full cache %.2f), in the same budget",
      told, pinned.nll, dropped.nll, full.nll);
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("A scorer, a predictor and pinned ranges of one's own.", "own_policy");
  options o;
  policies::add_options(line, o, false);
  policies::add_policy_option(line, o.policy);
  line.add("--trials", o.trials, "pass keys", 1, 100);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
