// SPDX-License-Identifier: Apache-2.0
// Which regime are you in: what a decode step of Llama 3 8B reads, weights against cache, and what fewer bits
// of the one or the other bring. Writes the tables of docs/regime.md.
//
//   quant_regime                    the tables
//   quant_regime --compare PAGE     fails unless PAGE has every line of them
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>

#include "kvcache/plan.hpp"
#include "kvcache/quant/presets.hpp"

namespace kvc = kvcache;

namespace {

constexpr kvc::group_shape llama{.layers = 32, .kv_heads = 8, .head_dim_k = 128, .head_dim_v = 128};
constexpr int64_t parameters = 8'030'261'248;
constexpr int32_t block_size = 64;

std::string number(double x, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, x);
  return text;
}

/// Bytes of the packed cache relative to 16 bits; 1 for no format.
double cache_factor(const char* preset) {
  const kvc::format_preset* p = kvc::find_preset(preset);
  if (p == nullptr) return 1;
  const kvc::bytes packed = kvc::parts_of({&p->format, 1}, llama, block_size).total();
  return static_cast<double>(packed.count) /
         static_cast<double>(kvc::bytes_per_token(llama).count * block_size);
}

kvc::step_traffic step_of(int32_t batch, int32_t context) {
  return kvc::decode_step(llama, kvc::weight_bytes(parameters, 16), batch, context);
}

/// How many times the weights the cache is.
void write_ratios(std::ostream& out) {
  out << "| batch | 1k | 2k | 4k | 8k | 16k | 32k | 64k | 128k |\n|---|---|---|---|---|---|---|---|---|\n";
  for (int32_t batch = 1; batch <= 128; batch *= 2) {
    out << "| " << batch;
    for (int32_t context = 1024; context <= 131072; context *= 2) {
      const kvc::step_traffic step = step_of(batch, context);
      const bool cache = step.dominated_by() == kvc::regime::cache_dominated;
      out << " | " << (cache ? "**" : "") << number(step.cache_over_weights(), 2) << (cache ? "**" : "");
    }
    out << " |\n";
  }
}

/// Bytes of a step relative to 16 bits for both.
void write_factors(std::ostream& out, int32_t batch, int32_t context) {
  struct weights {
    const char* text;
    double bits;
  };
  // 4-bit weights in groups of 128 with a 16-bit scale and a 4-bit zero each.
  constexpr weights rows[] = {{"16 bits", 16},
                              {"int8 (SmoothQuant), fp8", 8},
                              {"4 bits, groups of 128 (GPTQ, AWQ)", 4 + 20.0 / 128},
                              {"nothing", 0}};
  constexpr const char* columns[] = {"", "kv8", "fp8", "kv4", "kv2"};
  out << "| batch " << batch << " x " << context / 1024
      << "k: weights | cache 16 bits | kv8 | fp8 | kv4 | kv2 |\n|---|---|---|---|---|---|\n";
  const kvc::step_traffic step = step_of(batch, context);
  for (const weights& w : rows) {
    out << "| " << w.text;
    for (const char* c : columns) out << " | " << number(step.factor(w.bits / 16, cache_factor(c)), 2);
    out << " |\n";
  }
}

std::string tables() {
  std::ostringstream out;
  write_ratios(out);
  for (const auto& [batch, context] : {std::pair{1, 8192}, {8, 8192}, {32, 8192}, {32, 32768}}) {
    out << "\n";
    write_factors(out, batch, context);
  }
  return out.str();
}

int compare(const std::string& want, const char* path) {
  std::ifstream file(path);
  const std::string page((std::istreambuf_iterator<char>(file)), {});
  std::istringstream lines(want);
  int missing = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || page.find(line + "\n") != std::string::npos) continue;
    std::cerr << path << " lacks: " << line << "\n";
    ++missing;
  }
  return missing == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string text = tables();
  if (argc == 3 && std::strcmp(argv[1], "--compare") == 0) return compare(text, argv[2]);
  if (argc != 1) {
    std::cerr << "usage: quant_regime [--compare PAGE]\n";
    return 2;
  }
  std::cout << text;
  return 0;
}
