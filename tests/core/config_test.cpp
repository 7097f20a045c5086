// SPDX-License-Identifier: Apache-2.0
// What a configuration becomes, and that each bad number is refused by name, before anything is allocated.
#include "kvcache/cache/config.hpp"

#include <array>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "kvcache/cache.hpp"
#include "kvcache/cache/packed.hpp"
#include "kvcache/plan.hpp"

using namespace kvcache;

namespace {

cache_config good() {
  return {.shape = {.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64},
          .block_size = 16,
          .capacity = mebibytes(1),
          .max_sequences = 4};
}
group_config group(int32_t block_size = 16, int32_t total = 0) {
  return {.shape = {.layers = 2, .kv_heads = 2, .head_dim_k = 64, .head_dim_v = 64},
          .block_size = block_size,
          .total = {total}};
}

void refuses(const cache_config& c, errc code, const char* field, int64_t value) {
  const status e = resolve(c).error();
  INFO("expected " << to_text(code) << " " << field << " = " << value << ", got " << to_text(e.code) << " "
                   << e.field << " = " << e.value);
  CHECK(e.code == code);
  CHECK(std::string(e.field) == field);
  CHECK(e.value == value);
  const status made = cache::create(c).error();
  CHECK(made.code == code);
  CHECK(std::string(made.field) == field);
  CHECK(made.value == value);
}
void refuses(const group_config& g, errc code, const char* field, int64_t value) {
  cache_config c = good();
  c.groups = {&g, 1};
  refuses(c, code, field, value);
}

}  // namespace

TEST_CASE("capacity becomes as many whole blocks as fit") {
  // 2 layers, 2 heads, 64 values, K and V, 2 bytes: 1 KiB a token, 16 KiB a block.
  cache_config c = good();
  const result<geometry> g = resolve(c);
  REQUIRE(g);
  CHECK(g->groups == 1);
  CHECK(g->group[0].total == 64);
  CHECK(g->unit == 16);
  CHECK(g->nodes == 64);
  CHECK(g->max_sequence_tokens == 1024);
  CHECK(g->group[0].columns == 64);
  CHECK(g->memory() == mebibytes(1));
  c.capacity = {mebibytes(1).count - 1};
  CHECK(resolve(c)->group[0].total == 63);
  c.capacity = kibibytes(16);
  CHECK(resolve(c)->group[0].total == 1);
  refuses((c.capacity = {kibibytes(16).count - 1}, c), errc::bad_argument, "capacity", 16383);
}

TEST_CASE("groups share the capacity by whole units, so that all have room for the same tokens") {
  std::array<group_config, 2> gs{group(32), group(16)};
  gs[1].shape.layers = 6;
  cache_config c = good();
  c.groups = gs;
  // A unit of 32 tokens: one block of 32 KiB and two of 48 KiB.
  c.capacity = {10 * kibibytes(128).count + kibibytes(127).count};
  const result<geometry> g = resolve(c);
  REQUIRE(g);
  CHECK(g->unit == 32);
  CHECK(g->group[0].per_unit == 1);
  CHECK(g->group[1].per_unit == 2);
  CHECK(g->group[0].unit_offset == 0);
  CHECK(g->group[1].unit_offset == 1);
  CHECK(g->blocks_per_unit == 3);
  CHECK(g->group[0].total == 10);
  CHECK(g->group[1].total == 20);
  CHECK(g->nodes == 10);
  CHECK(g->max_sequence_tokens == 320);
  CHECK(g->group[1].columns == 20);
  CHECK(g->memory().count == 10 * kibibytes(128).count);
}

TEST_CASE("a group with blocks of its own needs no capacity, and the smallest group bounds a sequence") {
  const std::array<group_config, 2> gs{group(16, 10), group(16, 7)};
  cache_config c = good();
  c.groups = gs;
  c.capacity = {};
  const result<geometry> g = resolve(c);
  REQUIRE(g);
  CHECK(g->max_sequence_tokens == 7 * 16);
  CHECK(g->nodes == 7);
}

TEST_CASE("a cross-layer sharing model stores only the owners' layers") {
  const std::vector<int32_t> owners{0, 0};
  cache_config c = good();
  c.shape.layer_owner = owners;
  CHECK(resolve(c)->group[0].total == 128);
  const std::vector<int32_t> wrong{1, 1};
  c.shape.layer_owner = wrong;
  refuses(c, errc::bad_argument, "layer_owner", 2);
}

TEST_CASE("open blocks of a lossy format are taken off the capacity before the rest is shared") {
  group_config g = group();
  g.format = {.block = kibibytes(4), .residual = 20, .lossy = true};
  cache_config c = good();
  c.groups = {&g, 1};
  const result<geometry> geo = resolve(c);
  REQUIRE(geo);
  CHECK(geo->group[0].open == 4 * (2 + 2) + 512 / 16);  // and what one step may add
  CHECK(geo->group[0].total == (mebibytes(1).count - 48 * kibibytes(16).count) / kibibytes(4).count);
  CHECK(geo->memory() == mebibytes(1));
  c.max_step_tokens = 33;
  CHECK(resolve(c)->group[0].open == 4 * (2 + 2) + 3);
  g.format.deferred = true;
  CHECK(resolve(c)->group[0].open == 4 * (2 + 2));
  g.format.deferred = false;
  g.open = {5};
  CHECK(resolve(c)->group[0].open == 5);
  c.capacity = kibibytes(5 * 16);
  refuses(c, errc::bad_argument, "capacity", kibibytes(80).count);
}

TEST_CASE("a reserving group is given whole reservations") {
  group_config g = group();
  g.reserve = 100;  // 7 blocks
  cache_config c = good();
  c.groups = {&g, 1};
  const result<geometry> geo = resolve(c);
  REQUIRE(geo);
  CHECK(geo->group[0].reserve_blocks == 7);
  CHECK(geo->group[0].total == 63);
  g.total = {15};
  refuses(c, errc::bad_argument, "total", 15);
  g.total = {};
  g.reserve = 2000;
  refuses(c, errc::bad_argument, "capacity", mebibytes(1).count);
}

TEST_CASE("every bad number of a cache configuration is refused by its name and value") {
  cache_config c = good();
  REQUIRE(resolve(c));
  const auto with = [&](auto change) {
    cache_config x = good();
    change(x);
    return x;
  };
  refuses(with([](auto& x) { x.capacity = {}; }), errc::bad_argument, "capacity", 0);
  refuses(with([](auto& x) { x.capacity = {-5}; }), errc::bad_argument, "capacity", -5);
  refuses(with([](auto& x) { x.capacity = {INT64_MIN}; }), errc::bad_argument, "capacity", INT64_MIN);
  refuses(with([](auto& x) { x.capacity = {INT64_MAX}; }), errc::bad_argument, "capacity", INT64_MAX);
  for (const int32_t n : {0, -1, 12, INT32_MIN, INT32_MAX}) {
    refuses(with([&](auto& x) { x.block_size = n; }), errc::bad_argument, "block_size", n);
  }
  for (const int32_t n : {0, -1, (1 << 20) + 1, INT32_MAX}) {
    refuses(with([&](auto& x) { x.max_sequences = n; }), errc::bad_argument, "max_sequences", n);
  }
  refuses(with([](auto& x) { x.shape.layers = 0; }), errc::bad_argument, "layers", 0);
  refuses(with([](auto& x) { x.shape.kv_heads = 0; }), errc::bad_argument, "kv_heads", 0);
  refuses(with([](auto& x) { x.shape.head_dim = 0; }), errc::bad_argument, "head_dim_k", 0);
  refuses(with([](auto& x) { x.shape.head_dim_v = -1; }), errc::bad_argument, "head_dim_v", -1);
  refuses(with([](auto& x) { x.max_sequence_tokens = -1; }), errc::bad_argument, "max_sequence_tokens", -1);
  refuses(with([](auto& x) { x.max_sequence_tokens = INT32_MAX; }), errc::bad_argument, "max_sequence_tokens",
          INT32_MAX);
  refuses(with([](auto& x) { x.max_nodes = -2; }), errc::bad_argument, "max_nodes", -2);
  refuses(with([](auto& x) { x.max_nodes = INT32_MAX; }), errc::bad_argument, "max_nodes", INT32_MAX);
  refuses(with([](auto& x) { x.max_scopes = 0; }), errc::bad_argument, "max_scopes", 0);
  refuses(with([](auto& x) { x.max_commands = -1; }), errc::bad_argument, "max_commands", -1);
  refuses(with([](auto& x) { x.max_commands = 65536; }), errc::bad_argument, "max_commands", 65536);
  for (const int32_t n : {0, -1, INT32_MIN}) {
    refuses(with([&](auto& x) { x.max_step_tokens = n; }), errc::bad_argument, "max_step_tokens", n);
  }
}

TEST_CASE("a group of first tokens takes one block per text and does not count for the unit") {
  std::array<group_config, 2> gs{group(32), group(2)};
  gs[1].first_only = true;
  cache_config c = good();
  c.groups = gs;
  const result<geometry> geo = resolve(c);
  REQUIRE(geo);
  CHECK(geo->unit == 32);
  CHECK(geo->blocks_per_unit == 2);
  CHECK(geo->group[1].per_unit == 1);
  CHECK(geo->group[1].columns == 1);
  // 1 MiB: blocks of 32 KiB and of 2 KiB; twice the 4 sequences, or a quarter of the units
  CHECK(geo->group[1].total == 8);
  CHECK(geo->group[0].total == (1024 - 8 * 2) / 32);
  CHECK(geo->max_sequence_tokens == geo->group[0].total * 32);
  CHECK(geo->nodes == geo->group[0].total);
  CHECK(geo->memory() <= mebibytes(1));
  CHECK(bytes_per_token(*geo).count == 1024);
  CHECK(sequence_bytes(*geo, 33) == kibibytes(2 * 32 + 2));
  CHECK(sequence_bytes(*geo, 1) == kibibytes(32 + 2));
  CHECK(max_batch(*geo, 64) == 4);
  c.max_sequences = 1;
  CHECK(resolve(c)->group[1].total == 7);  // a quarter of 31 units
  c.max_sequences = 100;
  CHECK(resolve(c)->group[1].total == 30);  // never more than units
  CHECK(resolve(c)->group[0].total == 30);
  gs[1].total = {3};
  CHECK(resolve(c)->group[1].total == 3);
  CHECK(resolve(c)->group[0].total == (1024 - 3 * 2) / 32);
  CHECK(max_batch(*resolve(c), 1) == 3);
  CHECK(max_context(*resolve(c), 4) == 0);
  CHECK(max_context(*resolve(c), 3) == 10 * 32);
}

TEST_CASE("a group of first tokens that names no total takes as many as the units of the others want") {
  std::array<group_config, 2> gs{group(16, 40), group(4)};
  gs[1].first_only = true;
  cache_config c = good();
  c.capacity = {};
  c.groups = gs;
  c.max_sequences = 4;
  REQUIRE(resolve(c));
  CHECK(resolve(c)->group[1].total == 10);
  const uint64_t print = resolve(c)->format_fingerprint;
  gs[1].first_only = false;
  gs[1].total = {40};
  CHECK(resolve(c)->format_fingerprint != print);
}

TEST_CASE("the groups of a packed cache are the packed blocks and exact copies of the exempt tokens") {
  const group_shape shape{.layers = 3, .kv_heads = 2, .head_dim_k = 64, .head_dim_v = 32};
  kv_format f{.k = {.codes = code::int4, .axis = scale_axis::channel, .group_size = 32},
              .v = {.codes = code::int4},
              .residual = 8,
              .exempt = 4};
  const auto packed = packed_groups(shape, 64, {&f, 1});
  REQUIRE(packed);
  REQUIRE(packed->span().size() == 2);
  const group_config& p = packed->span()[0];
  CHECK(p.format == *block_format_of({&f, 1}, shape, 64));
  CHECK((p.format.residual == 8 && p.format.exempt == 4 && p.format.lossy && !p.format.deferred));
  const group_config& e = packed->span()[1];
  CHECK((e.first_only && e.block_size == 4 && e.shape == shape && e.format == block_format{}));
  CHECK(packed_groups(shape, 64, {&f, 1}, true)->group[0].format.deferred);
  cache_config c = good();
  c.capacity = mebibytes(8);
  c.groups = packed->span();
  CHECK(resolve(c));
  f.exempt = 0;
  CHECK(packed_groups(shape, 64, {&f, 1})->count == 1);
  f = {.residual = 8, .exempt = 2};  // nothing is rounded
  const auto exact = packed_groups(shape, 16, {&f, 1}, true);
  REQUIRE(exact);
  CHECK((exact->count == 1 && exact->group[0].format == block_format{}));
  f.exempt = 3;
  CHECK(std::string(packed_groups(shape, 16, {&f, 1}).error().field) == "exempt");
}

TEST_CASE("the usual command list holds a copy and a turn of every block of a sequence") {
  group_config x = group();
  x.block_size = 16;
  cache_config c = good();
  c.groups = {&x, 1};
  c.max_sequences = 1;
  c.max_sequence_tokens = 1024;
  CHECK(resolve(c)->max_commands == 128);
  c.max_sequences = 100;
  CHECK(resolve(c)->max_commands == 400);
}

TEST_CASE("an empty command list holds what one sequence can queue at once") {
  group_config x = group();
  x.format.lossy = true;
  x.block_size = 16;
  x.total = {64};
  cache_config c = good();
  c.groups = {&x, 1};
  c.max_sequences = 1;
  c.max_sequence_tokens = 1024;
  CHECK(resolve(c)->max_commands == 64);  // a drop's copies; seals of a step have a list of their own
  x.format.deferred = true;
  const auto geo = resolve(c);
  REQUIRE(geo);
  CHECK(geo->max_commands == 64);  // the seals of 1,024 tokens, more than the usual four
  c.max_commands = 63;
  CHECK(resolve(c).error().code == errc::bad_argument);
  CHECK(std::string(resolve(c).error().field) == "max_commands");
  c.max_commands = 0;
  x.block_size = 1;
  c.max_sequence_tokens = 70000;
  CHECK(std::string(resolve(c).error().field) == "max_sequence_tokens");
}

TEST_CASE("every bad number of a group is refused by its name and value") {
  const auto with = [](auto change) {
    group_config x = group();
    change(x);
    return x;
  };
  REQUIRE(resolve([] {
    static const group_config g = group();
    cache_config c = good();
    c.groups = {&g, 1};
    return c;
  }()));
  refuses(with([](auto& x) { x.shape.window = 1024; }), errc::unsupported, "window", 1024);
  refuses(with([](auto& x) { x.shape.window = -1; }), errc::bad_argument, "window", -1);
  refuses(with([](auto& x) { x.block_size = 48; }), errc::bad_argument, "block_size", 48);
  refuses(with([](auto& x) { x.total = {-1}; }), errc::bad_argument, "total", -1);
  refuses(with([](auto& x) { x.open = {-1}; }), errc::bad_argument, "open", -1);
  refuses(with([](auto& x) { x.reserve = -1; }), errc::bad_argument, "reserve", -1);
  refuses(with([](auto& x) { x.format.block = {-1}; }), errc::bad_argument, "format.block", -1);
  refuses(with([](auto& x) { x.format.block = {INT64_MAX}; }), errc::bad_argument, "format.block", INT64_MAX);
  refuses(with([](auto& x) { x.format.open_block = {-1}; }), errc::bad_argument, "format.open_block", -1);
  refuses(with([](auto& x) { x.format.residual = -1; }), errc::bad_argument, "format.residual", -1);
  refuses(with([](auto& x) { x.format.lossy = true, x.format.residual = INT32_MAX, x.block_size = 1; }),
          errc::bad_argument, "format.residual", INT32_MAX);
  refuses(with([](auto& x) { x.format.lossy = true, x.reserve = 16; }), errc::unsupported, "reserve", 16);
  refuses(with([](auto& x) { x.format.deferred = true; }), errc::bad_argument, "format.deferred", 1);
  refuses(with([](auto& x) { x.format.exempt = -1; }), errc::bad_argument, "format.exempt", -1);
  refuses(with([](auto& x) { x.format.exempt = 17; }), errc::bad_argument, "format.exempt", 17);
  refuses(with([](auto& x) { x.first_only = true; }), errc::bad_argument, "block_size", 16);
  const auto first = [&](auto change) {
    return with([&](auto& x) {
      x.first_only = true;
      x.block_size = 4;
      change(x);
    });
  };
  refuses(first([](auto& x) { x.reserve = 4; }), errc::unsupported, "reserve", 4);
  refuses(first([](auto& x) { x.format.fingerprint = 3; }), errc::unsupported, "format", 0);
  refuses(first([](auto&) {}), errc::bad_argument, "block_size", 4);  // nothing but first tokens
  refuses(with([](auto& x) { x.shape.v_aliases_k = true, x.shape.head_dim_v = 65; }), errc::bad_argument,
          "head_dim_v", 65);
}

TEST_CASE("bytes that do not fit 64 bits are refused instead of wrapping (C11)") {
  std::array<group_config, 2> gs{group(1 << 16, 1), group(1, 1 << 16)};
  gs[1].format.block = {int64_t{1} << 53};  // times 2^16 blocks of a unit
  cache_config c = good();
  c.groups = gs;
  refuses(c, errc::bad_argument, "block_size", 1);
  gs = {group(16, 1 << 11), group(16, 1)};
  gs[0].format.block = {int64_t{1} << 53};
  refuses(c, errc::bad_argument, "total", 1 << 11);
  gs[0].format = {.open_block = {int64_t{1} << 53}, .lossy = true};
  gs[0].open = {1 << 11};
  refuses(c, errc::bad_argument, "open", 1 << 11);
}

TEST_CASE("more groups than a cache can have, and a negative account limit, are refused") {
  const std::vector<group_config> gs(max_groups + 1, group(16, 4));
  cache_config c = good();
  c.groups = gs;
  refuses(c, errc::bad_argument, "groups", max_groups + 1);
  c.groups = std::span(gs).first(max_groups);
  CHECK(resolve(c));
  c.groups = {};
  const std::vector<int32_t> limits{4, -3};
  c.account_limits = limits;
  const status e = cache::create(c).error();
  CHECK(e.code == errc::bad_argument);
  CHECK(std::string(e.field) == "account_limits");
  CHECK(e.value == -3);
}

TEST_CASE("no index is built when the configuration says so") {
  cache_config c = good();
  c.max_nodes = -1;
  CHECK(resolve(c)->nodes == 0);
  c.max_nodes = 5;
  CHECK(resolve(c)->nodes == 5);
}

TEST_CASE("the fingerprint of a cache changes with any group's layout and with their order") {
  std::array<group_config, 2> gs{group(16, 4), group(32, 4)};
  cache_config c = good();
  c.groups = gs;
  const uint64_t first = resolve(c)->format_fingerprint;
  std::swap(gs[0], gs[1]);
  const uint64_t swapped = resolve(c)->format_fingerprint;
  CHECK(first != swapped);
  gs[1].format.fingerprint = 9;
  CHECK(resolve(c)->format_fingerprint != swapped);
}
