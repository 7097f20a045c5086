// SPDX-License-Identifier: Apache-2.0
//
// tenants: two customers of one server send the same prompt. If they shared what is cached, the second would
// get his first token so much sooner that he could tell what the first one had sent: he guesses a prompt,
// measures, and knows. So a prefix is found only inside the scope it was computed in, and a miss costs the
// same whether or not another tenant holds the very prompt:
//
//   north sends P   -> computed                 north sends P again -> found
//   south sends P   -> computed as if nobody    (a scope is chosen by the server, never by the caller:
//   whoever
//                      had ever sent it          may name a scope can measure what is cached in it)
//
// The server's own system prompt is no secret, and worth sharing. A scope may narrow along the text: public
// up to a token, the tenant's own from there on. A unit of tokens belongs to the scope of its last token, so
// the unit in which public text ends is private.
//
//   | system prompt: everyone's        | message: north's alone  |
//   |            "                     | message: south's alone  |
//
// Tokens computed and found are checked. Times are reported and not checked, as they are the machine's. What
// scopes do not hide: that the server is busy, and that memory is short; for the latter see account_limits.

#include "example.hpp"

namespace {

using engine::cache_scope;
using engine::token_id;

struct options {
  engine::common_options common;
  int rounds = 5;
  bool share = false;
};

constexpr const char* system_prompt =
    "You are the assistant of a law firm. You answer in one sentence, you do not guess, and you say so when "
    "a document does not contain the answer. You never give legal advice, and you never name other clients. "
    "Dates are written in full. Amounts are written with their currency. If a client writes in another "
    "language, you answer in English and add that a colleague will call back. A document follows the word "
    "Document, a question follows the word Question.";

std::string message(int number) {
  return "Number " + std::to_string(number) +
         ". Document: The parties agree that the mill at Low Bridge is sold for ninety thousand crowns, to "
         "be paid in three parts, the first on signing, the second when the roof has been repaired, and the "
         "third on the first of May. The seller keeps the right to use the eastern meadow until the harvest. "
         "Question: When is the third part to be paid?";
}

/// The server: one model, one cache, and for every request the scope that the server chooses.
class server {
 public:
  server(const options& o, engine::loaded& parts, engine::cache_kind& cache, int public_tokens)
      : o_(o), parts_(parts), cache_(cache), public_tokens_(public_tokens) {}

  /// Only the tenant himself finds what he sent.
  engine::result<engine::recorded> ask(const std::string& tenant, std::span<const token_id> prompt,
                                       int max_new) {
    return serve(cache_scope::only(tenant), prompt, max_new);
  }
  /// The same, but everyone finds the system prompt.
  engine::result<engine::recorded> ask_after_public(const std::string& tenant,
                                                    std::span<const token_id> prompt, int max_new) {
    return serve(cache_scope::only_after(public_tokens_, tenant), prompt, max_new);
  }

 private:
  engine::result<engine::recorded> serve(const cache_scope& scope, std::span<const token_id> prompt,
                                         int max_new) {
    return engine::record(parts_, cache_, prompt, o_.share ? cache_scope::everyone() : scope, max_new,
                          o_.common.chunk);
  }

  const options& o_;
  engine::loaded& parts_;
  engine::cache_kind& cache_;
  int public_tokens_;
};

engine::result<std::vector<token_id>> prompt_of(const engine::loaded& parts, int number) {
  const engine::chat_message chat[] = {{"system", system_prompt}, {"user", message(number)}};
  return parts.text->encode_chat(chat);
}

/// Tokens of the system turn: where two prompts with different messages begin to differ. The number of the
/// message comes early, so this is the end of the system turn and a few tokens of chat form.
int public_length(std::span<const token_id> a, std::span<const token_id> b) {
  std::size_t same = 0;
  while (same < a.size() && same < b.size() && a[same] == b[same]) ++same;
  return static_cast<int>(same);
}

void print_row(engine::report& out, const char* who, const char* what, const engine::recorded& r) {
  out.print("%-34s %-8s %8d %10d %10.1f\n", what, who, r.made.reused, r.made.prefilled,
            r.made.prefill_seconds * 1e3);
  out.figures["requests"].push_back({{"case", what},
                                     {"tenant", who},
                                     {"reused", r.made.reused},
                                     {"computed", r.made.prefilled},
                                     {"first_token_seconds", r.made.prefill_seconds}});
}

struct request {
  const char* tenant;
  const char* what;
  bool after_public;
  int reused;  ///< what the cache should find
};

/// The same prompt six times over one cache.
engine::status show_isolation(const options& o, engine::report& out, server& firm,
                              std::span<const token_id> prompt, int public_tokens) {
  const int block = o.common.block_size;
  const int whole =
      (static_cast<int>(prompt.size()) - 1) / block * block;  // the last token is always computed
  const int shared = public_tokens / block * block;
  const request requests[] = {
      {"north", "private, first time", false, 0},
      {"north", "private, again", false, whole},
      {"south", "private, the same prompt", false, 0},
      {"north", "public prefix, first time", true, 0},
      {"south", "public prefix, the same prompt", true, shared},
      {"south", "public prefix, again", true, whole},
  };
  out.print("%-34s %-8s %8s %10s %10s\n", "case", "tenant", "found", "computed", "first, ms");
  bool found = true;
  bool equal = true;
  engine::recorded first;
  for (const request& r : requests) {
    auto got = r.after_public ? firm.ask_after_public(r.tenant, prompt, 8) : firm.ask(r.tenant, prompt, 8);
    if (!got) return got.error();
    print_row(out, r.tenant, r.what, *got);
    if (&r == requests) first = *got;
    found = found && got->made.reused == r.reused;
    equal = equal && got->same_answer(first);
  }
  out.print("\n");
  out.claim("a prompt is found by the tenant who sent it, and by nobody else; a public prefix by everyone",
            found);
  out.claim("all answers are equal, from the same logits to the bit", equal);
  out.claim("there is a public prefix, and something behind it", 0 < shared && shared < whole);
  return {};
}

struct timing {
  std::vector<double> nobody, another, own;  ///< seconds to south's first token; own: to north's second
};

/// South sends prompts that nobody holds and prompts that north holds, in turns. Every prompt is new, so that
/// no round helps the next one.
engine::result<timing> measure(const options& o, engine::report& out, engine::loaded& parts, server& firm) {
  timing t;
  bool all = true;
  const auto ask = [&](const char* tenant, int number, std::vector<double>& seconds) -> engine::result<int> {
    const auto prompt = prompt_of(parts, number);
    if (!prompt) return prompt.error();
    const auto got = firm.ask(tenant, *prompt, 1);
    if (!got) return got.error();
    seconds.push_back(got->made.prefill_seconds);
    return static_cast<int>(prompt->size()) - got->made.prefilled;
  };
  std::vector<double> unused;
  for (int round = 0; round < o.rounds; ++round) {
    const int number = 1000 + 2 * round;
    const auto nobody = ask("south", number, t.nobody);
    if (!nobody) return nobody.error();
    const auto fill = ask("north", number + 1, unused);
    if (!fill) return fill.error();
    const auto another = ask("south", number + 1, t.another);
    if (!another) return another.error();
    const auto own = ask("north", number + 1, t.own);
    if (!own) return own.error();
    // Within a tenant the system prompt is found from the second prompt on, in both cases alike.
    all = all && *nobody == *another && *own > *another;
  }
  out.claim("a miss computes the same number of tokens whether or not another tenant holds the prompt", all);
  return t;
}

engine::result<std::string> run(const options& o, engine::report& out) {
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  const auto prompt = prompt_of(**parts, 100);
  if (!prompt) return prompt.error();
  const auto other = prompt_of(**parts, 200);
  if (!other) return other.error();
  const int public_tokens = public_length(*prompt, *other);
  // Room for everything that is sent, so that nothing is evicted and every difference is the scope's.
  auto cache = engine::open_cache(o.common, **parts, static_cast<int>(prompt->size()) + 16, 8 + 3 * o.rounds);
  if (!cache) return cache.error();
  server firm(o, **parts, **cache, public_tokens);
  out.print("a prompt of %zu tokens, of which %d are the server's system prompt\n\n", prompt->size(),
            public_tokens);
  if (auto s = show_isolation(o, out, firm, *prompt, public_tokens); !s) return s.error();
  const auto t = measure(o, out, **parts, firm);
  if (!t) return t.error();
  const double nobody = engine::median(t->nobody);
  const double another = engine::median(t->another);
  const double own = engine::median(t->own);
  out.figures["prompt_tokens"] = prompt->size();
  out.figures["public_tokens"] = public_tokens;
  out.figures["median_first_token_seconds"] = {
      {"nobody_holds_it", nobody}, {"another_tenant_holds_it", another}, {"the_tenant_holds_it", own}};
  out.figures["ratio_of_misses"] = another / nobody;
  return engine::formatted(
      "first token of a miss after %.1f ms if another tenant holds the prompt, %.1f ms if nobody does (ratio "
      "%.2f, medians of %d); of a hit after %.1f ms",
      another * 1e3, nobody * 1e3, another / nobody, o.rounds, own * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("Two tenants, one prompt: what is found, and what a miss costs.", "tenants");
  options o;
  o.common.cache = "paged";
  engine::add_common_options(line, o.common);
  line.add("--rounds", o.rounds, "prompts per timing", 1, 100);
  line.add("--share", o.share, "let everyone find everything: what the scopes prevent (claims then fail)");
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
