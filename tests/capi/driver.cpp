// SPDX-License-Identifier: Apache-2.0
// The tests written in C, as Catch2 cases; and that no error of the C++ side lacks a C form.
#include <catch2/catch.hpp>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "check.h"
#include "kvcache/attend/host_planes.hpp"

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
    if (folder == "interop" || folder == "retain" || folder == "quant") continue;  // C++ only
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
