// SPDX-License-Identifier: Apache-2.0
#include "plan/catalogue.hpp"

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace kvcache::cli {
namespace {

using arch = architecture;

// A decoder of the Llama kind.
constexpr arch llama(const char* name, double billions, std::int32_t layers, std::int32_t hidden,
                     std::int32_t q_heads, std::int32_t kv_heads, std::int32_t head_dim, std::int32_t ffn,
                     std::int32_t vocabulary, std::int32_t context, bool tied = false) {
  arch a;
  a.name = name;
  a.layers = layers;
  a.hidden = hidden;
  a.q_heads = q_heads;
  a.kv_heads = kv_heads;
  a.head_dim = head_dim;
  a.ffn = ffn;
  a.vocabulary = vocabulary;
  a.tied = tied;
  a.context = context;
  a.stated_billions = billions;
  return a;
}

constexpr arch windowed(arch a, std::int32_t window, std::int32_t full_every = 0) {
  a.window = window;
  a.full_every = full_every;
  return a;
}

// All layers from `dense` on have `experts` of which `used` see a token.
constexpr arch mixture(arch a, std::int32_t experts, std::int32_t used, std::int32_t expert_ffn,
                       std::int32_t shared_ffn = 0, std::int32_t dense = 0) {
  a.experts = experts;
  a.experts_used = used;
  a.expert_ffn = expert_ffn;
  a.shared_ffn = shared_ffn;
  a.dense_layers = dense;
  return a;
}

constexpr arch qwen2(arch a) {
  a.qkv_bias = true;
  return a;
}

constexpr arch qwen3(arch a) {
  a.head_norm = true;
  return a;
}

constexpr arch gemma(arch a, std::int32_t norms, bool head_norm) {
  a.tied = true;
  a.norms = norms;
  a.head_norm = head_norm;
  return a;
}

constexpr arch gpt_oss(arch a) {
  a.qkv_bias = a.output_bias = a.ffn_bias = a.sinks = true;
  a.published_bits = 4.25;
  return a;
}

// Latent attention: 512 + 64 values per token and layer.
constexpr arch latent(arch a, std::int32_t q_latent, bool router_bias, double published_bits = 16) {
  a.latent = 512;
  a.rope_dim = 64;
  a.nope_dim = 128;
  a.v_dim = 128;
  a.q_latent = q_latent;
  a.router_bias = router_bias;
  a.published_bits = published_bits;
  return a;
}

constexpr arch opt(arch a) {
  a.tied = a.qkv_bias = a.output_bias = a.ffn_bias = a.norm_bias = a.plain_ffn = true;
  a.learned_positions = 2050;
  return a;
}

constexpr arch wide_norm(arch a) {
  a.wide_norm = true;
  return a;
}

constexpr arch one_norm(arch a) {
  a.norms = 1;
  return a;
}

//      name, parameters in 10^9; layers, hidden, q heads, kv heads, head dim, ffn, vocabulary, context, tied
constexpr arch models[] = {
    // Llama (meta-llama/*)
    llama("llama-1-7b", 6.738, 32, 4096, 32, 32, 128, 11008, 32000, 2048),
    llama("llama-1-65b", 65.286, 80, 8192, 64, 64, 128, 22016, 32000, 2048),
    llama("llama-2-7b", 6.738, 32, 4096, 32, 32, 128, 11008, 32000, 4096),
    llama("llama-2-13b", 13.016, 40, 5120, 40, 40, 128, 13824, 32000, 4096),
    llama("llama-2-70b", 68.977, 80, 8192, 64, 8, 128, 28672, 32000, 4096),
    llama("codellama-34b", 33.744, 48, 8192, 64, 8, 128, 22016, 32000, 16384),
    llama("llama-3-8b", 8.030, 32, 4096, 32, 8, 128, 14336, 128256, 8192),
    llama("llama-3-70b", 70.554, 80, 8192, 64, 8, 128, 28672, 128256, 8192),
    llama("llama-3.1-8b", 8.030, 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    llama("llama-3.1-70b", 70.554, 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    llama("llama-3.1-405b", 405.853, 126, 16384, 128, 8, 128, 53248, 128256, 131072),
    llama("llama-3.2-1b", 1.236, 16, 2048, 32, 8, 64, 8192, 128256, 131072, true),
    llama("llama-3.2-3b", 3.213, 28, 3072, 24, 8, 128, 8192, 128256, 131072, true),
    llama("llama-3.3-70b", 70.554, 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    llama("tinyllama-1.1b", 1.100, 22, 2048, 32, 4, 64, 5632, 32000, 2048),

    // Mistral AI (mistralai/*)
    windowed(llama("mistral-7b-v0.1", 7.242, 32, 4096, 32, 8, 128, 14336, 32000, 32768), 4096),
    llama("mistral-7b-v0.2", 7.242, 32, 4096, 32, 8, 128, 14336, 32000, 32768),
    llama("mistral-7b-v0.3", 7.248, 32, 4096, 32, 8, 128, 14336, 32768, 32768),
    llama("mistral-nemo-12b", 12.248, 40, 5120, 32, 8, 128, 14336, 131072, 131072),
    llama("mistral-small-24b", 23.572, 40, 5120, 32, 8, 128, 32768, 131072, 32768),
    llama("mistral-large-123b", 122.610, 88, 12288, 96, 8, 128, 28672, 32768, 131072),
    mixture(llama("mixtral-8x7b", 46.703, 32, 4096, 32, 8, 128, 0, 32000, 32768), 8, 2, 14336),
    mixture(llama("mixtral-8x22b", 140.621, 56, 6144, 48, 8, 128, 0, 32000, 65536), 8, 2, 16384),

    // Qwen (Qwen/*)
    qwen2(llama("qwen2.5-0.5b", 0.494, 24, 896, 14, 2, 64, 4864, 151936, 32768, true)),
    qwen2(llama("qwen2.5-1.5b", 1.544, 28, 1536, 12, 2, 128, 8960, 151936, 32768, true)),
    qwen2(llama("qwen2.5-3b", 3.086, 36, 2048, 16, 2, 128, 11008, 151936, 32768, true)),
    qwen2(llama("qwen2.5-7b", 7.616, 28, 3584, 28, 4, 128, 18944, 152064, 32768)),
    qwen2(llama("qwen2.5-14b", 14.770, 48, 5120, 40, 8, 128, 13824, 152064, 32768)),
    qwen2(llama("qwen2.5-32b", 32.764, 64, 5120, 40, 8, 128, 27648, 152064, 32768)),
    qwen2(llama("qwen2.5-72b", 72.706, 80, 8192, 64, 8, 128, 29568, 152064, 32768)),
    qwen3(llama("qwen3-0.6b", 0.596, 28, 1024, 16, 8, 128, 3072, 151936, 40960, true)),
    qwen3(llama("qwen3-1.7b", 1.721, 28, 2048, 16, 8, 128, 6144, 151936, 40960, true)),
    qwen3(llama("qwen3-4b", 4.022, 36, 2560, 32, 8, 128, 9728, 151936, 40960, true)),
    qwen3(llama("qwen3-8b", 8.191, 36, 4096, 32, 8, 128, 12288, 151936, 40960)),
    qwen3(llama("qwen3-14b", 14.768, 40, 5120, 40, 8, 128, 17408, 151936, 40960)),
    qwen3(llama("qwen3-32b", 32.762, 64, 5120, 64, 8, 128, 25600, 151936, 40960)),
    mixture(qwen3(llama("qwen3-30b-a3b", 30.532, 48, 2048, 32, 4, 128, 0, 151936, 40960)), 128, 8, 768),
    mixture(qwen3(llama("qwen3-235b-a22b", 235.094, 94, 4096, 64, 4, 128, 0, 151936, 40960)), 128, 8, 1536),
    mixture(qwen3(llama("qwen3-coder-480b-a35b", 480.155, 62, 6144, 96, 8, 128, 0, 151936, 262144)), 160, 8,
            2560),

    // Gemma (google/*), the language model without the vision tower
    gemma(llama("gemma-2b", 2.506, 18, 2048, 8, 1, 256, 16384, 256000, 8192), 2, false),
    gemma(llama("gemma-7b", 8.538, 28, 3072, 16, 16, 256, 24576, 256000, 8192), 2, false),
    windowed(gemma(llama("gemma-2-2b", 2.614, 26, 2304, 8, 4, 256, 9216, 256000, 8192), 4, false), 4096, 2),
    windowed(gemma(llama("gemma-2-9b", 9.242, 42, 3584, 16, 8, 256, 14336, 256000, 8192), 4, false), 4096, 2),
    windowed(gemma(llama("gemma-2-27b", 27.227, 46, 4608, 32, 16, 128, 36864, 256000, 8192), 4, false), 4096,
             2),
    windowed(gemma(llama("gemma-3-270m", 0.268, 18, 640, 4, 1, 256, 2048, 262144, 32768), 4, true), 512, 6),
    windowed(gemma(llama("gemma-3-1b", 1.000, 26, 1152, 4, 1, 256, 6912, 262144, 32768), 4, true), 512, 6),
    windowed(gemma(llama("gemma-3-4b", 3.884, 34, 2560, 8, 4, 256, 10240, 262208, 131072), 4, true), 1024, 6),
    windowed(gemma(llama("gemma-3-12b", 11.771, 48, 3840, 16, 8, 256, 15360, 262208, 131072), 4, true), 1024,
             6),
    windowed(gemma(llama("gemma-3-27b", 27.016, 62, 5376, 32, 16, 128, 21504, 262208, 131072), 4, true), 1024,
             6),

    // gpt-oss (openai/*); windows of 128 in the first, third, ... layer
    windowed(
        gpt_oss(mixture(llama("gpt-oss-20b", 20.91, 24, 2880, 64, 8, 64, 0, 201088, 131072), 32, 4, 2880)),
        128, 2),
    windowed(
        gpt_oss(mixture(llama("gpt-oss-120b", 116.83, 36, 2880, 64, 8, 64, 0, 201088, 131072), 128, 4, 2880)),
        128, 2),

    // DeepSeek (deepseek-ai/*) and its architecture elsewhere (moonshotai/*)
    latent(mixture(llama("deepseek-v2-lite", 15.706, 27, 2048, 16, 16, 192, 10944, 102400, 163840), 64, 6,
                   1408, 2816, 1),
           0, false),
    latent(mixture(llama("deepseek-v2", 235.741, 60, 5120, 128, 128, 192, 12288, 102400, 163840), 160, 6,
                   1536, 3072, 1),
           1536, false),
    latent(mixture(llama("deepseek-v3", 671.026, 61, 7168, 128, 128, 192, 18432, 129280, 163840), 256, 8,
                   2048, 2048, 3),
           1536, true, 8),
    latent(mixture(llama("deepseek-r1", 671.026, 61, 7168, 128, 128, 192, 18432, 129280, 163840), 256, 8,
                   2048, 2048, 3),
           1536, true, 8),
    latent(mixture(llama("kimi-k2", 1026.408, 61, 7168, 64, 64, 192, 18432, 163840, 131072), 384, 8, 2048,
                   2048, 1),
           1536, true, 8),

    // Phi (microsoft/*)
    windowed(llama("phi-3-mini-4k", 3.821, 32, 3072, 32, 32, 96, 8192, 32064, 4096), 2047),
    llama("phi-3-mini-128k", 3.821, 32, 3072, 32, 32, 96, 8192, 32064, 131072),
    llama("phi-3-medium-128k", 13.960, 40, 5120, 40, 10, 128, 17920, 32064, 131072),
    llama("phi-3.5-mini", 3.821, 32, 3072, 32, 32, 96, 8192, 32064, 131072),
    llama("phi-4", 14.660, 40, 5120, 40, 10, 128, 17920, 100352, 16384),
    llama("phi-4-mini", 3.836, 32, 3072, 24, 8, 128, 8192, 200064, 131072, true),

    // Others: HuggingFaceTB/*, 01-ai/*, allenai/*, CohereForAI/*, facebook/*
    llama("smollm2-135m", 0.1345, 30, 576, 9, 3, 64, 1536, 49152, 8192, true),
    llama("smollm2-360m", 0.3618, 32, 960, 15, 5, 64, 2560, 49152, 8192, true),
    llama("smollm2-1.7b", 1.711, 24, 2048, 32, 32, 64, 8192, 49152, 8192, true),
    llama("smollm3-3b", 3.075, 36, 2048, 16, 4, 128, 11008, 128256, 65536, true),
    llama("yi-6b", 6.061, 32, 4096, 32, 4, 128, 11008, 64000, 4096),
    llama("yi-34b", 34.389, 60, 7168, 56, 8, 128, 20480, 64000, 4096),
    wide_norm(llama("olmo-2-7b", 7.299, 32, 4096, 32, 32, 128, 11008, 100352, 4096)),
    wide_norm(llama("olmo-2-13b", 13.716, 40, 5120, 40, 40, 128, 13824, 100352, 4096)),
    one_norm(llama("command-r-35b", 34.981, 40, 8192, 64, 64, 128, 22528, 256000, 131072, true)),
    opt(llama("opt-13b", 12.853, 40, 5120, 40, 40, 128, 20480, 50272, 2048)),
    opt(llama("opt-66b", 65.7, 64, 9216, 72, 72, 128, 36864, 50272, 2048)),
};

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
}

// Small letters and digits of the name, without vendor and without the endings of variants of equal shape.
std::string plain(std::string_view name) {
  if (const std::size_t slash = name.rfind('/'); slash != std::string_view::npos)
    name.remove_prefix(slash + 1);
  std::string text(name);
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  for (const std::string_view tuned : {"-instruct", "-chat"}) {
    if (const std::size_t at = text.find(tuned); at != std::string::npos && at != 0)
      text.erase(at, tuned.size());
  }
  constexpr std::string_view endings[] = {"-hf", "-it", "-base", "-pt", "-bf16"};
  for (bool again = true; again;) {
    again = false;
    for (const std::string_view ending : endings) {
      if (text.size() <= ending.size()) continue;
      const std::size_t at = text.size() - ending.size();
      if (std::string_view(text).substr(at) != ending) continue;
      text.resize(at);
      again = true;
    }
  }
  if (text.rfind("meta-", 0) == 0) text.erase(0, 5);
  text.erase(std::remove_if(text.begin(), text.end(), [](char c) { return !is_word(c); }), text.end());
  return text;
}

// Names that stand for one of the table.
struct alias {
  const char* name;
  const char* of;
};
constexpr alias aliases[] = {
    {"llama-7b", "llama-1-7b"},
    {"llama-65b", "llama-1-65b"},
    {"llama-3-3b", "llama-3.2-3b"},
    {"mistral-7b", "mistral-7b-v0.1"},
    {"mixtral-8x7b-v0.1", "mixtral-8x7b"},
    {"mixtral-8x22b-v0.1", "mixtral-8x22b"},
    {"llama-405b", "llama-3.1-405b"},
    {"llama-3-405b", "llama-3.1-405b"},
    {"phi-3-mini", "phi-3-mini-4k"},
    {"phi-3-medium", "phi-3-medium-128k"},
    {"deepseek-v3.1", "deepseek-v3"},
    {"mistral-nemo", "mistral-nemo-12b"},
    {"command-r", "command-r-35b"},
    {"llama-3-1b", "llama-3.2-1b"},
};

// Edit distance (Levenshtein).
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t corner = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t change = corner + (a[i] != b[j] ? 1 : 0);
      corner = row[j + 1];
      row[j + 1] = std::min({change, row[j] + 1, corner + 1});
    }
  }
  return row.back();
}

}  // namespace

std::span<const architecture> catalogue() {
  return models;
}

const architecture* find_model(std::string_view name) {
  const std::string wanted = plain(name);
  for (const architecture& a : models) {
    if (plain(a.name) == wanted) return &a;
  }
  for (const alias& other : aliases) {
    if (plain(other.name) == wanted) return find_model(other.of);
  }
  return nullptr;
}

std::vector<std::string> near_names(std::string_view name) {
  const std::string wanted = plain(name.substr(0, 100));
  std::vector<std::pair<std::size_t, const char*>> found;
  for (const architecture& a : models) {
    const std::string have = plain(a.name);
    // A part of a name is nearer than any other change, its beginning nearest.
    const std::size_t at = wanted.size() >= 3 ? have.find(wanted) : std::string::npos;
    const std::size_t far = at != std::string::npos ? (at == 0 ? 0 : 1) : distance(wanted, have);
    if (far <= std::max<std::size_t>(2, have.size() / 3)) found.emplace_back(far, a.name);
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> out;
  for (std::size_t i = 0; i < found.size() && i < 3; ++i) out.emplace_back(found[i].second);
  return out;
}

}  // namespace kvcache::cli
