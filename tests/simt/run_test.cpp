// SPDX-License-Identifier: Apache-2.0
// The command list on the machine, byte for byte against the CPU's, through the same structs.
#include <cstring>

#include "kvcache/cuda/data_plane.hpp"
#include "simt/gpu_world.hpp"

namespace kvcache::test {
namespace {

constexpr int32_t blocks = 12, open_blocks = 5;

/// Layers of two groups with K and V of different widths, sealed and open blocks, in one run of memory.
struct two_groups {
  two_groups(int32_t type, int32_t block, bool tokens_first, int32_t n_layers, uint32_t seed) {
    std::vector<int64_t> offset;
    int64_t used = 0;
    for (int32_t l = 0; l < n_layers; ++l) {
      kvc_kv kv{};
      kv.struct_size = sizeof kv;
      kv.group = l % 3 == 2 ? 1 : 0;
      kv.kv_heads = kv.group == 1 ? 1 : 3;
      kv.dim_k = kv.group == 1 ? 64 : 80;
      kv.dim_v = kv.group == 1 ? 64 : 48;
      kv.block = kv.group == 1 ? 2 * block : block;
      kv.blocks = blocks;
      kv.open_blocks = open_blocks;
      for (kvc_plane* p : {&kv.k, &kv.v, &kv.open_k, &kv.open_v}) {
        const bool v = p == &kv.v || p == &kv.open_v;
        const int64_t row = 2 * (v ? kv.dim_v : kv.dim_k) + 16;  // a gap behind every row
        p->type = int16_t(type);
        p->dim_stride = 2;
        p->token_stride = tokens_first ? row * kv.kv_heads : row;
        p->head_stride = tokens_first ? row : row * kv.block;
        p->block_stride = row * kv.block * kv.kv_heads + 32;
        offset.push_back(used);
        used += p->block_stride * (p == &kv.k || p == &kv.v ? blocks : open_blocks);
      }
      layers.push_back(kv);
    }
    memory = guarded<std::byte>(size_t(used));
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < memory.size(); i += 2) {
      const uint16_t h = narrow16(normal(random), type);
      std::memcpy(memory.data() + i, &h, 2);
    }
    size_t next = 0;
    for (kvc_kv& kv : layers) {
      for (kvc_plane* p : {&kv.k, &kv.v, &kv.open_k, &kv.open_v}) p->data = memory.data() + offset[next++];
    }
  }
  bool operator==(const two_groups& b) const {
    return std::memcmp(memory.data(), b.memory.data(), memory.size()) == 0;
  }
  std::vector<kvc_kv> layers;
  guarded<std::byte> memory;
};

kvc_command make(int32_t op, int32_t group, int32_t stage, int32_t tokens, int32_t src, int32_t dst,
                 int32_t arg = 0) {
  return {uint8_t(op), uint8_t(group), uint16_t(stage), tokens, src, dst, arg};
}

/// A list of commands that is right: those of one stage are independent.
struct list {
  std::vector<kvc_command> commands;
  std::vector<int32_t> ids;
  std::vector<guarded<int32_t>> slots;
  std::vector<kvc_keep> keeps;
  kvc_rope rope{};
  guarded<float> table;

  kvc_run run(const two_groups& w) const {
    kvc_run r{};
    r.struct_size = sizeof r;
    r.layers = w.layers.data();
    r.n_layers = int32_t(w.layers.size());
    r.commands = commands.data();
    r.n_commands = int32_t(commands.size());
    r.ids = ids.data();
    r.n_ids = int32_t(ids.size());
    r.keeps = keeps.data();
    r.n_keeps = int32_t(keeps.size());
    r.rope = &rope;
    return r;
  }
};

list random_list(std::mt19937& random, const two_groups& w, int32_t dims, int32_t style) {
  list x;
  x.rope.struct_size = sizeof x.rope;
  x.rope.style = style;
  x.rope.dims = dims;
  x.rope.theta = 1e4;
  x.table = guarded<float>(size_t(64 * dims));
  REQUIRE(kvc_cpu_rope_table(&x.rope, 64, x.table.data(), nullptr) == KVC_OK);
  x.rope.table = x.table.data();
  x.rope.table_positions = 64;
  const auto below = [&](int32_t n) { return int32_t(random() % uint32_t(n)); };
  for (int32_t stage = 0; stage < 4; ++stage) {
    for (int32_t group = 0; group < 2; ++group) {
      const int32_t block = w.layers[group == 0 ? 0 : 2].block;
      // Blocks of a stage are used once each.
      std::vector<int32_t> id(blocks), open(open_blocks);
      std::iota(id.begin(), id.end(), 0);
      std::iota(open.begin(), open.end(), 0);
      std::shuffle(id.begin(), id.end(), random);
      std::shuffle(open.begin(), open.end(), random);
      x.commands.push_back(make(KVC_OP_COPY, group, stage, below(block + 1), id[0], id[1]));
      x.commands.push_back(make(KVC_OP_COPY, group, stage, block, id[2], id[2]));
      x.commands.push_back(make(KVC_OP_ZERO, group, stage, below(block + 1), id[3], id[3]));
      x.commands.push_back(make(KVC_OP_ROTATE, group, stage, below(block + 1), id[4], id[4], below(64)));
      x.commands.push_back(make(KVC_OP_COPY_OPEN, group, stage, below(block + 1), open[0], open[1]));
      x.commands.push_back(make(KVC_OP_SEAL, group, stage, block, open[2], id[5]));
      // A run of three blocks gathered into itself, or into others.
      const int32_t tokens = below(2 * block + 1);
      std::vector<int32_t> all(size_t(3 * block)), kept;
      std::iota(all.begin(), all.end(), 0);
      const bool per_head = random() % 2 == 0, per_layer = random() % 2 == 0;
      const int32_t heads = w.layers[group == 0 ? 0 : 2].kv_heads;
      kvc_keep keep{};
      keep.head_stride = per_head ? tokens : 0;
      keep.layer_stride = per_layer ? int64_t{tokens} * (per_head ? heads : 1) : 0;
      const size_t lists = size_t(per_head ? heads : 1) * (per_layer ? w.layers.size() : 1);
      for (size_t i = 0; i < lists; ++i) {
        std::vector<int32_t> some;
        std::sample(all.begin(), all.end(), std::back_inserter(some), tokens, random);
        kept.insert(kept.end(), some.begin(), some.end());
      }
      kept.push_back(0);  // never empty
      x.slots.emplace_back(kept);
      keep.slots = x.slots.back().data();
      x.commands.push_back(make(KVC_OP_GATHER, group, stage, tokens, 0, 0, int32_t(x.ids.size())));
      const bool in_place = random() % 2 == 0;
      for (const int32_t v : {3, 2, int32_t(x.keeps.size()), id[6], id[7], id[8]}) x.ids.push_back(v);
      for (const int32_t i : {0, 1}) x.ids.push_back(in_place ? id[size_t(6 + i)] : id[size_t(9 + i)]);
      x.keeps.push_back(keep);
    }
  }
  std::shuffle(x.commands.begin(), x.commands.end(), random);
  return x;
}

}  // namespace

TEST_CASE("command lists move the bytes that the CPU moves") {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const int32_t type = seed % 2 == 0 ? KVC_F16 : KVC_BF16, block = seed % 3 == 0 ? 4 : 16;
    two_groups on_cpu(type, block, seed % 4 < 2, 5, seed), on_gpu(type, block, seed % 4 < 2, 5, seed);
    const list x = random_list(random, on_cpu, seed % 2 == 0 ? 64 : 32, int32_t(seed / 2 % 2));
    kvc_error e{};
    const kvc_run r = x.run(on_cpu);
    REQUIRE(kvc_cpu_run(&r, nullptr, &e) == KVC_OK);
    REQUIRE_FALSE(on_cpu == on_gpu);
    simt::the_backend().seed = seed;
    const kvc_run g = x.run(on_gpu);
    const kvc_status s = kvc_cuda_run(&g, nullptr, &e);
    INFO(simt::the_backend().fault << " field " << e.field);
    REQUIRE(s == KVC_OK);
    REQUIRE(on_cpu == on_gpu);
  }
}

TEST_CASE("a stage takes one launch per kind and group, over all layers", "[machine]") {
  two_groups w(KVC_F16, 16, false, 6, 1);
  std::vector<kvc_command> c;
  for (int32_t i = 0; i < 6; ++i) c.push_back(make(KVC_OP_COPY, 0, 0, 16, i, 6 + i));
  for (int32_t i = 0; i < 6; ++i) c.push_back(make(KVC_OP_ZERO, 0, 0, 0, i, i));
  for (int32_t i = 0; i < 6; ++i) c.push_back(make(KVC_OP_ZERO, 0, 1, 16, i, i));
  const int before = simt::the_backend().launches;
  REQUIRE(gpu_run(w.layers, c, nullptr));
  REQUIRE(simt::the_backend().launches - before == 3);
}

TEST_CASE("more layers and commands than one launch takes are divided") {
  two_groups on_cpu(KVC_F16, 4, false, 130, 3), on_gpu(KVC_F16, 4, false, 130, 3);
  std::vector<kvc_command> c;
  for (int32_t i = 0; i < 600; ++i) c.push_back(make(KVC_OP_COPY, 0, i / 6, 1 + i % 4, i % 6, 6 + i % 6));
  for (int32_t i = 0; i < 600; ++i) c.push_back(make(KVC_OP_ZERO, 1, 0, i < 599 ? 0 : 4, 0, 1));
  for (two_groups* w : {&on_cpu, &on_gpu}) {
    kvc_run r{};
    r.struct_size = sizeof r;
    r.layers = w->layers.data();
    r.n_layers = 130;
    r.commands = c.data() + 590;
    r.n_commands = 610;
    REQUIRE((w == &on_cpu ? kvc_cpu_run(&r, nullptr, nullptr) : kvc_cuda_run(&r, nullptr, nullptr)) ==
            KVC_OK);
  }
  REQUIRE(on_cpu == on_gpu);
}

TEST_CASE("a kept slot outside the source run leaves its place as it was") {
  two_groups w(KVC_F16, 16, false, 1, 4), before(KVC_F16, 16, false, 1, 4);
  const guarded<int32_t> slots(std::vector<int32_t>{-1, 16, INT32_MAX, INT32_MIN});
  const kvc_keep keep{slots.data(), 0, 0};
  const std::vector<int32_t> ids{1, 1, 0, 2, 3};
  const std::vector<kvc_command> c{make(KVC_OP_GATHER, 0, 0, 4, 0, 0, 0)};
  REQUIRE(gpu_run(w.layers, c, nullptr, {.ids = ids, .keeps = {&keep, 1}}));
  REQUIRE(w == before);
}

TEST_CASE("run names the field it objects to, and then nothing is queued", "[machine]") {
  two_groups w(KVC_F16, 16, false, 3, 5);
  const guarded<int32_t> slots(std::vector<int32_t>{0, 1});
  const kvc_keep keep{slots.data(), 0, 0};
  const auto refuses = [&](kvc_command bad, errc code, const char* field, std::vector<int32_t> ids = {}) {
    const std::vector<kvc_command> c{make(KVC_OP_ZERO, 0, 0, 1, 0, 0), bad};
    const int before = simt::the_backend().launches;
    const status s = gpu_run(w.layers, c, nullptr, {.ids = ids, .keeps = {&keep, 1}});
    CHECK(s.code == code);
    CHECK(s.field == std::string(field));
    CHECK(simt::the_backend().launches == before);
  };
  refuses(make(KVC_OP_COPY, 0, 0, 17, 0, 1), errc::bad_argument, "tokens");
  refuses(make(KVC_OP_COPY, 0, 0, -1, 0, 1), errc::bad_argument, "tokens");
  refuses(make(KVC_OP_COPY, 0, 0, 1, blocks, 1), errc::bad_argument, "src");
  refuses(make(KVC_OP_COPY, 0, 0, 1, 0, -1), errc::bad_argument, "dst");
  refuses(make(KVC_OP_COPY_OPEN, 0, 0, 1, 0, open_blocks), errc::bad_argument, "dst");
  refuses(make(KVC_OP_COPY, 7, 0, 1, 0, 1), errc::bad_argument, "layers");
  refuses(make(9, 0, 0, 1, 0, 1), errc::unsupported, "op");
  refuses(make(KVC_OP_ROTATE, 0, 0, 1, 0, 1), errc::bad_argument, "rope");
  refuses(make(KVC_OP_GATHER, 0, 0, 1, 0, 0, 0), errc::bad_argument, "arg");
  refuses(make(KVC_OP_GATHER, 0, 0, 1, 0, 0, 0), errc::bad_argument, "ids", {2, 1, 0, 5});
  refuses(make(KVC_OP_GATHER, 0, 0, 1, 0, 0, 0), errc::bad_argument, "keep", {1, 1, 1, 5, 6});
  refuses(make(KVC_OP_GATHER, 0, 0, 17, 0, 0, 0), errc::bad_argument, "tokens", {1, 1, 0, 5, 6});
  refuses(make(KVC_OP_GATHER, 0, 0, 1, 0, 0, 0), errc::bad_argument, "src", {1, 1, 0, 50, 6});
  refuses(make(KVC_OP_GATHER, 0, 0, 1, 0, 0, 0), errc::bad_argument, "dst", {2, 1, 0, 5, 6, 6});
}

}  // namespace kvcache::test
