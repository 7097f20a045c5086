// SPDX-License-Identifier: Apache-2.0
//
// kivi: why keys are packed along channels and values along tokens (Liu et al.: KIVI, A Tuning-Free
// Asymmetric 2bit Quantization for KV Cache, 2024, section 3). A group of values that share a scale is as
// coarse as its range is wide:
//
//              channels ->              per token    one scale along a row: as wide as the outlier channel
//   token 0    . . . # . . .            per channel  one scale down a column, inside a block
//   token 1    . . . # . . .            per head     one for all of this
//   token 2    . . . # . . .            per tensor   one for the heads of a layer
//
// The program takes K, V and Q of real text out of the model, packs K and V in all four ways with the same
// bits, and attends to what comes back. K is easy to judge: the smaller its own error, the smaller that of
// the scores. V is not. Per channel its own error is the smallest, and that of the output the largest: the
// first token has a V of almost nothing, most heads give it a large part of their attention, and a column's
// step is that of the other tokens. A figure about V alone ranks the formats wrongly; the first token kept
// exact puts them right.

#include <algorithm>
#include <cmath>
#include <fstream>

#include "attention.hpp"
#include "plot.hpp"
#include "policies.hpp"

namespace {

using kivi::layer_values;
using kivi::values;
using kvcache::scale_axis;
constexpr scale_axis axes[] = {scale_axis::tensor, scale_axis::head, scale_axis::token, scale_axis::channel};
constexpr const char* axis_names[] = {"tensor", "head", "token", "channel"};
constexpr int by_token = 2, by_channel = 3;

struct options : policies::options {
  int tokens = 512;
  int layer = 16;
  std::string plot;
};

/// Relative errors, means over the layers.
struct errors {
  double k[4]{}, weights[4]{}, v[4]{};  // by axis
  double output[5][5]{};                // by axis of K and of V; 4: exact
  double exempt_v = 0, exempt_output = 0;

  void divide(double by) {
    for (auto* all : {&k, &weights, &v}) {
      for (double& one : *all) one /= by;
    }
    for (auto& row : output) {
      for (double& one : row) one /= by;
    }
    exempt_v /= by;
    exempt_output /= by;
  }
};

errors measure(const engine::kv_shape& shape, const std::vector<layer_values>& layers, int tokens,
               kvcache::code codes) {
  errors out;
  int n = 0;
  for (std::size_t l = 0; l < layers.size(); l += 3) {
    const layer_values& at = layers[l];
    values weights[5], v[5];
    weights[4] = kivi::weights_of(shape, at.q, at.k, tokens);
    v[4] = at.v;
    for (int a = 0; a < 4; ++a) {
      const kvcache::side_format f{.codes = codes, .axis = axes[a]};
      const values k = kivi::packed(f, shape, true, at.k);
      weights[a] = kivi::weights_of(shape, at.q, k, tokens);
      v[a] = kivi::packed(f, shape, false, at.v);
      out.k[a] += kivi::error_of(at.k, k);
      out.weights[a] += kivi::error_of(weights[4], weights[a]);
      out.v[a] += kivi::error_of(at.v, v[a]);
    }
    const values right = kivi::output_of(shape, weights[4], at.v, tokens);
    const auto output = [&](int k, const values& of) {
      return kivi::error_of(right, kivi::output_of(shape, weights[k], of, tokens));
    };
    for (int a = 0; a < 4; ++a) {
      out.output[a][4] += output(a, v[4]);
      out.output[4][a] += output(4, v[a]);
    }
    for (const int k : {by_token, by_channel}) {
      for (const int of : {by_token, by_channel}) out.output[k][of] += output(k, v[of]);
    }
    const values spared = kivi::packed({.codes = codes, .axis = scale_axis::channel}, shape, false, at.v, 1);
    out.exempt_v += kivi::error_of(at.v, spared);
    out.exempt_output += output(4, spared);
    ++n;
  }
  out.divide(n);
  return out;
}

/// Mean magnitude of the channels of one head.
std::vector<double> channels_of(const values& of, int head, int tokens, int dim) {
  std::vector<double> out(static_cast<std::size_t>(dim));
  const float* at = of.data() + head * tokens * dim;
  for (int i = 0; i < tokens * dim; ++i)
    out[static_cast<std::size_t>(i % dim)] += std::abs(double{at[i]}) / tokens;
  return out;
}

/// The channels of the first head as a line for each of K before and after RoPE and V: '@' is the largest.
/// Returns by how much K's largest channel exceeds its middle one.
double draw(engine::report& out, const layer_values& at, int layer, int tokens, int dim) {
  constexpr std::string_view shades = " .:-=+*#%@";
  double outlier = 0;
  const std::pair<const char*, const values*> all[] = {
      {"K before RoPE", &at.k_before}, {"K", &at.k}, {"V", &at.v}};
  for (const auto& [name, of] : all) {
    const auto mean = channels_of(*of, 0, tokens, dim);
    const double top = *std::max_element(mean.begin(), mean.end());
    std::string line;
    for (const double m : mean) line += shades[static_cast<std::size_t>(m / top * 9)];
    const double times = top / engine::median(mean);
    if (of == &at.k) outlier = times;
    out.print("  layer %2d %-13s |%s| largest %5.2f, %4.1f times the middle one\n", layer, name, line.c_str(),
              top, times);
    out.figures["channels"].push_back({{"layer", layer}, {"of", name}, {"mean", mean}});
  }
  return outlier;
}

engine::status write_plot(const options& o, const layer_values& at, int dim) {
  const engine::plot_line lines[] = {{"", "#e69f00", channels_of(at.k_before, 0, o.tokens, dim), {}},
                                     {"K", "#0072b2", channels_of(at.k, 0, o.tokens, dim), {}},
                                     {"V", "#009e73", channels_of(at.v, 0, o.tokens, dim), {}}};
  std::ofstream file(o.plot);
  file << engine::svg_plot(
      {"Channels of layer " + std::to_string(o.layer) + ", first head", "channel", "mean magnitude",
       engine::thousands(o.tokens) + " tokens of text; orange: K before RoPE"},
      lines);
  file.close();
  if (!file) return engine::bad_input("cannot_write", "--plot", o.plot);
  return {};
}

void show(engine::report& out, const errors& e, int bits) {
  out.print("\n%d bits; a scale per   K error  weights   output  |  V error   output\n", bits);
  for (int a = 0; a < 4; ++a) {
    out.print("  %-20s %7.3f  %7.3f  %7.3f  |  %7.3f  %7.3f\n", axis_names[a], e.k[a], e.weights[a],
              e.output[a][4], e.v[a], e.output[4][a]);
    out.figures["errors"].push_back({{"bits", bits},
                                     {"axis", axis_names[a]},
                                     {"k", e.k[a]},
                                     {"weights", e.weights[a]},
                                     {"output_k", e.output[a][4]},
                                     {"v", e.v[a]},
                                     {"output_v", e.output[4][a]}});
  }
  out.print("  %-20s %25s  |  %7.3f  %7.3f\n", "channel, first exact", "", e.exempt_v, e.exempt_output);
  for (const int k : {by_token, by_channel}) {
    out.print("  output, K per %-7s with V per token %.3f, V per channel %.3f\n", axis_names[k],
              e.output[k][by_token], e.output[k][by_channel]);
  }
}

bool keys_want_channels(const errors& e) {
  bool holds = true;
  for (const int a : {0, 1, by_token}) {
    holds = holds && 2 * e.k[by_channel] < e.k[a] && 2 * e.weights[by_channel] < e.weights[a] &&
            2 * e.output[by_channel][4] < e.output[a][4];
  }
  return holds;
}

engine::result<std::string> run(const options& o, engine::report& out) {
  if (o.tokens % kivi::block != 0)
    return engine::bad_input("bad_value", "--tokens", std::to_string(o.tokens) + ", not a multiple of 64");
  const auto w = policies::open_world(o, o.tokens, o.tokens, 1);
  if (!w) return w.error();
  auto text = policies::begin(*w, "full");
  if (!text) return text.error();
  if (const auto room = text->extend(o.tokens); !room) return room.error();
  kivi::recorder seen(w->cache->backend(), w->shape(), o.tokens);
  const engine::step_segment all{text->slot(), 0, o.tokens};
  if (auto s = w->model().forward(w->text, {&all, 1}, {}, seen, {}); !s) return s.error();
  const int last = w->shape().layers - 1;
  if (!o.plot.empty() && o.layer > last)
    return engine::bad_input("bad_value", "--layer", std::to_string(o.layer));

  out.print("mean magnitude of each channel of the first head over %d tokens\n", o.tokens);
  double outlier = 1e9;
  for (const int layer : {last / 6, last / 2, last * 14 / 15}) {
    const auto& at = seen.layers[static_cast<std::size_t>(layer)];
    outlier = std::min(outlier, draw(out, at, layer, o.tokens, w->shape().head_dim));
  }
  if (!o.plot.empty()) {
    const auto& at = seen.layers[static_cast<std::size_t>(o.layer)];
    if (auto s = write_plot(o, at, w->shape().head_dim); !s) return s.error();
  }
  const errors four = measure(w->shape(), seen.layers, o.tokens, kvcache::code::int4);
  const errors two = measure(w->shape(), seen.layers, o.tokens, kvcache::code::int2);
  show(out, four, 4);
  show(out, two, 2);
  const auto both = [&](auto holds) { return holds(four) && holds(two); };
  out.claim("a channel of K is at least five times the middle one, in each of the layers shown", outlier > 5);
  out.claim("K per channel halves the error of K, weights and output, at 4 and at 2 bits",
            both(keys_want_channels));
  out.claim("V per channel has the smallest error of V", both([](const errors& e) {
              return e.v[by_channel] < 0.9 * std::min({e.v[0], e.v[1], e.v[by_token]});
            }));
  out.claim("and yet the output is at least a quarter further off than with V per token",
            both([](const errors& e) { return e.output[4][by_channel] > 1.25 * e.output[4][by_token]; }));
  out.claim("the first token alone made it so: exact, it leaves V per channel the better one",
            both([](const errors& e) {
              return e.exempt_v > 0.95 * e.v[by_channel] && e.exempt_output < e.output[4][by_token];
            }));
  out.claim("K per channel with V per token is the best of the four pairs", both([](const errors& e) {
              const double best = 1.1 * e.output[by_channel][by_token];
              return best < std::min({e.output[by_token][by_token], e.output[by_token][by_channel],
                                      e.output[by_channel][by_channel]});
            }));
  return engine::formatted(
      "error of the output at 4 bits: K per channel %.3f, per token %.3f; V per token %.3f (its own error "
      "%.3f), per channel %.3f (%.3f), with the first token exact %.3f",
      four.output[by_channel][4], four.output[by_token][4], four.output[4][by_token], four.v[by_token],
      four.output[4][by_channel], four.v[by_channel], four.exempt_output);
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("Why keys are packed per channel and values per token.", "kivi");
  options o;
  policies::add_options(line, o, true);
  line.add("--tokens", o.tokens, "tokens of text, a multiple of 64", 128, 2048);
  line.add("--layer", o.layer, "the layer of the plot", 0, 1 << 20);
  line.add("--plot", o.plot, "write the channels of a layer to this file, as SVG");
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
