// SPDX-License-Identifier: Apache-2.0
//
// prefix_sharing: several visitors ask a guide whose system prompt is long and always the same. Without
// sharing every request computes and stores that prompt again; with sharing the first one does it for all:
//
//   request 0   | system prompt ............ | question 0 | answer 0
//   request 1   |  same blocks, read only    | question 1 | answer 1     open() finds and pins them,
//   request 2   |  same blocks, read only    | question 2 | answer 2     and tells how much is left
//
// The only difference between the two runs below is the scope a request is opened with. Reuse is not an
// approximation: a cached key is the same number that would have been computed, so the answers must be the
// same to the bit. That, and the arithmetic of tokens and blocks, is what the program checks. (The model is
// very small, so an answer may be wrong; it must then be wrong in the same way.)

#include <algorithm>
#include <chrono>

#include "example.hpp"
#include "scheduler.hpp"

namespace {

using engine::token_id;

struct options {
  engine::common_options common;
  int requests = 4;
  int max_new = 12;
};

constexpr const char* system_prompt =
    "You are the guide of the Harbour Museum in the old customs house. Answer in one short sentence. The "
    "museum is open from ten in the morning until six in the evening, on Thursdays until nine, and closed on "
    "Mondays. A ticket costs eight euros, for students and for children over six it costs four, younger "
    "children enter free. The lift is to the left of the entrance, the cloakroom to the right of it, and "
    "there are lockers for large bags. The first hall shows ship models, among them the schooner Amalia, "
    "built in 1868 and lost off the northern reef in 1911. The second hall shows instruments: sextants, "
    "chronometers, and the brass lens of the lighthouse at Harrow Point, which turned for ninety-four years. "
    "The third hall tells of the fishermen, the canneries and the strike of 1927, with photographs by Ines "
    "Duarte. The cafe on the second floor serves soup, cake and coffee until half past five, and its terrace "
    "looks over the dry dock. Guided walks start at eleven and at three next to the anchor in the yard and "
    "last fifty minutes. Photographs are allowed without flash. Dogs wait in the yard. The shop sells books, "
    "charts and postcards, and sends parcels abroad.";

constexpr const char* questions[] = {
    "When do you close on Thursdays?",
    "What does a ticket for a student cost?",
    "Where can I leave a large bag?",
    "Which ship was lost off the northern reef?",
    "Who took the photographs of the strike?",
    "When do the guided walks start?",
    "May I bring my dog?",
    "Where is the cafe?",
};

/// One request while it is being served. It stays open until all are answered, as in a busy server.
struct visitor {
  int slot = 0;
  int reused = 0;
  int computed = 0;
  double first_token_seconds = 0;
  std::vector<token_id> answer;
  std::uint64_t bits = engine::chain_start;  // stands for all logits
};

struct outcome {
  std::vector<visitor> visitors;
  int computed = 0;
  std::int64_t blocks = 0;  ///< in use while all requests are open
  double first_token_seconds = 0;
};

/// Serves one request up to its last token and leaves the sequence open.
engine::result<visitor> serve(const options& o, engine::loaded& parts, engine::cache_kind& cache,
                              const std::vector<token_id>& prompt, const engine::cache_scope& scope) {
  const auto start = std::chrono::steady_clock::now();
  // The longest cached prefix is found and pinned in one call. At least the last token is left over, since
  // its logits are needed.
  const auto opened = cache.open(prompt, scope);
  if (!opened) return opened.error();
  visitor v{.slot = opened->slot, .reused = opened->reused, .answer = {}};
  v.computed = static_cast<int>(prompt.size()) - v.reused;
  token_id next = 0;
  const auto choose = [&](int, std::span<const float> logits) {
    v.bits = engine::chain(v.bits, engine::fingerprint(logits));
    next = engine::greedy(logits);
    v.answer.push_back(next);
  };
  const auto feed = [&](std::span<const token_id> tokens) {
    return engine::feed(*parts.model, cache, v.slot, tokens, o.common.chunk, engine::observe::last, choose);
  };
  if (auto s = feed(std::span(prompt).subspan(static_cast<std::size_t>(v.reused))); !s) return s.error();
  v.first_token_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  // Publish the prompt now, not when the answer is complete: the next request is waiting for it.
  if (auto s = cache.commit(v.slot, prompt); !s) return s.error();
  while (static_cast<int>(v.answer.size()) < o.max_new) {
    if (auto s = feed({&next, 1}); !s) return s.error();
  }
  return v;
}

engine::result<outcome> serve_all(const options& o, engine::loaded& parts,
                                  const std::vector<std::vector<token_id>>& prompts, bool share) {
  std::size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  auto cache = engine::open_cache(o.common, parts, static_cast<int>(longest) + o.max_new,
                                  static_cast<int>(prompts.size()));
  if (!cache) return cache.error();
  outcome out;
  std::vector<double> seconds;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    // A tenant of his own finds nothing of the others'. There is no default scope: somebody has to say who
    // may share.
    const auto scope =
        share ? engine::cache_scope::everyone() : engine::cache_scope::only("visitor " + std::to_string(i));
    auto served = serve(o, parts, **cache, prompts[i], scope);
    if (!served) return served.error();
    out.computed += served->computed;
    seconds.push_back(served->first_token_seconds);
    out.visitors.push_back(std::move(*served));
  }
  out.blocks = (*cache)->counts().blocks_used;
  out.first_token_seconds = engine::median(seconds);
  for (const visitor& v : out.visitors) (*cache)->close(v.slot);
  return out;
}

engine::result<std::vector<std::vector<token_id>>> make_prompts(const options& o,
                                                                const engine::loaded& parts) {
  std::vector<std::vector<token_id>> prompts;
  for (int i = 0; i < o.requests; ++i) {
    const engine::chat_message chat[] = {{"system", system_prompt}, {"user", questions[i]}};
    auto ids = parts.text->encode_chat(chat);
    if (!ids) return ids.error();
    prompts.push_back(std::move(*ids));
  }
  return prompts;
}

/// What the prompts have in common, in whole blocks: what a cache can reuse.
int shared_tokens(const std::vector<std::vector<token_id>>& prompts, int block_size) {
  std::size_t same = prompts.front().size() - 1;
  for (const auto& prompt : prompts) {
    const auto end = prompt.begin() + static_cast<std::ptrdiff_t>(std::min(same, prompt.size() - 1));
    same = static_cast<std::size_t>(std::mismatch(prompt.begin(), end, prompts.front().begin()).first -
                                    prompt.begin());
  }
  return static_cast<int>(same) / block_size * block_size;
}

void check(const options& o, engine::report& out, const outcome& alone, const outcome& shared, int common) {
  bool equal = true;
  bool found = true;
  for (std::size_t i = 0; i < shared.visitors.size(); ++i) {
    const visitor& a = alone.visitors[i];
    const visitor& b = shared.visitors[i];
    equal = equal && a.answer == b.answer && a.bits == b.bits;
    found = found && b.reused >= (i == 0 ? 0 : common) && a.reused == 0;
  }
  const int others = o.requests - 1;
  out.claim("all answers are the same tokens, from the same logits to the bit", equal);
  out.claim("every request but the first finds the whole system prompt, and none does without sharing",
            found);
  out.claim("sharing computes the system prompt once", alone.computed - shared.computed >= others * common);
  out.claim("sharing stores the system prompt once",
            alone.blocks - shared.blocks >= others * (common / o.common.block_size));
  out.claim("there is something to share", common > 0 && others > 0);
}

void print_runs(engine::report& out, const engine::loaded& parts, const outcome& alone,
                const outcome& shared) {
  out.print("%-42s %12s %12s %10s %10s\n", "question", "computed", "with sharing", "first, ms", "sharing");
  for (std::size_t i = 0; i < alone.visitors.size(); ++i) {
    const visitor& a = alone.visitors[i];
    const visitor& b = shared.visitors[i];
    out.print("%-42s %12d %12d %10.1f %10.1f\n", questions[i], a.computed, b.computed,
              a.first_token_seconds * 1e3, b.first_token_seconds * 1e3);
    out.print("    %s\n", engine::one_line(parts.text->decode(b.answer)).c_str());
    out.figures["requests"].push_back({{"prompt_tokens", a.computed},
                                       {"computed", b.computed},
                                       {"reused", b.reused},
                                       {"first_token_seconds_alone", a.first_token_seconds},
                                       {"first_token_seconds_shared", b.first_token_seconds},
                                       {"ids", b.answer}});
  }
  out.print("%-42s %12s %12s\n", "blocks held with all requests open",
            engine::thousands(alone.blocks).c_str(), engine::thousands(shared.blocks).c_str());
  out.print("\n");
  for (const auto& [name, of] : {std::pair{"alone", &alone}, std::pair{"shared", &shared}}) {
    out.figures[name] = {{"tokens_computed", of->computed},
                         {"blocks_held", of->blocks},
                         {"median_first_token_seconds", of->first_token_seconds}};
  }
}

engine::result<std::string> run(const options& o, engine::report& out) {
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  const auto prompts = make_prompts(o, **parts);
  if (!prompts) return prompts.error();
  const int common = shared_tokens(*prompts, o.common.block_size);
  const auto alone = serve_all(o, **parts, *prompts, false);
  if (!alone) return alone.error();
  const auto shared = serve_all(o, **parts, *prompts, true);
  if (!shared) return shared.error();

  const int asked = alone->computed;
  out.print("%d requests, %d prompt tokens each on average, %d of them the same for all\n\n", o.requests,
            asked / o.requests, common);
  print_runs(out, **parts, *alone, *shared);
  check(o, out, *alone, *shared, common);
  return engine::formatted(
      "%d equal answers; %s of %s prompt tokens computed, %s blocks held instead of %s, median time to first "
      "token %.0f ms instead of %.0f",
      o.requests, engine::thousands(shared->computed).c_str(), engine::thousands(asked).c_str(),
      engine::thousands(shared->blocks).c_str(), engine::thousands(alone->blocks).c_str(),
      shared->first_token_seconds * 1e3, alone->first_token_seconds * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("Several requests with one long system prompt, with and without sharing it.",
                            "prefix_sharing");
  options o;
  o.common.cache = "paged";
  engine::add_common_options(line, o.common);
  line.add("--requests", o.requests, "requests", 1, static_cast<int>(std::size(questions)));
  line.add("--new", o.max_new, "tokens of an answer", 1, 1024);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
