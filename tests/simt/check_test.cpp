// SPDX-License-Identifier: Apache-2.0
// What the CUDA entry points refuse, with the field they object to; and that each option they take is not
// ignored.
#include "simt/gpu_world.hpp"

namespace kvcache::test {
namespace {

struct call_of_all {
  call_of_all() : w({2, 4, 64, 16, KVC_F16, layout::heads_first}, {40, 300}, 1) {
    ask.softmax = softmax_of(0.125f);
    w.ask_queries(ask);
    batch = w.batch_of(ask);
    in.struct_size = sizeof in;
    in.q_heads = 8;
    in.q_type = KVC_F16;
    in.out_type = KVC_F32;
    in.n = 2;
    in.max_q = 1;
    in.max_kv = 1024;
    in.width = 8;
    in.kv = &w.kv;
    plan.struct_size = sizeof plan;
    REQUIRE(kvc_cuda_plan(&in, &plan, nullptr) == KVC_OK);
    for (const float x : w.q_values) q16.push_back(narrow16(x, KVC_F16));
    q = {q16.data(), KVC_F16, 8, 64, 0, 8 * 128, 128};
    o.resize(2 * 8 * 64);
    lse.resize(16);
    out.struct_size = sizeof out;
    out.type = KVC_F32;
    out.heads = 8;
    out.dim = 64;
    out.o = o.data();
    out.row_stride = 8 * 256;
    out.head_stride = 256;
    out.lse2 = lse.data();
    memory.resize(plan.workspace_bytes / 4 + 8);
    workspace = {memory.data(), plan.workspace_bytes};
  }

  /// Expects this status and field, and that nothing was launched.
  void refuses(kvc_status status, int32_t field) {
    const int before = simt::the_backend().launches;
    kvc_error e{};
    const kvc_status got =
        kvc_cuda_attend(&plan, &w.kv, &batch, &q, &ask.softmax, &out, workspace, nullptr, &e);
    CHECK(got == status);
    CHECK(kvc_field_text(e.field) == std::string(kvc_field_text(field)));
    CHECK(simt::the_backend().launches == before);
  }
  kvc_status run(kvc_error* e = nullptr) {
    return kvc_cuda_attend(&plan, &w.kv, &batch, &q, &ask.softmax, &out, workspace, nullptr, e);
  }

  gpu_world w;
  gpu_ask ask;
  kvc_plan_in in{};
  kvc_plan plan{};
  kvc_batch batch{};
  kvc_rows q{};
  kvc_out out{};
  kvc_buf workspace{};
  std::vector<uint16_t> q16;
  std::vector<float> o, lse, memory;
};

template <class Edit>
void attend_refuses(kvc_status status, int32_t field, Edit edit) {
  call_of_all c;
  edit(c);
  c.refuses(status, field);
}

template <class Edit>
void plan_refuses(kvc_status status, int32_t field, Edit edit) {
  call_of_all c;
  edit(c);
  kvc_error e{};
  kvc_plan plan{};
  plan.struct_size = sizeof plan;
  CHECK(kvc_cuda_plan(&c.in, &plan, &e) == status);
  CHECK(kvc_field_text(e.field) == std::string(kvc_field_text(field)));
}

}  // namespace

TEST_CASE("the call that the refusals start from is good") {
  call_of_all c;
  REQUIRE(c.plan.splits > 1);
  REQUIRE(c.plan.workspace_bytes == size_t(2 * 8) * size_t(c.plan.splits) * (64 + 1) * 4);
  kvc_error e{};
  REQUIRE(c.run(&e) == KVC_OK);
  REQUIRE(c.o[0] == c.o[0]);
}

TEST_CASE("attend names the field it objects to and launches nothing") {
  using c = call_of_all;
  const auto bad = KVC_BAD_ARGUMENT, un = KVC_UNSUPPORTED;
  attend_refuses(KVC_ABI, KVC_FIELD_BATCH, [](c& x) { x.batch.struct_size = 0; });
  attend_refuses(KVC_ABI, KVC_FIELD_PLAN, [](c& x) { x.plan.struct_size -= 4; });
  attend_refuses(KVC_ABI, KVC_FIELD_SOFTMAX, [](c& x) { x.ask.softmax.struct_size = 1; });
  attend_refuses(KVC_ABI, KVC_FIELD_OUT, [](c& x) { x.out.struct_size = 1; });
  attend_refuses(KVC_ABI, KVC_FIELD_KV, [](c& x) { x.w.kv.struct_size = 1; });
  attend_refuses(bad, KVC_FIELD_N, [](c& x) { x.batch.n = 3; });
  attend_refuses(bad, KVC_FIELD_N, [](c& x) { x.batch.n = -1; });
  attend_refuses(bad, KVC_FIELD_KV_LEN, [](c& x) { x.batch.kv_len = nullptr; });
  attend_refuses(bad, KVC_FIELD_TABLE, [](c& x) { x.batch.table = nullptr; });
  attend_refuses(bad, KVC_FIELD_TABLE_COLUMNS, [](c& x) { x.batch.table_columns = -1; });
  attend_refuses(bad, KVC_FIELD_STRIDE, [](c& x) { x.batch.table_stride = -1; });
  attend_refuses(bad, KVC_FIELD_Q_POS, [](c& x) { x.batch.q_pos = nullptr; });
  attend_refuses(un, KVC_FIELD_OPEN_TABLE, [](c& x) { x.batch.open_table = x.batch.table; });
  attend_refuses(un, KVC_FIELD_SEALED, [](c& x) { x.batch.sealed = x.batch.kv_len; });
  attend_refuses(un, KVC_FIELD_ROW_SEALED, [](c& x) { x.batch.row_sealed = x.batch.kv_len; });
  attend_refuses(un, KVC_FIELD_EXEMPT_TABLE, [](c& x) { x.batch.exempt_table = x.batch.kv_len; });
  attend_refuses(bad, KVC_FIELD_ROWS, [](c& x) { x.q.data = nullptr; });
  attend_refuses(bad, KVC_FIELD_ROWS, [](c& x) { x.q.heads = 4; });
  attend_refuses(bad, KVC_FIELD_DIM_K, [](c& x) { x.q.dim = 128; });
  attend_refuses(un, KVC_FIELD_TYPE, [](c& x) { x.q.type = KVC_BF16; });
  attend_refuses(un, KVC_FIELD_TYPE, [](c& x) { x.q.type = KVC_E4M3; });
  attend_refuses(bad, KVC_FIELD_STRIDE, [](c& x) { x.q.head_stride = 0; });
  attend_refuses(bad, KVC_FIELD_SCALE, [](c& x) { x.ask.softmax.scale = NAN; });
  attend_refuses(bad, KVC_FIELD_SOFT_CAP, [](c& x) { x.ask.softmax.soft_cap = -1; });
  attend_refuses(bad, KVC_FIELD_WINDOW, [](c& x) { x.ask.softmax.window = -1; });
  attend_refuses(un, KVC_FIELD_ALIBI, [](c& x) { x.ask.softmax.alibi = x.lse.data(); });
  attend_refuses(un, KVC_FIELD_MASK, [](c& x) { x.ask.softmax.mask_start = reinterpret_cast<int64_t*>(&x); });
  attend_refuses(bad, KVC_FIELD_DIM_V, [](c& x) { x.out.dim = 32; });
  attend_refuses(bad, KVC_FIELD_OUT, [](c& x) { x.out.heads = 2; });
  attend_refuses(bad, KVC_FIELD_OUT, [](c& x) { x.out.o = nullptr, x.out.lse2 = nullptr; });
  attend_refuses(bad, KVC_FIELD_KEY_SCORE, [](c& x) { x.out.key_score = x.lse.data(); });
  attend_refuses(KVC_WORKSPACE, KVC_FIELD_WORKSPACE, [](c& x) { x.workspace.bytes -= 1; });
  attend_refuses(KVC_WORKSPACE, KVC_FIELD_WORKSPACE, [](c& x) { x.workspace.ptr = nullptr; });
  attend_refuses(bad, KVC_FIELD_TARGET, [](c& x) { x.plan.target = KVC_TARGET_SCALAR; });
  attend_refuses(bad, KVC_FIELD_PLAN, [](c& x) { x.plan.splits = 0; });
  attend_refuses(bad, KVC_FIELD_PLAN, [](c& x) { x.plan.row_block = 7; });
  attend_refuses(bad, KVC_FIELD_KV_HEADS, [](c& x) { x.plan.kv_heads = 1; });
  attend_refuses(bad, KVC_FIELD_BLOCK, [](c& x) { x.plan.block = 32; });
  attend_refuses(bad, KVC_FIELD_K, [](c& x) { x.w.kv.k.data = nullptr; });
  attend_refuses(bad, KVC_FIELD_K, [](c& x) { x.w.kv.k.data = static_cast<char*>(x.w.kv.k.data) + 2; });
  attend_refuses(un, KVC_FIELD_V, [](c& x) { x.w.kv.v.data = nullptr; });
  attend_refuses(un, KVC_FIELD_STRIDE, [](c& x) { x.w.kv.k.token_stride += 2; });
}

TEST_CASE("plan is the capability query") {
  using c = call_of_all;
  const auto bad = KVC_BAD_ARGUMENT, un = KVC_UNSUPPORTED;
  plan_refuses(KVC_ABI, KVC_FIELD_PLAN, [](c& x) { x.in.struct_size = 0; });
  plan_refuses(bad, KVC_FIELD_Q_HEADS, [](c& x) { x.in.q_heads = 7; });
  plan_refuses(bad, KVC_FIELD_Q_HEADS, [](c& x) { x.in.q_heads = 0; });
  plan_refuses(un, KVC_FIELD_TYPE, [](c& x) { x.in.q_type = KVC_BF16; });
  plan_refuses(un, KVC_FIELD_TYPE, [](c& x) { x.in.out_type = KVC_U8; });
  plan_refuses(bad, KVC_FIELD_N, [](c& x) { x.in.n = -1; });
  plan_refuses(un, KVC_FIELD_N, [](c& x) { x.in.n = INT32_MAX; });
  plan_refuses(bad, KVC_FIELD_MAX_Q, [](c& x) { x.in.max_q = 0; });
  plan_refuses(bad, KVC_FIELD_MAX_KV, [](c& x) { x.in.max_kv = -1; });
  plan_refuses(un, KVC_FIELD_FEATURES, [](c& x) { x.in.features = KVC_USE_ALIBI; });
  plan_refuses(un, KVC_FIELD_FEATURES, [](c& x) { x.in.features = KVC_USE_OPEN; });
  plan_refuses(un, KVC_FIELD_TARGET, [](c& x) { x.in.target = KVC_TARGET_AVX2; });
  plan_refuses(un, KVC_FIELD_HADAMARD, [](c& x) { x.w.kv.hadamard = KVC_HADAMARD_K; });
  plan_refuses(un, KVC_FIELD_K, [](c& x) {  // f32
    x.w.kv.k.type = KVC_F32;
    x.w.kv.k.dim_stride = 4;
    x.w.kv.k.token_stride *= 2;
    x.w.kv.k.head_stride *= 2;
    x.w.kv.k.block_stride *= 2;
  });
  plan_refuses(un, KVC_FIELD_V, [](c& x) { x.w.kv.v.type = KVC_BF16; });
  plan_refuses(un, KVC_FIELD_STRIDE, [](c& x) {  // transposed K
    x.w.kv.k.token_stride = 2;
    x.w.kv.k.dim_stride = 32;
  });
}

TEST_CASE("every head dim is either right or refused") {
  for (int32_t dim = 8; dim <= 576; dim += 8) {
    call_of_all c;
    c.w.kv.dim_k = c.w.kv.dim_v = dim;
    for (kvc_plane* p : {&c.w.kv.k, &c.w.kv.v}) {
      p->token_stride = 2 * dim;
      p->head_stride = 32 * dim;
      p->block_stride = 64 * dim;
    }
    kvc_plan plan{};
    plan.struct_size = sizeof plan;
    const bool here = dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 256;
    CAPTURE(dim);
    CHECK(kvc_cuda_plan(&c.in, &plan, nullptr) == (here ? KVC_OK : KVC_UNSUPPORTED));
  }
}

TEST_CASE("a plan for CUDA is no plan for the CPU") {
  call_of_all c;
  kvc_error e{};
  REQUIRE(kvc_cpu_attend(&c.plan, &c.w.kv, &c.batch, &c.q, &c.ask.softmax, &c.out, c.workspace, nullptr,
                         &e) != KVC_OK);
}

TEST_CASE("every optional input changes the result") {
  using c = call_of_all;
  static float sinks[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  static std::vector<int32_t> positions(600, 5);
  void (*const edits[])(c&) = {
      [](c& x) { x.ask.softmax.scale = 0.2f; },
      [](c& x) { x.ask.softmax.soft_cap = 2; },
      [](c& x) { x.ask.softmax.window = 10; },
      [](c& x) { x.ask.softmax.sink_logit = sinks; },
      [](c& x) { x.w.q_pos[1] = 20; },
      [](c& x) { x.w.kv_len[1] = 200; },
      [](c& x) { x.w.table[20] = x.w.table[0]; },
      [](c& x) {
        x.ask.softmax.causal = 0;
        x.w.q_pos[0] = x.w.q_pos[1] = 0;
        x.ask.softmax.window = 3;
        x.batch.k_pos = positions.data();
        x.batch.k_pos_stride = 300;
        positions[7] = -50;
      },
  };
  call_of_all plain;
  REQUIRE(plain.run() == KVC_OK);
  int number = 0;
  for (const auto edit : edits) {
    CAPTURE(number++);
    call_of_all changed;
    edit(changed);
    REQUIRE(changed.run() == KVC_OK);
    CHECK(changed.lse != plain.lse);
  }
}

TEST_CASE("append, rope and merge name the field they object to") {
  call_of_all c;
  std::vector<float> rows(2 * 2 * 64);
  std::vector<int64_t> slot{0, 1};
  std::vector<int32_t> pos{0, 1};
  kvc_append good{};
  good.struct_size = sizeof good;
  good.rows = 2;
  good.k = good.v = {rows.data(), KVC_F32, 2, 64, 0, 512, 256};
  good.slot = slot.data();
  REQUIRE(kvc_cuda_append(&c.w.kv, &good, nullptr, nullptr) == KVC_OK);
  const auto refuses = [&](kvc_status status, int32_t field, auto edit) {
    kvc_append a = good;
    edit(a);
    kvc_error e{};
    CHECK(kvc_cuda_append(&c.w.kv, &a, nullptr, &e) == status);
    CHECK(e.field == field);
  };
  static kvc_rope rope{};
  rope.struct_size = sizeof rope;
  rope.dims = 64;
  rope.theta = 1e4;
  refuses(KVC_BAD_ARGUMENT, KVC_FIELD_SLOT, [](kvc_append& a) { a.slot = nullptr; });
  refuses(KVC_BAD_ARGUMENT, KVC_FIELD_OPEN_SLOT, [](kvc_append& a) { a.open_slot = a.slot; });
  refuses(KVC_BAD_ARGUMENT, KVC_FIELD_APPEND, [](kvc_append& a) { a.rows = -1; });
  refuses(KVC_BAD_ARGUMENT, KVC_FIELD_DIM_V, [](kvc_append& a) { a.v.dim = 32; });
  refuses(KVC_BAD_ARGUMENT, KVC_FIELD_POS, [](kvc_append& a) { a.rope = &rope; });
  refuses(KVC_UNSUPPORTED, KVC_FIELD_TYPE, [](kvc_append& a) { a.k.type = KVC_U4; });

  kvc_error e{};
  const kvc_rows q{rows.data(), KVC_F32, 2, 64, 0, 512, 256};
  CHECK(kvc_cuda_rope(&rope, &q, 2, nullptr, rows.data(), nullptr, &e) == KVC_BAD_ARGUMENT);
  CHECK(e.field == KVC_FIELD_POS);
  CHECK(kvc_cuda_rope(&rope, &q, 2, pos.data(), nullptr, nullptr, &e) == KVC_BAD_ARGUMENT);
  CHECK(e.field == KVC_FIELD_OUT);
  CHECK(kvc_cuda_rope(&rope, nullptr, 2, pos.data(), rows.data(), nullptr, &e) == KVC_BAD_ARGUMENT);
  CHECK(kvc_cuda_rope(&rope, &q, 0, nullptr, nullptr, nullptr, &e) == KVC_OK);

  CHECK(kvc_cuda_merge(&c.out, 17, 1, nullptr, &c.out, nullptr, &e) == KVC_UNSUPPORTED);
  CHECK(e.field == KVC_FIELD_PARTS);
  kvc_out blind = c.out;
  blind.lse2 = nullptr;
  CHECK(kvc_cuda_merge(&blind, 1, 1, nullptr, &c.out, nullptr, &e) == KVC_BAD_ARGUMENT);
  CHECK(e.field == KVC_FIELD_LSE);
  CHECK(kvc_cuda_merge(&c.out, 1, -1, nullptr, &c.out, nullptr, &e) == KVC_BAD_ARGUMENT);
  CHECK(e.field == KVC_FIELD_ROWS);
}

TEST_CASE("a kernel's fault is a device error with its code") {
  call_of_all c;
  simt::the_backend().shared_taken = 40000;
  kvc_error e{};
  const kvc_status status = c.run(&e);
  simt::the_backend().shared_taken = 0;
  REQUIRE(status == KVC_DEVICE);
  REQUIRE(e.native == simt::launch_failed);
  REQUIRE(simt::the_backend().fault.find("past the end") != std::string::npos);
}

}  // namespace kvcache::test
