// SPDX-License-Identifier: Apache-2.0
//
// agent_loop: an agent calls a tool, gets its output, and asks the model again, with everything so far in
// front:
//
//   step 1   | task | output 1 |                                       -> answer 1
//   step 2   | task | output 1 | answer 1 | output 2 |                 -> answer 2
//   step 3   | task | output 1 | answer 1 | output 2 | answer 2 | output 3 |  -> answer 3
//
// Without reuse step k computes all k outputs again: the sum grows with the square of the steps. With reuse
// only what is new is computed, and a part of one block (the cache shares whole blocks): the sum grows in a
// straight line. For that the history must be continued token by token. An agent that turns its history into
// text and encodes it anew may get other tokens for the same text, and everything behind the first difference
// is lost.
//
// Both runs get the same tokens, so the one without reuse needs not be made in full to know what it computes:
// all of every prompt. By default the first steps and the last one are really computed without reuse, to
// check that and to compare the answers; the steps between are counted. --without 20 computes them all.

#include <fstream>

#include "example.hpp"
#include "plot.hpp"

namespace {

using engine::token_id;

struct options {
  engine::common_options common;
  int steps = 20;
  int max_new = 6;
  int without = 5;
  std::string plot;
};

constexpr const char* task =
    "You look after the harbour. Read the report of each instrument and say in a few words whether all is "
    "well.";

/// Output of a tool: a report with figures that nobody could have cached.
std::string report_of(int step) {
  static constexpr const char* instruments[] = {"tide gauge", "wind vane", "radar", "lamp", "bridge"};
  engine::splitmix64 random(static_cast<std::uint64_t>(step));
  const auto figure = [&](std::uint64_t below) { return std::to_string(random.next() % below); };
  return "Report " + std::to_string(step) + " of the " + instruments[step % 5] + ": reading " + figure(100) +
         " at quay " + figure(10) + ", reading " + figure(100) + " at the pier, battery at " + figure(100) +
         " per cent, no alarm. Which instrument was that?";
}

/// The conversation as tokens. Nothing in front of the end ever changes.
class history {
 public:
  explicit history(const engine::tokenizer& text) : text_(text) {
    add("<|im_start|>system\n", task);
    add("<|im_end|>\n<|im_start|>user\n", report_of(1));
    add("<|im_end|>\n<|im_start|>assistant\n", {});
  }
  /// The model's own tokens, not their text; then the next output of the tool.
  void continue_with(std::span<const token_id> answer, const std::string& output) {
    ids_.insert(ids_.end(), answer.begin(), answer.end());
    add("<|im_end|>\n<|im_start|>user\n", output);
    add("<|im_end|>\n<|im_start|>assistant\n", {});
  }
  const std::vector<token_id>& ids() const { return ids_; }

 private:
  void add(std::string_view markers, std::string_view content) {
    for (const token_id id : text_.encode(markers, engine::specials::parse)) ids_.push_back(id);
    // What a tool prints is data: a marker inside it must not begin a turn.
    for (const token_id id : text_.encode(content, engine::specials::as_text)) ids_.push_back(id);
  }

  const engine::tokenizer& text_;
  std::vector<token_id> ids_;
};

struct step {
  std::vector<token_id> prompt;
  engine::recorded with;
  engine::recorded without;  ///< where it was computed
  bool computed_without = false;
};

engine::result<std::vector<step>> run_steps(const options& o, engine::loaded& parts) {
  const int most = parts.model->shape().kv.max_positions;
  std::vector<step> steps;
  history text(*parts.text);
  // Two sequences: the agent's and the one that recomputes for comparison. What is committed lives on in
  // blocks that no sequence holds at the moment, as long as nobody else needs them.
  auto cache = engine::open_cache(o.common, parts, most, 2);
  if (!cache) return cache.error();
  for (int i = 1; i <= o.steps; ++i) {
    step& s = steps.emplace_back();
    s.prompt = text.ids();
    // Opens with the whole history and computes what is not cached; commits prompt and answer when it is
    // done.
    auto with = engine::record(parts, **cache, s.prompt, engine::cache_scope::only("agent"), o.max_new,
                               o.common.chunk);
    if (!with) return with.error();
    s.with = std::move(*with);
    s.computed_without = i <= o.without || i == o.steps;
    if (s.computed_without) {
      const auto nobody = engine::cache_scope::only("nobody else " + std::to_string(i));
      auto without = engine::record(parts, **cache, s.prompt, nobody, o.max_new, o.common.chunk);
      if (!without) return without.error();
      s.without = std::move(*without);
    }
    text.continue_with(s.with.made.ids, report_of(i + 1));
  }
  return steps;
}

struct totals {
  std::vector<double> with, without;  ///< sums up to each step
  std::vector<bool> counted;          ///< without reuse: not computed in this run
};

totals add_up(const std::vector<step>& steps) {
  totals t;
  for (const step& s : steps) {
    t.with.push_back((t.with.empty() ? 0 : t.with.back()) + s.with.made.prefilled);
    t.without.push_back((t.without.empty() ? 0 : t.without.back()) + static_cast<double>(s.prompt.size()));
    t.counted.push_back(!s.computed_without);
  }
  return t;
}

void check(const options& o, engine::report& out, const std::vector<step>& steps, const totals& t) {
  bool equal = true;
  bool all = true;
  bool little = true;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const step& s = steps[i];
    if (s.computed_without) {
      equal = equal && s.with.same_answer(s.without);
      all = all && s.without.made.prefilled == static_cast<int>(s.prompt.size());
    }
    // The answer's last token was never computed, so it is new as well.
    const std::size_t known = i == 0 ? 0 : steps[i - 1].prompt.size() + steps[i - 1].with.made.ids.size() - 1;
    little = little &&
             s.with.made.prefilled <= static_cast<int>(s.prompt.size() - known) + o.common.block_size - 1;
  }
  out.claim("where both were computed, the answers are equal, from the same logits to the bit", equal);
  out.claim("without reuse every step computes its whole prompt", all);
  out.claim("with reuse every step computes what is new and at most " +
                std::to_string(o.common.block_size - 1) + " tokens more",
            little);
  const std::size_t half = steps.size() / 2 - 1;
  out.claim("twice the steps cost more than three times as much without reuse, less than 2.5 times with it",
            t.without.back() > 3 * t.without[half] && t.with.back() < 2.5 * t.with[half]);
}

engine::status write_plot(const options& o, const totals& t) {
  const engine::plot_text text{
      "Prompt tokens computed by an agent of " + std::to_string(t.with.size()) + " steps", "step",
      "prompt tokens computed so far",
      "filled: computed in this run; ring: counted (the length of the prompt)"};
  const engine::plot_line lines[] = {{"without reuse", "#d55e00", t.without, t.counted},
                                     {"with reuse", "#0072b2", t.with, {}}};
  std::ofstream file(o.plot, std::ios::binary);
  file << engine::svg_plot(text, lines);
  file.close();
  if (file) return {};
  engine::error e = engine::bad_input("cannot_write", "--plot", o.plot);
  e.file = o.plot;
  return e;
}

void print_steps(engine::report& out, const engine::loaded& parts, const std::vector<step>& steps) {
  out.print("%4s %8s %10s %10s %10s   %s\n", "step", "prompt", "with", "without", "", "answer");
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const step& s = steps[i];
    out.print("%4zu %8zu %10d %10zu %10s   %s\n", i + 1, s.prompt.size(), s.with.made.prefilled,
              s.prompt.size(), s.computed_without ? "computed" : "counted",
              engine::one_line(parts.text->decode(s.with.made.ids), 44).c_str());
    out.figures["steps"].push_back({{"prompt_tokens", s.prompt.size()},
                                    {"computed_with_reuse", s.with.made.prefilled},
                                    {"computed_without_reuse", s.prompt.size()},
                                    {"without_reuse_was_run", s.computed_without},
                                    {"first_token_seconds", s.with.made.prefill_seconds},
                                    {"ids", s.with.made.ids}});
  }
  out.print("\n");
}

engine::result<std::string> run(const options& o, engine::report& out) {
  auto parts = engine::load_model(o.common);
  if (!parts) return parts.error();
  const auto steps = run_steps(o, **parts);
  if (!steps) return steps.error();
  const totals t = add_up(*steps);
  if (!o.plot.empty()) {
    if (auto s = write_plot(o, t); !s) return s.error();
  }

  print_steps(out, **parts, *steps);
  check(o, out, *steps, t);
  const auto with = static_cast<std::int64_t>(t.with.back());
  const auto without = static_cast<std::int64_t>(t.without.back());
  const engine::recorded& first = steps->back().with;
  const engine::recorded& cold = steps->back().without;
  out.figures["tokens_with_reuse"] = with;
  out.figures["tokens_without_reuse"] = without;
  out.figures["last_step"] = {{"first_token_seconds_with_reuse", first.made.prefill_seconds},
                              {"first_token_seconds_without_reuse", cold.made.prefill_seconds}};
  return engine::formatted(
      "%d steps computed %s prompt tokens with reuse, %s without (%.1f times as many); first token of the "
      "last step after %.0f ms instead of %.0f",
      o.steps, engine::thousands(with).c_str(), engine::thousands(without).c_str(),
      t.without.back() / t.with.back(), first.made.prefill_seconds * 1e3, cold.made.prefill_seconds * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line(
      "An agent whose context grows by a tool's output in each step, with and without reuse.", "agent_loop");
  options o;
  o.common.cache = "paged";
  engine::add_common_options(line, o.common);
  line.add("--steps", o.steps, "steps of the agent", 4, 200);
  line.add("--new", o.max_new, "tokens of an answer", 1, 256);
  line.add("--without", o.without, "first steps that are also computed without reuse; the last one always is",
           0, 200);
  line.add("--plot", o.plot, "file for a plot (SVG)");
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
