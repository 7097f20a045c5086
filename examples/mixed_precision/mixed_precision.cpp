// SPDX-License-Identifier: Apache-2.0
//
// mixed_precision: a format per layer. Layers do not suffer alike from rounding, so the same bytes may do
// less harm when they are not shared out evenly:
//
//   measure    pack one group of layers in 3 bits, leave the others in f16: what does the text lose?
//   exchange   give the group that loses most one bit more, and take it from the one that loses least, as
//              long as that should pay
//   compare    on text that was not measured: even bits, the exchange, and the exchange the wrong way round
//
// One bit less quadruples the squared error, one bit more quarters it. So a pair should pay where the one
// loses more than four times what the other does: 3/4 of the larger loss is saved, 3 times the smaller added.

#include <algorithm>
#include <numeric>

#include "kvcache/quant/format.hpp"
#include "packed_blocks.hpp"
#include "policies.hpp"

namespace {

using kvcache::kv_format;

struct options : policies::options {
  int prompt = 128;
  int score = 128;
  int groups = 15;
};

/// One way to share out the bits: codes of every group of layers.
struct plan {
  std::string name;
  std::vector<int> bits;  // [groups], 16 = as written
};

struct outcome {
  std::size_t held = 0;
  std::vector<float> rows;
};

/// K and V of so many bits, otherwise as the preset kv4.
engine::result<kv_format> format_of(int bits) {
  const std::string b = std::to_string(bits);
  const auto how =
      engine::parse_cache_policy(bits == 16 ? "k16v16:hadamard=both,exempt=1"
                                            : "k" + b + "v" + b + ":group=0/64,hadamard=both,exempt=1");
  if (!how) return how.error();
  return how->format;
}

/// Logits of the scored tokens behind `first`, read from a cache with these formats from the first token on.
engine::result<outcome> read_text(const options& o, const policies::world& w, const plan& p, int first) {
  engine::cache_config config;
  config.shape = w.shape();
  config.type = engine::kv_type_of(o.common.type);
  config.block_size = o.common.block_size;
  config.max_tokens = o.prompt + o.score;
  config.pool = &w.parts->pool;
  config.step_tokens = o.common.chunk + 2;
  const bool packs = std::any_of(p.bits.begin(), p.bits.end(), [](int b) { return b != 16; });
  for (int layer = 0; packs && layer < w.shape().layers; ++layer) {
    const auto group = static_cast<std::size_t>(layer * o.groups / w.shape().layers);
    const auto f = format_of(p.bits[group]);
    if (!f) return f.error();
    config.formats.push_back(*f);
  }
  auto cache = engine::session_cache::create(config);
  if (!cache) return cache.error();
  auto s = engine::session::create(w.model(), **cache, {}, {.chunk = o.common.chunk});
  if (!s) return s.error();
  const auto text = std::span(w.text).subspan(static_cast<std::size_t>(first));
  if (auto done = s->feed(text.first(static_cast<std::size_t>(o.prompt)), engine::observe::last); !done)
    return done.error();
  auto rows = s->feed(text.subspan(static_cast<std::size_t>(o.prompt), static_cast<std::size_t>(o.score)));
  if (!rows) return rows.error();
  return outcome{s->bytes_held(), std::move(*rows)};
}

/// Divergence of a plan from f16, on the text from `first` on.
engine::result<double> loss_of(const options& o, const policies::world& w, const plan& p, int first,
                               const outcome& f16, std::size_t* held = nullptr) {
  const auto made = read_text(o, w, p, first);
  if (!made) return made.error();
  if (held != nullptr) *held = made->held;
  const auto scored = std::span(w.text).subspan(static_cast<std::size_t>(first + o.prompt),
                                                static_cast<std::size_t>(o.score));
  return engine::compare(w.model(), f16.rows, made->rows, scored).kl;
}

plan even(const options& o, int bits) {
  return {std::to_string(bits) + " bits everywhere",
          std::vector<int>(static_cast<std::size_t>(o.groups), bits)};
}

/// Pairs of groups that should exchange a bit: the largest loss with the smallest, and so on.
std::vector<std::pair<std::size_t, std::size_t>> pairs_that_pay(const std::vector<double>& loss) {
  std::vector<std::size_t> order(loss.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return loss[a] > loss[b]; });
  std::vector<std::pair<std::size_t, std::size_t>> out;
  for (std::size_t i = 0; i < order.size() / 2; ++i) {
    const std::size_t most = order[i], least = order[order.size() - 1 - i];
    if (0.75 * loss[most] > 3 * loss[least]) out.emplace_back(most, least);
  }
  return out;
}

engine::result<std::vector<double>> measure(const options& o, engine::report& out, const policies::world& w) {
  const auto f16 = read_text(o, w, even(o, 16), 0);
  if (!f16) return f16.error();
  out.print("one group of layers in 3 bits, the others in f16\n");
  std::vector<double> loss;
  for (int g = 0; g < o.groups; ++g) {
    plan alone = even(o, 16);
    alone.bits[static_cast<std::size_t>(g)] = 3;
    const auto kl = loss_of(o, w, alone, 0, *f16);
    if (!kl) return kl.error();
    loss.push_back(*kl);
    const int layers = w.shape().layers;
    // The layers l with l * groups / layers == g.
    const int first = (g * layers + o.groups - 1) / o.groups, last = ((g + 1) * layers - 1) / o.groups;
    out.print("  layers %2d to %2d   KL %.5f\n", first, last, *kl);
    out.figures["alone"].push_back({{"first", first}, {"last", last}, {"kl", *kl}});
  }
  return loss;
}

engine::result<std::string> run(const options& o, engine::report& out) {
  const int span = o.prompt + o.score;
  const auto w = policies::open_world(o, 2 * span, 2 * span, 1);
  if (!w) return w.error();
  const auto loss = measure(o, out, *w);
  if (!loss) return loss.error();
  const auto pairs = pairs_that_pay(*loss);
  plan all[] = {even(o, 4), even(o, 4), even(o, 4)};
  all[1].name = "exchanged";
  all[2].name = "the wrong way round";
  for (const auto& [most, least] : pairs) {
    all[1].bits[most] = all[2].bits[least] = 5;
    all[1].bits[least] = all[2].bits[most] = 3;
  }
  const auto f16 = read_text(o, *w, even(o, 16), span);
  if (!f16) return f16.error();
  out.print("\n%zu pairs should pay; on the next %d tokens:\n", pairs.size(), o.score);
  double kl[3] = {};
  std::size_t held[3] = {};
  for (int i = 0; i < 3; ++i) {
    const auto found = loss_of(o, *w, all[i], span, *f16, &held[i]);
    if (!found) return found.error();
    kl[i] = *found;
    std::string bits;
    for (const int b : all[i].bits) bits += std::to_string(b) + " ";
    out.print("  %-20s %s  KL %.5f  %s\n", all[i].name.c_str(), bits.c_str(), kl[i],
              policies::mebibytes(held[i]).c_str());
    out.figures["plans"].push_back(
        {{"plan", all[i].name}, {"bits", all[i].bits}, {"kl", kl[i]}, {"bytes", held[i]}});
  }
  out.claim("all three take the same bytes", held[0] == held[1] && held[0] == held[2]);
  out.claim("the exchange does not lose more than even bits, by a tenth at most", kl[1] <= 1.1 * kl[0]);
  if (!pairs.empty()) out.claim("the wrong way round it loses half as much again", kl[2] >= 1.5 * kl[0]);
  const auto [low, high] = std::minmax_element(loss->begin(), loss->end());
  return engine::formatted(
      "a group of layers loses %.5f to %.5f; %zu pairs exchange a bit: KL %.5f instead of %.5f, %.5f the "
      "wrong way round, %s each",
      *low, *high, pairs.size(), kl[1], kl[0], kl[2], policies::mebibytes(held[0]).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("A format per layer: bits where they are missed most.", "mixed_precision");
  options o;
  o.common.type = "f16";
  o.common.block_size = 64;
  policies::add_options(line, o, true);
  line.add("--prompt", o.prompt, "tokens before the scored ones", 64, 1024);
  line.add("--score", o.score, "tokens that are scored", 2, 1024);
  line.add("--groups", o.groups, "groups of layers", 2, 64);
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
