// SPDX-License-Identifier: Apache-2.0
// The tests written in C, as Catch2 cases; and that no error of the C++ side lacks a C form.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "kvcache/attend/data_plane.hpp"
#include "kvcache/attend/host_planes.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/cache/packed.hpp"
#include "kvcache/quant/parse.hpp"

void capi_check(int ok, const char* text, const char* file, int line) {
  if (ok == 0) FAIL_CHECK(file << ":" << line << ": " << text);
  if (ok != 0) SUCCEED();
}

void capi_answer(kvc_status got, kvc_status want, const kvc_error* error, int32_t field, const char* text,
                 const char* file, int line) {
  if (got != want) {
    FAIL_CHECK(file << ":" << line << ": " << text << " answers '" << kvc_status_text(got) << "' ("
                    << kvc_field_text(got != KVC_OK ? error->field : 0) << "), not '" << kvc_status_text(want)
                    << "'");
  } else if (want != KVC_OK && error->field != field) {
    FAIL_CHECK(file << ":" << line << ": " << text << " objects to '" << kvc_field_text(error->field)
                    << "', not to '" << kvc_field_text(field) << "'");
  } else {
    SUCCEED();
  }
}

TEST_CASE("every field of a configuration is checked and named") {
  capi_test_config();
}
TEST_CASE("a cache is built as the planner says") {
  capi_test_create();
}
TEST_CASE("the planner counts whole blocks") {
  capi_test_planner();
}
TEST_CASE("a scope must be chosen, and each of its parts separates") {
  capi_test_scope();
}
TEST_CASE("open finds what was committed and refuses what does not fit") {
  capi_test_open();
}
TEST_CASE("lengths, tables, commit and truncate agree") {
  capi_test_lengths();
}
TEST_CASE("scarcity is answered with what is missing and changes nothing") {
  capi_test_scarcity();
}
TEST_CASE("branches share blocks until one of them writes") {
  capi_test_branches();
}
TEST_CASE("drafts wait to be accepted") {
  capi_test_drafts();
}
TEST_CASE("a lossy format seals, stops drafts and does not reopen") {
  capi_test_lossy();
}
TEST_CASE("a step shows its commands and events until it ends") {
  capi_test_step();
}
TEST_CASE("evict frees what nobody holds, the end of a text first") {
  capi_test_evict();
}
TEST_CASE("an eviction policy is named by its text, and what is wrong with the text is said") {
  capi_test_eviction_text();
}
TEST_CASE("levels end and units expire when the caller says that time has passed") {
  capi_test_time();
}
TEST_CASE("a reset cache cannot be told from a new one") {
  capi_test_reset();
}
TEST_CASE("tokens are dropped, counted, and what is left is no prefix of anybody") {
  capi_test_retain();
}
TEST_CASE("a drop that cannot be, or would cost memory, is refused by name and changes nothing") {
  capi_test_retain_refusals();
}
TEST_CASE("a gather keeps the slots that the lists name, per kv head, and an overwritten slot its newcomer") {
  capi_test_retain_bytes();
}
TEST_CASE("a view describes the batch that attend takes") {
  capi_test_view();
}
TEST_CASE("compressed rows hold the same tables") {
  capi_test_csr();
}
TEST_CASE("a closed, made-up or exchanged sequence is refused by every call") {
  capi_test_handles();
}
TEST_CASE("a cache refuses the sequences of another, and a destroyed one everything") {
  capi_test_other_cache();
}
TEST_CASE("missing outputs are refused, and every status and field has words") {
  capi_test_missing();
}
TEST_CASE("structs of the host half lie in memory as they are written down") {
  capi_test_layout();
}
TEST_CASE("there are as many caches as the header says, and each handle is new") {
  capi_test_many_caches();
}
TEST_CASE("two caches do not see each other") {
  capi_test_two_caches();
}
TEST_CASE("planes are described in memory of the caller") {
  capi_test_planes();
}
TEST_CASE("a C program appends and attends over shared blocks") {
  capi_test_end_to_end();
}

TEST_CASE("formats are read from text, and say their bytes") {
  capi_test_format_text();
}
TEST_CASE("every wrong format is refused by name") {
  capi_test_format_refusals();
}

namespace {

/// The scenario of packed_calls.c in C++, its tables written by hand.
class packed_world {
 public:
  explicit packed_world(const char* format) {
    const kvcache::kv_format f = kvcache::parse_format(format).value;
    const kvcache::group_shape shape{.layers = PACKED_LAYERS,
                                     .kv_heads = PACKED_HEADS,
                                     .head_dim_k = PACKED_DIM,
                                     .head_dim_v = PACKED_DIM,
                                     .type = kvcache::element::f32};
    auto set = *kvcache::packed_groups(shape, PACKED_BLOCK, {&f, 1});
    set.group[0].total = kvcache::blocks{PACKED_BLOCKS};
    set.group[1].total = kvcache::blocks{4};
    cache_ = *kvcache::cache::create({.groups = set.span(), .max_sequences = 2});
    planes_ = *kvcache::host_planes::create({.shape = shape,
                                             .block_size = PACKED_BLOCK,
                                             .blocks = PACKED_BLOCKS,
                                             .formats = {&f, 1},
                                             .open_blocks = cache_.shape().group[0].open,
                                             .exempt_blocks = 4});
    at_ = *kvcache::attention::create(
        planes_.layer(0),
        {.q_heads = PACKED_Q_HEADS, .sequences = 2, .rows = PACKED_MOST, .slots = PACKED_MOST});
    for (auto& s : seq_) s = *cache_.open({}, kvcache::scope::shared());
  }
  std::vector<float> run() {
    for (int32_t step = 0; step < PACKED_STEPS; ++step) {
      if (step == PACKED_DROP_AT) {
        REQUIRE(seq_[0].retain({.form = kvcache::drop_form::whole_blocks,
                                .keep = seq_[0].held() - PACKED_BLOCK,
                                .sinks = PACKED_BLOCK}));
      }
      for (int32_t s = 0; s < 2; ++s) REQUIRE(seq_[s].extend(capi_packed_tokens(step, s)));
      describe(step);
      for (int32_t layer = 0; layer < PACKED_LAYERS; ++layer) compute(step, layer);
      cache_.end_step();
    }
    return out_;
  }

 private:
  void describe(int32_t step) {
    open_slot_.clear(), exempt_slot_.clear(), pos_.clear(), row_sealed_.clear();
    start_ = {0};
    std::fill(table_.begin(), table_.end(), -1);
    std::fill(open_.begin(), open_.end(), -1);
    for (int32_t s = 0; s < 2; ++s) {
      const auto& q = seq_[s];
      for (size_t k = 0; k < q.table().size(); ++k) {
        table_[static_cast<size_t>(s) * 5 + k] = kvcache::raw(q.table()[k]);
        open_[static_cast<size_t>(s) * 5 + k] = kvcache::raw(q.open_table()[k]);
      }
      len_[s] = q.held();
      sealed_[s] = q.sealed();
      exempt_[s] = kvcache::raw(q.table(1)[0]);
      for (int32_t t = q.held() - capi_packed_tokens(step, s); t < q.held(); ++t) {
        const int64_t id = kvcache::raw(q.open_table()[static_cast<size_t>(t / PACKED_BLOCK)]);
        open_slot_.push_back(id * PACKED_BLOCK + t % PACKED_BLOCK);
        exempt_slot_.push_back(t == 0 ? exempt_[s] : -1);
        pos_.push_back(t);
        row_sealed_.push_back(q.sealed_at(t + 1));
      }
      start_.push_back(static_cast<int32_t>(pos_.size()));
    }
  }
  kvc_rows rows(std::vector<float>& data, int32_t step, int32_t layer, int32_t heads, int32_t what) {
    data.clear();
    for (int32_t s = 0; s < 2; ++s) {
      const int32_t n = capi_packed_tokens(step, s);
      for (int32_t t = seq_[s].position() - n; t < seq_[s].position(); ++t) {
        for (int32_t h = 0; h < heads; ++h) {
          for (int32_t d = 0; d < PACKED_DIM; ++d) data.push_back(capi_packed_value(s, t, layer, h, d, what));
        }
      }
    }
    return kvcache::dense_rows(data.data(), kvcache::element::f32, heads, PACKED_DIM);
  }
  void compute(int32_t step, int32_t layer) {
    std::vector<float> k, v, q;
    const kvc_kv& kv = planes_.layer(layer);
    const auto keys = rows(k, step, layer, PACKED_HEADS, 0), values = rows(v, step, layer, PACKED_HEADS, 1);
    REQUIRE(kvcache::append(kv, keys, values, {}, {.open_slots = open_slot_, .exempt_slots = exempt_slot_}));
    REQUIRE(kvcache::run({&kv, 1}, cache_.seals()));
    kvc_batch b{};
    b.struct_size = sizeof b;
    b.n = 2;
    b.table_columns = 5;
    b.table = table_.data();
    b.open_table = open_.data();
    b.kv_len = len_;
    b.sealed = sealed_;
    b.row_sealed = row_sealed_.data();
    b.exempt_table = exempt_;
    b.q_start = start_.data();
    b.q_pos = pos_.data();
    const auto queries = rows(q, step, layer, PACKED_Q_HEADS, 2);
    const size_t before = out_.size();
    out_.resize(before + q.size());
    REQUIRE(
        at_.run(kv, b, queries, kvcache::causal_softmax(0.1767767f),
                kvcache::dense_out(out_.data() + before, kvcache::element::f32, PACKED_Q_HEADS, PACKED_DIM)));
  }

  kvcache::cache cache_;
  kvcache::host_planes planes_;
  kvcache::attention at_;
  kvcache::sequence seq_[2];
  std::vector<int32_t> table_ = std::vector<int32_t>(10), open_ = table_, pos_, row_sealed_, start_;
  std::vector<int64_t> open_slot_, exempt_slot_;
  int32_t len_[2] = {}, sealed_[2] = {}, exempt_[2] = {};
  std::vector<float> out_;
};

}  // namespace

TEST_CASE("a packed cache gives a C program the same bits as a C++ one") {
  std::vector<float> last;
  for (const char* format : {"int4:k=channel,v=token,residual=8,exempt=1", "int8:residual=8,exempt=1",
                             "fp8:residual=8,exempt=1"}) {
    INFO(format);
    std::vector<float> got(1 << 20);
    got.resize(static_cast<size_t>(capi_packed_run(format, got.data(), 1 << 20)));
    const std::vector<float> want = packed_world(format).run();
    REQUIRE(got.size() == want.size());
    REQUIRE(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0);
    CHECK(std::all_of(got.begin(), got.end(), [](float x) { return std::isfinite(x); }));
    REQUIRE(got != last);  // the format is what makes the difference
    last = got;
  }
}

TEST_CASE("planes described for C are those of host_planes") {
  for (const int32_t order : {KVC_K_TRANSPOSED, KVC_K_ROW_MAJOR}) {
    for (const int32_t alias : {0, 1}) {
      kvcache::host_planes_config c;
      c.shape = {
          .layers = 3, .kv_heads = 2, .head_dim_k = 24, .head_dim_v = 16, .type = kvcache::element::bf16};
      c.shape.v_aliases_k = alias != 0;
      c.blocks = 5;
      c.group = 2;
      c.order = order == KVC_K_ROW_MAJOR ? kvcache::k_order::row_major : kvcache::k_order::transposed;
      auto want = kvcache::host_planes::create(c);
      REQUIRE(want);
      kvc_planes p{};
      p.struct_size = sizeof p;
      p.layers = 3;
      p.kv_heads = 2;
      p.dim_k = 24;
      p.dim_v = 16;
      p.type = KVC_BF16;
      p.v_aliases_k = alias;
      p.block = 16;
      p.blocks = 5;
      p.group = 2;
      p.order = order;
      p.memory = {want->data(), static_cast<size_t>(want->size().count)};
      kvc_kv layers[3];
      int64_t bytes = 0;
      REQUIRE(kvc_cpu_planes(&p, layers, &bytes, nullptr) == KVC_OK);
      CHECK(bytes == want->size().count);
      CHECK(std::memcmp(layers, want->layers().data(), sizeof layers) == 0);
    }
  }
}

// A field that a C++ status names and the C API does not know would reach a C caller as "other".
TEST_CASE("every field that a C++ status can name is a field of the C API") {
  std::set<std::string> known;
  for (int32_t i = 0; i < KVC_FIELD_COUNT_; ++i) {
    CHECK(known.insert(kvc_field_text(i)).second);  // no two fields share a name
  }
  const std::filesystem::path include =
      std::filesystem::path(KVCACHE_TEST_DATA_DIR) / "../../include/kvcache";
  const std::regex named(R"re(errc::(\w+),\s*"([^"]*)")re");
  int found = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(include)) {
    if (entry.path().extension() != ".hpp") continue;
    const std::string folder = entry.path().parent_path().filename().string();
    if (folder == "interop" || folder == "retain") continue;  // C++ only
    if (folder == "cuda") continue;                           // what C calls answered, as C++
    std::ifstream file(entry.path());
    std::stringstream text;
    text << file.rdbuf();
    const std::string all = text.str();
    for (std::sregex_iterator m(all.begin(), all.end(), named), end; m != end; ++m, ++found) {
      INFO(entry.path() << " names '" << (*m)[2] << "'");
      CHECK(known.count((*m)[2].str()) == 1);
    }
  }
  CHECK(found > 60);
}
