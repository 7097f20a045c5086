// SPDX-License-Identifier: Apache-2.0
//
// streaming_llm: a text without end in constant memory (Xiao et al.: Efficient Streaming Language Models with
// Attention Sinks, 2023, section 3.2). Attention that finds nothing goes to the first tokens, whatever they
// are; a window that loses them loses the model. So the first block stays, the last ones stay, and what lies
// between is given back in whole blocks:
//
//   tokens fed   0 ........ 15 | 16 ............................ 19,727 | 19,728 ........ 19,999
//   in the cache    sinks      |              given back                |        window
//                     └── turned by the positions that went, so that distances are those of a short text
//
// Nothing is copied: the commands that retain() queues turn the keys of one block. The program feeds the same
// text to three sessions, in common steps: with sinks, without, and with the full cache. Then the first two
// write on by themselves, each its own text.

#include <algorithm>
#include <chrono>
#include <cmath>

#include "policies.hpp"
#include "sampling.hpp"

namespace {

using policies::token_id;

struct options : policies::options {
  std::string policy = "streaming_llm:sinks=4,window=252";
  int tokens = 20000;
  int read = 512;
};

/// Tokens that the policy lets come together at most, in whole blocks.
int most_held(const options& o) {
  const auto policy = *engine::parse_policy(o.policy);
  kvcache::retain_lengths n{.held = 1, .incoming = 0, .unit = o.common.block_size, .prefill_end = false};
  while (n.held < o.tokens && policy.policy.plan(n).form == kvcache::drop_form::nothing) ++n.held;
  return (n.held - 1 + n.unit - 1) / n.unit * n.unit;
}

/// One text under one policy.
struct lane {
  std::string policy;
  engine::session text;
  std::vector<token_id> written;
  double nll = 0, kl = 0;       // of what was read behind the first drop, means
  std::size_t peak[2] = {};     // bytes held, in the first and in the second half
  std::vector<float> last_row;  // predicts the next token
};

class stream {
 public:
  stream(const options& o, engine::report& out, const policies::world& w) : o_(o), out_(out), world_(w) {}

  engine::status open() {
    for (const std::string& policy :
         {o_.policy, "window:" + std::to_string(most_held(o_) - 1), std::string("full")}) {
      auto made =
          policies::begin(world_, policy, {.mode = engine::drop_mode::stream, .chunk = o_.common.chunk});
      if (!made) return made.error();
      lanes.push_back({policy, std::move(*made), {}, 0, 0, {}, {}});
      // As long as nothing has to go, the beginning can be computed in large steps.
      if (auto s = lanes.back().text.feed(std::span(world_.text).first(at_once()), engine::observe::last); !s)
        return s.error();
    }
    return {};
  }

  /// Reads the rest of the text, and scores what follows once the window is full.
  engine::status read() {
    const std::size_t from = world_.text.size() * 5 / 8;
    for (std::size_t i = at_once(); i < world_.text.size(); ++i) {
      if (auto s = step(std::vector<token_id>(lanes.size(), world_.text[i])); !s) return s;
      if (i < from || i + 1 == world_.text.size()) continue;
      const auto scored = static_cast<double>(world_.text.size() - 1 - from);
      for (lane& l : lanes) {
        l.nll += policies::nll_of(l.last_row, world_.text[i + 1]) / scored;
        l.kl += policies::kl_of(lanes[2].last_row, l.last_row) / scored;
      }
    }
    return {};
  }

  /// Writes until `tokens` tokens were fed.
  engine::status write() {
    lanes.pop_back();  // the full cache ends here: it would hold one block more every 16 tokens
    std::vector<engine::splitmix64> random(lanes.size(), engine::splitmix64(1));
    const int every = std::max(100, o_.tokens / 20 / 100 * 100);
    out_.print("%8s %14s %14s %8s   %s\n", "tokens", "held", "full cache", "tok/s", "written last");
    auto since = std::chrono::steady_clock::now();
    for (int n = lanes[0].text.position(); n < o_.tokens;) {
      std::vector<token_id> next;
      for (std::size_t i = 0; i < lanes.size(); ++i)
        next.push_back(engine::sample(lanes[i].last_row, 0.7, random[i]));
      for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i].written.push_back(next[i]);
      if (auto s = step(next); !s) return s;
      if (++n % every != 0) continue;
      const auto now = std::chrono::steady_clock::now();
      show(every / std::chrono::duration<double>(now - since).count());
      since = now;
    }
    return {};
  }

  std::vector<lane> lanes;

 private:
  std::size_t at_once() const { return world_.text.size() / 2; }

  engine::status step(const std::vector<token_id>& tokens) {
    std::vector<engine::session*> texts;
    for (lane& l : lanes) texts.push_back(&l.text);
    if (auto s = engine::session::advance(texts, tokens, logits_); !s) return s;
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      const auto row = engine::row_of(logits_, world_.model(), i);
      lanes[i].last_row.assign(row.begin(), row.end());
      std::size_t& peak = lanes[i].peak[lanes[i].text.position() > o_.tokens / 2];
      peak = std::max(peak, lanes[i].text.bytes_held());
    }
    return {};
  }

  void show(double per_second) {
    const engine::session& text = lanes[0].text;
    out_.print("%8s %14s %14s %8.0f   ...%s\n", engine::thousands(text.position()).c_str(),
               policies::mebibytes(text.bytes_held()).c_str(), policies::mebibytes(text.bytes_full()).c_str(),
               per_second, last_words(lanes[0]).c_str());
    out_.figures["rows"].push_back({{"tokens", text.position()},
                                    {"bytes_held", text.bytes_held()},
                                    {"bytes_full", text.bytes_full()},
                                    {"tokens_per_second", per_second},
                                    {"text", last_words(lanes[0])},
                                    {"text_without_sinks", last_words(lanes[1])}});
    out_.print("%57s...%s\n", "without sinks: ", last_words(lanes[1]).c_str());
  }
  std::string last_words(const lane& l) const {
    const auto tail = std::span(l.written).last(std::min<std::size_t>(l.written.size(), 12));
    return engine::one_line(world_.parts->text->decode(tail), 60);
  }

  const options& o_;
  engine::report& out_;
  const policies::world& world_;
  std::vector<float> logits_;
};

engine::result<std::string> run(const options& o, engine::report& out) {
  const auto w = policies::open_world(o, o.read, std::max(o.read, most_held(o)) + o.common.block_size, 3);
  if (!w) return w.error();
  stream s(o, out, *w);
  if (auto done = s.open(); !done) return done.error();
  if (auto done = s.read(); !done) return done.error();
  out.print("%-44s %12s %12s\n", "while reading, behind the first drop", "perplexity", "KL");
  for (const lane& l : s.lanes) {
    out.print("%-44s %12.2f %12.4f\n", l.policy.c_str(), std::exp(l.nll), l.kl);
    out.figures["reading"].push_back({{"policy", l.policy}, {"perplexity", std::exp(l.nll)}, {"kl", l.kl}});
  }
  const double full = s.lanes[2].nll;
  if (auto done = s.write(); !done) return done.error();

  const lane& text = s.lanes[0];
  const lane& other = s.lanes[1];
  out.claim("the second half of the text took no byte more than the first", text.peak[1] <= text.peak[0]);
  out.claim("both policies held as many bytes", text.peak[0] == other.peak[0]);
  out.claim("the first token is still there", text.text.kept(0, 0).front() == 0);
  out.claim("what went is all that was fed but what is held",
            text.text.position() - text.text.dropped() == static_cast<int>(text.text.kept(0, 0).size()));
  out.claim("without sinks the model is at least five times further from the full cache",
            other.kl > 5 * text.kl);
  out.claim("and the text is less likely by more than a fifth of a nat a token, with sinks by less",
            other.nll > full + 0.2 && text.nll < full + 0.2);
  return engine::formatted(
      "%s tokens in %s at all times (full cache: %s); perplexity while reading %.1f, without sinks "
      "in as many bytes %.1f, full cache %.1f",
      engine::thousands(o.tokens).c_str(), policies::mebibytes(text.peak[0]).c_str(),
      policies::mebibytes(text.text.bytes_full()).c_str(), std::exp(text.nll), std::exp(other.nll),
      std::exp(full));
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("Endless text in constant memory: sinks and a window, beside a window alone.",
                            "streaming_llm");
  options o;
  policies::add_options(line, o, true);
  policies::add_policy_option(line, o.policy);
  line.add("--tokens", o.tokens, "tokens of the whole text", 64, 10'000'000);
  line.add("--read", o.read, "of these, read from the file", 32, 8192);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
