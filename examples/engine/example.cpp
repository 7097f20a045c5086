// SPDX-License-Identifier: Apache-2.0
#include "example.hpp"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <numeric>

#include "scheduler.hpp"

namespace engine {

void report::print(const char* format, ...) const {
  if (options_->as_json) return;
  std::va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
}

void report::claim(const std::string& what, bool holds) {
  claims_.push_back({{"claim", what}, {"holds", holds}});
  if (!holds) failed_.push_back(what);
  print("%s %s\n", holds ? "  holds:" : "  FAILS:", what.c_str());
}

json report::finish(const std::string& name, const std::string& last_line) const {
  json document;
  if (all_hold()) {
    document = {{"schema", "kvcache.example." + name + ".v1"}};
    print("%s: %s\n", name.c_str(), last_line.c_str());
  } else {
    const error e = cannot_run("claim_fails", "claim", failed_.front());
    document = to_json(e);
    if (!options_->as_json) std::fprintf(stderr, "error: %s\n", describe(e).c_str());
    print("%s: FAILED, %zu of %zu claims\n", name.c_str(), failed_.size(), claims_.size());
  }
  document.update(figures);
  document["claims"] = claims_;
  document["result"] = all_hold() ? json(last_line) : json(nullptr);
  return document;
}

int run_example(command_line& line, int argc, char** argv, const common_options& options,
                const std::function<result<std::string>(report&)>& body) {
  report out(options);
  const int code = run_program(line, argc, argv, options, [&]() -> result<json> {
    const auto last_line = body(out);
    if (!last_line) return last_line.error();
    return out.finish(line.name(), *last_line);
  });
  return code == 0 && !out.all_hold() ? static_cast<int>(failure::cannot_run) : code;
}

result<recorded> record(loaded& parts, cache_kind& cache, std::span<const token_id> prompt,
                        const cache_scope& scope, int max_new, int chunk, const sampling& how) {
  recorded out;
  out.bits = chain_start;
  generation_options options;
  options.max_new = max_new;
  options.chunk = chunk;
  options.how = how;
  options.stop_at_end = false;
  auto made = generate(
      *parts.model, cache, prompt, scope, options, [](token_id) { return false; }, [](token_id) {},
      [&](int, std::span<const float> logits) { out.bits = chain(out.bits, fingerprint(logits)); });
  if (!made) return made.error();
  out.made = std::move(*made);
  return out;
}

status advance(llama_model& model, cache_kind& cache, std::span<const int> slots,
               std::span<const token_id> tokens, std::vector<float>& logits) {
  std::vector<step_segment> segments;
  for (const int slot : slots) {
    if (const auto room = cache.extend(slot, 1); !room) return room.error();
    segments.push_back({slot, cache.length(slot), 1});
  }
  std::vector<int> rows(slots.size());
  std::iota(rows.begin(), rows.end(), 0);
  logits.resize(slots.size() * static_cast<std::size_t>(model.shape().vocabulary));
  return model.forward(tokens, segments, rows, cache.backend(), logits);
}

std::span<const float> row_of(std::span<const float> logits, const llama_model& model, std::size_t row) {
  const auto width = static_cast<std::size_t>(model.shape().vocabulary);
  return logits.subspan(row * width, width);
}

damage compare(const llama_model& model, std::span<const float> right, std::span<const float> got,
               std::span<const token_id> text) {
  damage out;
  const auto rows = static_cast<double>(text.size());
  for (std::size_t row = 0; row < text.size(); ++row) {
    const auto a = row_of(right, model, row);
    const auto b = row_of(got, model, row);
    const double sum_a = log_sum_exp(a);
    const double sum_b = log_sum_exp(b);
    double kl = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double log_p = a[i] - sum_a;
      kl += std::exp(log_p) * (log_p - (b[i] - sum_b));
      out.difference = std::max(out.difference, std::abs(double(a[i]) - double(b[i])));
    }
    out.kl += kl / rows;
    out.same_choice += (greedy(a) == greedy(b) ? 1 : 0) / rows;
    if (row + 1 < text.size()) out.nll += (sum_b - b[static_cast<std::size_t>(text[row + 1])]) / (rows - 1);
  }
  return out;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string formatted(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::va_list again;
  va_copy(again, arguments);
  std::string out(static_cast<std::size_t>(std::max(0, std::vsnprintf(nullptr, 0, format, arguments))), ' ');
  va_end(arguments);
  std::vsnprintf(out.data(), out.size() + 1, format, again);
  va_end(again);
  return out;
}

std::string thousands(std::int64_t n) {
  std::string text = std::to_string(n);
  const int first = n < 0 ? 1 : 0;
  for (int at = static_cast<int>(text.size()) - 3; at > first; at -= 3)
    text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

std::string one_line(std::string text, std::size_t most) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  if (text.size() <= most) return text;
  std::size_t end = most;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0u) == 0x80u) --end;
  return text.substr(0, end) + "...";
}

}  // namespace engine
