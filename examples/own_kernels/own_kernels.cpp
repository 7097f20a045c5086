// SPDX-License-Identifier: Apache-2.0
// The control plane alone, under kernels of one's own. Nothing of kvcache touches a byte here: this program
// owns the memory, chose its layout, runs the queued copies and attends with its own kernel; kvcache only
// says which block is whose. What is learned: the four things that a kernel needs of a cache (the table, the
// length, the slots of new tokens, the commands of the step), and that sharing and copy on write come for
// free. Every row is compared with attention over a plain contiguous copy of the sequence. Needs the headers
// only.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kvcache/blocks/batch_view.hpp"
#include "kvcache/cache.hpp"

namespace kvc = kvcache;

namespace {

constexpr int32_t dim = 64, block_size = 16, total_blocks = 96;

// Our memory and our layout: a block is block_size slots, a slot is its key and then its value.
class kv_memory {
 public:
  kv_memory() : bytes_(size_t{total_blocks} * block_size * 2 * dim, NAN) {}
  float* key(int64_t slot) { return bytes_.data() + slot * 2 * dim; }
  float* value(int64_t slot) { return key(slot) + dim; }
  // [commands]
  // Byte movements of the step, stage by stage (the list is in that order already for one thread).
  void run(const kvc::command_list& commands) {
    for (int32_t stage = 0; stage < commands.stages(); ++stage) {
      for (const kvc_command& c : commands.view()) {
        if (c.stage != stage || c.op != KVC_OP_COPY) continue;
        std::copy_n(key(int64_t{c.src} * block_size), int64_t{c.tokens} * 2 * dim,
                    key(int64_t{c.dst} * block_size));
        ++copies;
      }
    }
  }
  // [commands]
  int copies = 0;

 private:
  std::vector<float> bytes_;
};

// [kernel]
// Our kernel: one query against `length` cached tokens, block by block, in one pass.
void attend(kv_memory& memory, std::span<const kvc::block_id> table, int32_t length, const float* q,
            float* out) {
  float top = -INFINITY, sum = 0;
  std::fill_n(out, dim, 0.0f);
  for (int32_t t = 0; t < length; ++t) {
    const int64_t slot =
        int64_t{kvc::raw(table[static_cast<size_t>(t / block_size)])} * block_size + t % block_size;
    const float *k = memory.key(slot), *v = memory.value(slot);
    float score = 0;
    for (int32_t d = 0; d < dim; ++d) score += q[d] * k[d];
    score /= std::sqrt(static_cast<float>(dim));
    const float higher = std::max(top, score), scale = std::exp(top - higher),
                weight = std::exp(score - higher);
    sum = sum * scale + weight;
    for (int32_t d = 0; d < dim; ++d) out[d] = out[d] * scale + weight * v[d];
    top = higher;
  }
  for (int32_t d = 0; d < dim; ++d) out[d] /= sum;
}
// [kernel]

// What a model would compute for a token after its prefix: any function of both will do.
std::vector<float> vector_of(const std::vector<kvc::token_id>& text, size_t at, uint64_t what) {
  uint64_t seed = what;
  for (size_t i = 0; i <= at; ++i) seed = kvc::mix64(seed ^ static_cast<uint32_t>(text[i])) + i;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> v(dim);
  for (float& x : v) x = normal(random);
  return v;
}

struct request {
  kvc::sequence seq;
  std::vector<kvc::token_id> text;
};

class engine {
 public:
  explicit engine(kvc::cache cache) : cache_(std::move(cache)) {}

  kvc::status admit(std::vector<kvc::token_id> prompt) {
    auto opened = cache_.open(prompt, kvc::scope::tenant("acme"));
    if (!opened) return opened.error();
    live.push_back({std::move(*opened), std::move(prompt)});
    return step(live.size() - 1);
  }
  kvc::status branch(size_t from) {
    auto forked = live[from].seq.fork();
    if (!forked) return forked.error();
    live.push_back({std::move(*forked), live[from].text});
    return {};
  }
  kvc::status append(size_t i, kvc::token_id token) {
    live[i].text.push_back(token);
    return step(i);
  }
  kvc::status finish(size_t i) {
    if (auto done = live[i].seq.commit(live[i].text); !done) return done.error();
    live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
    return {};
  }
  const kvc::cache& cache() const { return cache_; }

  std::vector<request> live;
  double worst = 0;
  kv_memory memory;

 private:
  // [step]
  // Computes what the cache does not hold of request i yet.
  kvc::status step(size_t i) {
    request& r = live[i];
    const int32_t from = r.seq.held();
    const auto n = static_cast<int32_t>(r.text.size()) - from;
    if (auto got = r.seq.extend(n); !got)
      return got.error();           // nothing has changed: preempt somebody, try again
    memory.run(cache_.commands());  // before anything is written
    std::vector<int64_t> slots(static_cast<size_t>(n));
    if (auto s = kvc::write_slots(r.seq.table(), block_size, from, slots); !s) return s;
    for (int32_t t = 0; t < n; ++t) {
      store(r.text, from + t, slots[static_cast<size_t>(t)]);
      check(r, from + t);
    }
    cache_.end_step();
    return {};
  }
  // [step]

  void store(const std::vector<kvc::token_id>& text, int32_t at, int64_t slot) {
    const auto k = vector_of(text, static_cast<size_t>(at), 1),
               v = vector_of(text, static_cast<size_t>(at), 2);
    std::copy(k.begin(), k.end(), memory.key(slot));
    std::copy(v.begin(), v.end(), memory.value(slot));
  }
  // Our kernel on pages against a plain loop over a contiguous copy, in double.
  void check(const request& r, int32_t at) {
    const auto q = vector_of(r.text, static_cast<size_t>(at), 3);
    float got[dim];
    attend(memory, r.seq.table(), at + 1, q.data(), got);
    double want[dim] = {}, sum = 0;
    for (int32_t t = 0; t <= at; ++t) {
      const auto k = vector_of(r.text, static_cast<size_t>(t), 1),
                 v = vector_of(r.text, static_cast<size_t>(t), 2);
      double score = 0;
      for (size_t d = 0; d < dim; ++d) score += double{q[d]} * k[d];
      const double weight = std::exp(score / std::sqrt(double{dim}));
      sum += weight;
      for (size_t d = 0; d < dim; ++d) want[d] += weight * v[d];
    }
    for (size_t d = 0; d < dim; ++d) {
      const double off = std::abs(want[d] / sum - got[d]);
      if (!(off <= worst)) worst = off;  // also if it is no number
    }
  }

  kvc::cache cache_;
};

kvc::status run(engine& e) {
  std::vector<kvc::token_id> prompt(75);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<kvc::token_id>(7 * i);
  if (auto s = e.admit(prompt); !s) return s;
  if (auto s = e.branch(0); !s) return s;  // two answers to one prompt: blocks are shared until they differ
  for (kvc::token_id t = 0; t < 30; ++t) {
    if (auto s = e.append(0, t); !s) return s;
    if (auto s = e.append(1, 1000 + t); !s) return s;
  }
  std::vector<kvc::token_id> follow_up = e.live[0].text;  // the user goes on from the first answer
  for (kvc::token_id t = 0; t < 12; ++t) follow_up.push_back(5000 + t);
  if (auto s = e.finish(0); !s) return s;
  if (auto s = e.finish(0); !s) return s;
  if (auto s = e.admit(follow_up); !s) return s;
  return e.finish(0);
}

}  // namespace

int main() {
  auto cache = kvc::cache::create(
      {.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = dim, .type = kvc::element::f32},
       .block_size = block_size,
       .capacity = kvc::bytes{int64_t{total_blocks} * block_size * 2 * dim * 4}});
  if (!cache) return 1;
  engine e(std::move(*cache));
  if (const auto s = run(e); !s) {
    std::fprintf(stderr, "%s (%s = %lld)\n", kvc::to_text(s.code), s.field, static_cast<long long>(s.value));
    return 1;
  }
  const kvc::stats s = e.cache().count();
  std::printf("prompt tokens asked %llu, found in the cache %llu, blocks copied on write %d\n",
              static_cast<unsigned long long>(s.tokens_asked),
              static_cast<unsigned long long>(s.tokens_reused), e.memory.copies);
  std::printf("largest difference from contiguous attention: %.3g\n", e.worst);
  return s.tokens_reused == 96 && e.memory.copies == 1 && e.worst < 1e-5 ? 0 : 1;
}
