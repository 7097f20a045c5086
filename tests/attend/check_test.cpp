// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>
#include <functional>

#include "world.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

/// A valid call of every kind; a case changes one thing and states which field must be blamed.
struct bench {
  bench() : w({.heads = 2, .group = 2}, {40, 20}, 1) {
    w.append_all();
    kv = w.kv();
    in.struct_size = sizeof in;
    in.q_heads = 4;
    in.n = 2;
    in.max_q = 3;
    in.max_kv = 64;
    in.kv = &kv;
    plan.struct_size = sizeof plan;
    kvc_error e{};
    REQUIRE(kvc_cpu_plan(&in, &plan, &e) == KVC_OK);
    workspace.resize(plan.workspace_bytes);
    buf = {workspace.data(), workspace.size()};
    batch.struct_size = sizeof batch;
    batch.n = 2;
    batch.table = w.table.data();
    batch.table_columns = w.columns;
    batch.kv_len = lens;
    batch.q_start = starts;
    batch.q_pos = positions;
    q = dense_rows(queries.data(), element::f32, 4, 64);
    soft = causal_softmax(0.125f);
    out = dense_out(o.data(), element::f32, 4, 64, lse.data());
    what = dense_score(KVC_SCORE_WEIGHT, sums.data(), 40, lse.data());
    what.sum_stride = 160;
    what.upto = upto;
    add.struct_size = sizeof add;
    add.rows = 2;
    add.k = dense_rows(w.keys[0].data(), element::f32, 2, 64);
    add.v = dense_rows(w.values[0].data(), element::f32, 2, 64);
    add.slot = slots;
    add.pos = positions;
    turn.struct_size = sizeof turn;
    turn.dims = 64;
    turn.theta = 1e4;
    list.struct_size = sizeof list;
    list.layers = &kv;
    list.n_layers = 1;
    list.commands = commands;
    list.n_commands = 2;
    list.ids = ids;
    list.n_ids = 6;
    list.keeps = &keep;
    list.n_keeps = 1;
    list.rope = &turn;
  }
  world w;
  kvc_kv kv{};
  kvc_plan_in in{};
  kvc_plan plan{};
  std::vector<std::byte> workspace;
  kvc_buf buf{};
  kvc_batch batch{};
  int32_t lens[2] = {40, 20}, starts[3] = {0, 2, 3}, positions[3] = {38, 39, 19};
  std::vector<float> queries = std::vector<float>(3 * 4 * 64, 0.5f);
  std::vector<float> o = std::vector<float>(3 * 4 * 64, 77.0f), lse = std::vector<float>(12, 77.0f);
  kvc_rows q{};
  kvc_softmax soft{};
  kvc_out out{};
  kvc_executor executor{nullptr, 1, [](void*, void (*task)(void*, int32_t), void* arg, int32_t n) {
                          for (int32_t i = 0; i < n; ++i) task(arg, i);
                        }};
  kvc_score what{};
  std::vector<float> sums = std::vector<float>(320, 77.0f);
  int32_t upto[6] = {39, 39, 40, 40, 20, 20};
  kvc_append add{};
  int64_t slots[2] = {0, 17};
  kvc_rope turn{};
  kvc_run list{};
  kvc_command commands[2] = {{KVC_OP_COPY, 0, 0, 16, 0, 1, 0}, {KVC_OP_GATHER, 0, 1, 3, 0, 0, 0}};
  int32_t ids[6] = {2, 1, 0, 3, 4, 3};
  int32_t kept[3] = {1, 5, 31};
  kvc_keep keep{kept, 0, 0};
};

using change = std::function<void(bench&)>;
struct fault {
  const char* what;
  kvc_status status;
  int32_t field;
  change edit;
};

kvc_status attend(bench& b, kvc_error& e) {
  return kvc_cpu_attend(&b.plan, &b.kv, &b.batch, &b.q, &b.soft, &b.out, b.buf, &b.executor, &e);
}

float lone[1];

const fault attend_faults[] = {
    {"old plan struct", KVC_ABI, KVC_FIELD_PLAN, [](bench& b) { b.plan.struct_size = 8; }},
    {"plan never made", KVC_BAD_ARGUMENT, KVC_FIELD_PLAN, [](bench& b) { b.plan.width = 0; }},
    {"unknown target", KVC_UNSUPPORTED, KVC_FIELD_TARGET, [](bench& b) { b.plan.target = 99; }},
    {"old kv struct", KVC_ABI, KVC_FIELD_KV, [](bench& b) { b.kv.struct_size = 1; }},
    {"no K", KVC_BAD_ARGUMENT, KVC_FIELD_K, [](bench& b) { b.kv.k.data = nullptr; }},
    {"K type", KVC_UNSUPPORTED, KVC_FIELD_K, [](bench& b) { b.kv.k.type = KVC_U2 + 1; }},
    {"V scaled", KVC_UNSUPPORTED, KVC_FIELD_V, [](bench& b) { b.kv.v.scale_kind = KVC_SCALE_TOKEN; }},
    {"K misaligned", KVC_BAD_ARGUMENT, KVC_FIELD_K,
     [](bench& b) { b.kv.k.data = static_cast<char*>(b.kv.k.data) + 2; }},
    {"negative stride", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, [](bench& b) { b.kv.k.token_stride = -4; }},
    {"odd stride", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, [](bench& b) { b.kv.v.head_stride = 4097; }},
    {"zero stride", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, [](bench& b) { b.kv.k.dim_stride = 0; }},
    {"stride overflow", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.k.block_stride = INT64_MAX / 4 * 4; }},
    {"sum of strides overflows", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.kv.k.head_stride = b.kv.k.token_stride = INT64_MAX / 16 / 4 * 4; }},
    {"kv heads", KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS, [](bench& b) { b.kv.kv_heads = 1; }},
    {"no kv heads", KVC_BAD_ARGUMENT, KVC_FIELD_KV_HEADS, [](bench& b) { b.kv.kv_heads = 0; }},
    {"head dim 60", KVC_UNSUPPORTED, KVC_FIELD_DIM_K, [](bench& b) { b.kv.dim_k = 60; }},
    {"head dim 264", KVC_UNSUPPORTED, KVC_FIELD_DIM_V, [](bench& b) { b.kv.dim_v = 264; }},
    {"head dim 0", KVC_BAD_ARGUMENT, KVC_FIELD_DIM_K, [](bench& b) { b.kv.dim_k = 0; }},
    {"head dim of another plan", KVC_BAD_ARGUMENT, KVC_FIELD_DIM_K, [](bench& b) { b.kv.dim_k = 32; }},
    {"V longer than the K it aliases", KVC_BAD_ARGUMENT, KVC_FIELD_DIM_V,
     [](bench& b) { b.kv.v.data = nullptr, b.kv.dim_v = 128; }},
    {"block 12", KVC_BAD_ARGUMENT, KVC_FIELD_BLOCK, [](bench& b) { b.kv.block = 12; }},
    {"block of another plan", KVC_BAD_ARGUMENT, KVC_FIELD_BLOCK, [](bench& b) { b.kv.block = 8; }},
    {"no blocks", KVC_BAD_ARGUMENT, KVC_FIELD_BLOCKS, [](bench& b) { b.kv.blocks = 0; }},
    {"open space without planes", KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_K, [](bench& b) { b.kv.open_blocks = 1; }},
    {"old batch struct", KVC_ABI, KVC_FIELD_BATCH, [](bench& b) { b.batch.struct_size++; }},
    {"more sequences than planned", KVC_BAD_ARGUMENT, KVC_FIELD_N, [](bench& b) { b.plan.n = 1; }},
    {"negative n", KVC_BAD_ARGUMENT, KVC_FIELD_N, [](bench& b) { b.batch.n = -1; }},
    {"no lengths", KVC_BAD_ARGUMENT, KVC_FIELD_KV_LEN, [](bench& b) { b.batch.kv_len = nullptr; }},
    {"no table", KVC_BAD_ARGUMENT, KVC_FIELD_TABLE, [](bench& b) { b.batch.table = nullptr; }},
    {"negative columns", KVC_BAD_ARGUMENT, KVC_FIELD_TABLE_COLUMNS,
     [](bench& b) { b.batch.table_columns = -1; }},
    {"negative table stride", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE,
     [](bench& b) { b.batch.table_stride = -5; }},
    {"id past the pool", KVC_BAD_ARGUMENT, KVC_FIELD_TABLE,
     [](bench& b) { b.w.row_of_table(1)[1] = b.kv.blocks; }},
    {"id below -1", KVC_BAD_ARGUMENT, KVC_FIELD_TABLE, [](bench& b) { b.w.row_of_table(0)[2] = -2; }},
    {"length past the plan", KVC_BAD_ARGUMENT, KVC_FIELD_KV_LEN, [](bench& b) { b.plan.max_kv = 39; }},
    {"length past the table", KVC_BAD_ARGUMENT, KVC_FIELD_KV_LEN,
     [](bench& b) { b.batch.table_columns = 2; }},
    {"negative length", KVC_BAD_ARGUMENT, KVC_FIELD_KV_LEN, [](bench& b) { b.lens[1] = -1; }},
    {"rows go backwards", KVC_BAD_ARGUMENT, KVC_FIELD_Q_START,
     [](bench& b) { b.starts[1] = 3, b.starts[2] = 2; }},
    {"rows start below 0", KVC_BAD_ARGUMENT, KVC_FIELD_Q_START, [](bench& b) { b.starts[0] = -1; }},
    {"more rows than planned", KVC_BAD_ARGUMENT, KVC_FIELD_Q_START, [](bench& b) { b.plan.max_q = 1; }},
    {"sealed inside a block", KVC_BAD_ARGUMENT, KVC_FIELD_SEALED,
     [](bench& b) {
       static const int32_t sealed[] = {17, 20};
       b.batch.sealed = sealed;
     }},
    {"open table missing", KVC_BAD_ARGUMENT, KVC_FIELD_SEALED,
     [](bench& b) {
       static const int32_t sealed[] = {16, 20};
       b.batch.sealed = sealed;
     }},
    {"no positions", KVC_BAD_ARGUMENT, KVC_FIELD_Q_POS, [](bench& b) { b.batch.q_pos = nullptr; }},
    {"no queries", KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, [](bench& b) { b.q.data = nullptr; }},
    {"query heads", KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, [](bench& b) { b.q.heads = 2; }},
    {"query dim", KVC_BAD_ARGUMENT, KVC_FIELD_DIM_K, [](bench& b) { b.q.dim = 128; }},
    {"query type", KVC_UNSUPPORTED, KVC_FIELD_TYPE, [](bench& b) { b.q.type = KVC_U4; }},
    {"query stride", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, [](bench& b) { b.q.row_stride = 0; }},
    {"old softmax struct", KVC_ABI, KVC_FIELD_SOFTMAX, [](bench& b) { b.soft.struct_size = 0; }},
    {"scale", KVC_BAD_ARGUMENT, KVC_FIELD_SCALE, [](bench& b) { b.soft.scale = NAN; }},
    {"soft cap", KVC_BAD_ARGUMENT, KVC_FIELD_SOFT_CAP, [](bench& b) { b.soft.soft_cap = -1; }},
    {"window", KVC_BAD_ARGUMENT, KVC_FIELD_WINDOW, [](bench& b) { b.soft.window = -1; }},
    {"alibi", KVC_UNSUPPORTED, KVC_FIELD_ALIBI, [](bench& b) { b.soft.alibi = lone; }},
    {"mask", KVC_UNSUPPORTED, KVC_FIELD_MASK,
     [](bench& b) { b.soft.mask = reinterpret_cast<uint32_t*>(lone); }},
    {"old out struct", KVC_ABI, KVC_FIELD_OUT, [](bench& b) { b.out.struct_size = 3; }},
    {"no output", KVC_BAD_ARGUMENT, KVC_FIELD_OUT, [](bench& b) { b.out.o = b.out.lse2 = nullptr; }},
    {"output heads", KVC_BAD_ARGUMENT, KVC_FIELD_OUT, [](bench& b) { b.out.heads = 5; }},
    {"output dim", KVC_BAD_ARGUMENT, KVC_FIELD_DIM_V, [](bench& b) { b.out.dim = 32; }},
    {"output type", KVC_UNSUPPORTED, KVC_FIELD_TYPE, [](bench& b) { b.out.type = KVC_E4M3; }},
    {"key scores of rows over each other", KVC_BAD_ARGUMENT, KVC_FIELD_KEY_SCORE,
     [](bench& b) { b.out.key_score = lone, b.out.key_score_head_stride = 40; }},
    {"key scores of heads over each other", KVC_BAD_ARGUMENT, KVC_FIELD_KEY_SCORE,
     [](bench& b) {
       b.out.key_score = lone;
       b.out.key_score_stride = 160, b.out.key_score_head_stride = 39;
     }},
    {"lse stride", KVC_BAD_ARGUMENT, KVC_FIELD_LSE, [](bench& b) { b.out.lse_row_stride = -1; }},
    {"workspace short by one", KVC_WORKSPACE, KVC_FIELD_WORKSPACE, [](bench& b) { b.buf.bytes--; }},
    {"no workspace", KVC_WORKSPACE, KVC_FIELD_WORKSPACE, [](bench& b) { b.buf.ptr = nullptr; }},
    {"executor without run", KVC_BAD_ARGUMENT, KVC_FIELD_EXECUTOR,
     [](bench& b) { b.executor.run = nullptr; }},
    {"executor without width", KVC_BAD_ARGUMENT, KVC_FIELD_EXECUTOR, [](bench& b) { b.executor.width = 0; }},
};

const fault append_faults[] = {
    {"old struct", KVC_ABI, KVC_FIELD_APPEND, [](bench& b) { b.add.struct_size = 2; }},
    {"negative rows", KVC_BAD_ARGUMENT, KVC_FIELD_APPEND, [](bench& b) { b.add.rows = -1; }},
    {"borrowed layer", KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, [](bench& b) { b.kv.owner = 1; }},
    {"K type", KVC_UNSUPPORTED, KVC_FIELD_TYPE, [](bench& b) { b.add.k.type = KVC_E5M2; }},
    {"K heads", KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, [](bench& b) { b.add.k.heads = 1; }},
    {"V dim", KVC_BAD_ARGUMENT, KVC_FIELD_DIM_V, [](bench& b) { b.add.v.dim = 8; }},
    {"no V", KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, [](bench& b) { b.add.v.data = nullptr; }},
    {"V for a plane that aliases K", KVC_BAD_ARGUMENT, KVC_FIELD_V, [](bench& b) { b.kv.v.data = nullptr; }},
    {"no slots", KVC_BAD_ARGUMENT, KVC_FIELD_SLOT, [](bench& b) { b.add.slot = nullptr; }},
    {"slot past the pool", KVC_BAD_ARGUMENT, KVC_FIELD_SLOT,
     [](bench& b) { b.slots[1] = int64_t{b.kv.blocks} * 16; }},
    {"slot below -1", KVC_BAD_ARGUMENT, KVC_FIELD_SLOT, [](bench& b) { b.slots[1] = -2; }},
    {"open slots without a space", KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_SLOT,
     [](bench& b) { b.add.open_slot = b.slots; }},
    {"negative slot stride", KVC_BAD_ARGUMENT, KVC_FIELD_STRIDE, [](bench& b) { b.add.slot_stride = -1; }},
    {"rope struct", KVC_ABI, KVC_FIELD_ROPE, [](bench& b) { b.add.rope = &b.turn, b.turn.struct_size = 0; }},
    {"rope style", KVC_UNSUPPORTED, KVC_FIELD_ROPE_STYLE,
     [](bench& b) { b.add.rope = &b.turn, b.turn.style = 2; }},
    {"odd rope dims", KVC_BAD_ARGUMENT, KVC_FIELD_ROPE_DIMS,
     [](bench& b) { b.add.rope = &b.turn, b.turn.dims = 63; }},
    {"rope wider than the head", KVC_BAD_ARGUMENT, KVC_FIELD_ROPE_DIMS,
     [](bench& b) { b.add.rope = &b.turn, b.turn.dims = 66; }},
    {"rope theta", KVC_BAD_ARGUMENT, KVC_FIELD_ROPE_THETA,
     [](bench& b) { b.add.rope = &b.turn, b.turn.theta = 0; }},
    {"rope table", KVC_BAD_ARGUMENT, KVC_FIELD_ROPE_TABLE,
     [](bench& b) { b.add.rope = &b.turn, b.turn.table_positions = 5; }},
    {"rope without positions", KVC_BAD_ARGUMENT, KVC_FIELD_POS,
     [](bench& b) { b.add.rope = &b.turn, b.add.pos = nullptr; }},
};

const fault run_faults[] = {
    {"old struct", KVC_ABI, KVC_FIELD_COMMANDS, [](bench& b) { b.list.struct_size = 4; }},
    {"no layers", KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, [](bench& b) { b.list.layers = nullptr; }},
    {"no commands", KVC_BAD_ARGUMENT, KVC_FIELD_COMMANDS, [](bench& b) { b.list.commands = nullptr; }},
    {"owner past the layers", KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, [](bench& b) { b.kv.owner = 2; }},
    {"group nobody has", KVC_BAD_ARGUMENT, KVC_FIELD_LAYERS, [](bench& b) { b.commands[1].group = 9; }},
    {"unknown op", KVC_UNSUPPORTED, KVC_FIELD_OP, [](bench& b) { b.commands[1].op = 6; }},
    {"tokens past the block", KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS,
     [](bench& b) { b.commands[0].tokens = 17; }},
    {"negative tokens", KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS, [](bench& b) { b.commands[0].tokens = -1; }},
    {"copy from nowhere", KVC_BAD_ARGUMENT, KVC_FIELD_SRC, [](bench& b) { b.commands[0].src = -1; }},
    {"copy past the pool", KVC_BAD_ARGUMENT, KVC_FIELD_DST,
     [](bench& b) { b.commands[0].dst = b.kv.blocks; }},
    {"seal without open space", KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_K,
     [](bench& b) { b.commands[1].op = KVC_OP_SEAL; }},
    {"rotate without rope", KVC_BAD_ARGUMENT, KVC_FIELD_ROPE,
     [](bench& b) { b.commands[1].op = KVC_OP_ROTATE, b.list.rope = nullptr; }},
    {"payload past the ids", KVC_BAD_ARGUMENT, KVC_FIELD_ARG, [](bench& b) { b.commands[1].arg = 4; }},
    {"payload longer than the ids", KVC_BAD_ARGUMENT, KVC_FIELD_IDS, [](bench& b) { b.ids[0] = 3; }},
    {"keep index", KVC_BAD_ARGUMENT, KVC_FIELD_KEEP, [](bench& b) { b.ids[2] = 1; }},
    {"kept slot past the sources", KVC_BAD_ARGUMENT, KVC_FIELD_KEEP, [](bench& b) { b.kept[2] = 32; }},
    {"kept slots out of order", KVC_BAD_ARGUMENT, KVC_FIELD_KEEP, [](bench& b) { b.kept[1] = 1; }},
    {"more kept than the target holds", KVC_BAD_ARGUMENT, KVC_FIELD_TOKENS,
     [](bench& b) { b.commands[1].tokens = 17; }},
    {"gather source", KVC_BAD_ARGUMENT, KVC_FIELD_SRC, [](bench& b) { b.ids[3] = b.kv.blocks; }},
    {"gather target", KVC_BAD_ARGUMENT, KVC_FIELD_DST, [](bench& b) { b.ids[5] = -1; }},
    {"gather over a source still to be read", KVC_BAD_ARGUMENT, KVC_FIELD_DST,
     [](bench& b) { b.ids[5] = b.ids[4]; }},
};

const fault score_faults[] = {
    {"plan never made", KVC_BAD_ARGUMENT, KVC_FIELD_PLAN, [](bench& b) { b.plan.width = 0; }},
    {"K type", KVC_UNSUPPORTED, KVC_FIELD_K, [](bench& b) { b.kv.k.type = KVC_U2 + 1; }},
    {"id past the pool", KVC_BAD_ARGUMENT, KVC_FIELD_TABLE,
     [](bench& b) { b.w.row_of_table(1)[1] = b.kv.blocks; }},
    {"more rows than planned", KVC_BAD_ARGUMENT, KVC_FIELD_Q_START, [](bench& b) { b.plan.max_q = 1; }},
    {"query heads", KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, [](bench& b) { b.q.heads = 2; }},
    {"query dim", KVC_BAD_ARGUMENT, KVC_FIELD_DIM_K, [](bench& b) { b.q.dim = 128; }},
    {"no queries", KVC_BAD_ARGUMENT, KVC_FIELD_ROWS, [](bench& b) { b.q.data = nullptr; }},
    {"soft cap", KVC_BAD_ARGUMENT, KVC_FIELD_SOFT_CAP, [](bench& b) { b.soft.soft_cap = -1; }},
    {"no positions", KVC_BAD_ARGUMENT, KVC_FIELD_Q_POS, [](bench& b) { b.batch.q_pos = nullptr; }},
    {"old score struct", KVC_ABI, KVC_FIELD_SCORE, [](bench& b) { b.what.struct_size = 8; }},
    {"kind", KVC_UNSUPPORTED, KVC_FIELD_KIND, [](bench& b) { b.what.kind = 3; }},
    {"negative kind", KVC_UNSUPPORTED, KVC_FIELD_KIND, [](bench& b) { b.what.kind = -1; }},
    {"reserved", KVC_BAD_ARGUMENT, KVC_FIELD_RESERVED, [](bench& b) { b.what.reserved = 1; }},
    {"no lse2", KVC_BAD_ARGUMENT, KVC_FIELD_LSE, [](bench& b) { b.what.lse2 = nullptr; }},
    {"lse2 stride", KVC_BAD_ARGUMENT, KVC_FIELD_LSE, [](bench& b) { b.what.lse_row_stride = -1; }},
    {"hits without a bound", KVC_BAD_ARGUMENT, KVC_FIELD_LEAST,
     [](bench& b) { b.what.kind = KVC_SCORE_HIT; }},
    {"a bound without hits", KVC_BAD_ARGUMENT, KVC_FIELD_LEAST, [](bench& b) { b.what.least = lone; }},
    {"no sums", KVC_BAD_ARGUMENT, KVC_FIELD_SUM, [](bench& b) { b.what.sum = nullptr; }},
    {"sums of heads over each other", KVC_BAD_ARGUMENT, KVC_FIELD_SUM,
     [](bench& b) { b.what.sum_head_stride = 39; }},
    {"sums of sequences over each other", KVC_BAD_ARGUMENT, KVC_FIELD_SUM,
     [](bench& b) { b.what.sum_stride = 1; }},
    {"key scores over each other", KVC_BAD_ARGUMENT, KVC_FIELD_KEY_SCORE,
     [](bench& b) { b.what.key_score = lone, b.what.key_score_head_stride = 40; }},
    {"a bound past the keys", KVC_BAD_ARGUMENT, KVC_FIELD_UPTO, [](bench& b) { b.upto[4] = 21; }},
    {"a negative bound", KVC_BAD_ARGUMENT, KVC_FIELD_UPTO, [](bench& b) { b.upto[1] = -1; }},
    {"small workspace", KVC_WORKSPACE, KVC_FIELD_WORKSPACE, [](bench& b) { b.buf.bytes = 4096; }},
    {"no workspace", KVC_WORKSPACE, KVC_FIELD_WORKSPACE, [](bench& b) { b.buf.ptr = nullptr; }},
    {"executor without run", KVC_BAD_ARGUMENT, KVC_FIELD_EXECUTOR,
     [](bench& b) { b.executor.run = nullptr; }},
};

template <class Call>
void try_all(std::span<const fault> faults, Call&& call) {
  {
    bench good;
    kvc_error e{};
    REQUIRE(call(good, e) == KVC_OK);
  }
  for (const fault& f : faults) {
    bench b;
    f.edit(b);
    const std::vector<float> o = b.o, lse = b.lse, sums = b.sums;
    const auto* first = static_cast<const std::byte*>(b.w.planes.data());
    const std::vector<std::byte> stored(first, first + b.w.planes.size().count);
    kvc_error e{1, 2, 3, 4};
    const kvc_status s = call(b, e);
    INFO(f.what << ": " << kvc_status_text(s) << ", field " << kvc_field_text(e.field) << ", value "
                << e.value);
    CHECK(s == f.status);
    CHECK(e.field == f.field);
    CHECK((same_bits(b.o, o) && same_bits(b.lse, lse) && same_bits(b.sums, sums)));
    CHECK(std::memcmp(b.w.planes.data(), stored.data(), stored.size()) == 0);
  }
}

}  // namespace

TEST_CASE("attend refuses every wrong argument by its field and writes nothing", "[check]") {
  try_all(attend_faults, [](bench& b, kvc_error& e) { return attend(b, e); });
}

TEST_CASE("score refuses every wrong argument by its field and adds nothing", "[check]") {
  try_all(score_faults, [](bench& b, kvc_error& e) {
    return kvc_cpu_score(&b.plan, &b.kv, &b.batch, &b.q, &b.soft, &b.what, b.buf, &b.executor, &e);
  });
}

TEST_CASE("append refuses every wrong argument by its field and writes nothing", "[check]") {
  try_all(append_faults,
          [](bench& b, kvc_error& e) { return kvc_cpu_append(&b.kv, &b.add, &b.executor, &e); });
}

TEST_CASE("a command list with one wrong command moves nothing at all", "[check]") {
  try_all(run_faults, [](bench& b, kvc_error& e) { return kvc_cpu_run(&b.list, &b.executor, &e); });
}

TEST_CASE("planning answers what this build cannot do", "[check]") {
  const fault faults[] = {
      {"old struct", KVC_ABI, KVC_FIELD_PLAN, [](bench& b) { b.in.struct_size = 0; }},
      {"no kv", KVC_BAD_ARGUMENT, KVC_FIELD_KV, [](bench& b) { b.in.kv = nullptr; }},
      {"query heads", KVC_BAD_ARGUMENT, KVC_FIELD_Q_HEADS, [](bench& b) { b.in.q_heads = 3; }},
      {"query type", KVC_UNSUPPORTED, KVC_FIELD_TYPE, [](bench& b) { b.in.q_type = KVC_U2; }},
      {"max_q", KVC_BAD_ARGUMENT, KVC_FIELD_MAX_Q, [](bench& b) { b.in.max_q = 0; }},
      {"max_kv", KVC_BAD_ARGUMENT, KVC_FIELD_MAX_KV, [](bench& b) { b.in.max_kv = -1; }},
      {"alibi", KVC_UNSUPPORTED, KVC_FIELD_FEATURES, [](bench& b) { b.in.features = KVC_USE_ALIBI; }},
      {"unknown feature", KVC_UNSUPPORTED, KVC_FIELD_FEATURES, [](bench& b) { b.in.features = 1u << 30; }},
      {"target", KVC_UNSUPPORTED, KVC_FIELD_TARGET, [](bench& b) { b.in.target = 77; }},
      {"packed K", KVC_UNSUPPORTED, KVC_FIELD_K, [](bench& b) { b.kv.k.type = KVC_U2 + 1; }},
      {"head dim", KVC_UNSUPPORTED, KVC_FIELD_DIM_K, [](bench& b) { b.kv.dim_k = 100; }},
  };
  for (const fault& f : faults) {
    bench b;
    f.edit(b);
    kvc_plan plan{};
    plan.struct_size = sizeof plan;
    const kvc_plan before = plan;
    kvc_error e{};
    INFO(f.what);
    CHECK(kvc_cpu_plan(&b.in, &plan, &e) == f.status);
    CHECK(e.field == f.field);
    CHECK(std::memcmp(&plan, &before, sizeof plan) == 0);
  }
}

TEST_CASE("a plan needs no memory behind the planes", "[check]") {
  bench b;
  b.kv.k.data = b.kv.v.data = nullptr;
  kvc_plan plan{};
  plan.struct_size = sizeof plan;
  CHECK(kvc_cpu_plan(&b.in, &plan, nullptr) == KVC_OK);
  CHECK(plan.workspace_bytes == b.plan.workspace_bytes);
}

TEST_CASE("merge refuses parts that do not fit and writes nothing", "[check]") {
  bench b;
  std::vector<float> other(b.o.size(), 1.0f), other_lse(12, 0.0f);
  const kvc_out good = dense_out(other.data(), element::f32, 4, 64, other_lse.data());
  const auto field = [&](std::vector<kvc_out> parts, kvc_out out, int32_t rows = 3) {
    kvc_error e{};
    const std::vector<float> before = b.o;
    const kvc_status s = kvc_cpu_merge(parts.data(), int32_t(parts.size()), rows, nullptr, &out, &e);
    CHECK((s == KVC_OK || same_bits(before, b.o)));
    return s == KVC_OK ? KVC_FIELD_NONE : e.field;
  };
  auto bad = good;
  bad.lse2 = nullptr;
  CHECK(field({good, bad}, b.out) == KVC_FIELD_LSE);
  bad = good, bad.dim = 32;
  CHECK(field({bad}, b.out) == KVC_FIELD_DIM_V);
  bad = good, bad.heads = 2;
  CHECK(field({bad}, b.out) == KVC_FIELD_OUT);
  CHECK(field({}, b.out) == KVC_FIELD_PARTS);
  CHECK(field({good}, b.out, -1) == KVC_FIELD_ROWS);
  bad = b.out, bad.key_score = lone;
  CHECK(field({good}, bad) == KVC_FIELD_KEY_SCORE);
  bad = b.out, bad.o = nullptr;
  CHECK(field({good}, bad) == KVC_FIELD_OUT);
  bad = b.out, bad.dim = 512;
  CHECK(field({good}, bad) == KVC_FIELD_DIM_V);
  CHECK(field({good}, b.out) == KVC_FIELD_NONE);
}

TEST_CASE("an empty batch, zero rows and zero commands are fine", "[check]") {
  bench b;
  kvc_error e{};
  b.batch.n = 0;
  CHECK(attend(b, e) == KVC_OK);
  b.batch.n = 2;
  b.starts[1] = b.starts[2] = 0;
  CHECK(attend(b, e) == KVC_OK);
  CHECK(b.o[0] == 77.0f);
  CHECK(kvc_cpu_score(&b.plan, &b.kv, &b.batch, &b.q, &b.soft, &b.what, b.buf, nullptr, &e) == KVC_OK);
  CHECK(b.sums[0] == 77.0f);
  b.add.rows = 0;
  CHECK(kvc_cpu_append(&b.kv, &b.add, nullptr, &e) == KVC_OK);
  b.list.n_commands = 0;
  CHECK(kvc_cpu_run(&b.list, nullptr, &e) == KVC_OK);
  CHECK(kvc_cpu_append(&b.kv, &b.add, nullptr, nullptr) == KVC_OK);  // the error is optional
  CHECK(kvc_cpu_append(nullptr, &b.add, nullptr, nullptr) == KVC_BAD_ARGUMENT);
}

TEST_CASE("every status, field and target has a text of its own", "[check]") {
  std::vector<std::string> seen;
  for (int32_t f = 0; f < KVC_FIELD_COUNT_; ++f) seen.emplace_back(kvc_field_text(f));
  std::sort(seen.begin(), seen.end());
  CHECK(std::adjacent_find(seen.begin(), seen.end()) == seen.end());
  CHECK(std::string(kvc_field_text(KVC_FIELD_LAYERS)) == "layers");
  CHECK(std::string(kvc_field_text(KVC_FIELD_COUNT_)) == "unknown field");
  CHECK(std::string(kvc_status_text(KVC_WORKSPACE)) == "workspace too small");
  CHECK(std::string(kvc_status_text(5)) == "unknown status");
  CHECK(std::string(kvc_target_text(KVC_TARGET_AVX2)) == "avx2");
}
