// SPDX-License-Identifier: Apache-2.0
// The control whose right keep-set is known: what it answers is what arithmetic on positions says, and a
// model that is off by one says something else.
#include <catch2/catch.hpp>
#include <set>

#include "constructed.hpp"
#include "recall.hpp"
#include "reference_cache.hpp"
#include "runner.hpp"
#include "support/environment.hpp"

using namespace lab;

namespace {

std::vector<recall_row> rows_of(const recall_options& o) {
  const auto rows = run_recall(o);
  REQUIRE(rows);
  return *rows;
}

const recall_row& find(const std::vector<recall_row>& rows, const std::string& control) {
  const auto at = std::find_if(rows.begin(), rows.end(), [&](const auto& r) { return r.control == control; });
  REQUIRE(at != rows.end());
  return *at;
}

recall_options every_pair_of(int length) {
  recall_options o;
  o.length = length;
  o.asked = length;
  return o;
}

}  // namespace

TEST_CASE("the constructed model answers every key of a full cache, and nothing it was not told") {
  const recall_vocabulary words{300, 5};
  engine::thread_pool pool(1);
  const auto model = constructed_recall(words, pool);
  REQUIRE(model);
  engine::cache_config config;
  config.shape = (*model)->shape().kv;
  config.max_tokens = 600;
  config.pool = &pool;
  auto cache = engine::make_cache("reference", config);
  REQUIRE(cache);
  const auto answers = [&](int pairs) {
    std::vector<token_id> text;
    for (int key = 0; key < pairs; ++key) text.push_back(words.pair(key));
    for (int key = 0; key < words.keys; ++key) text.push_back(words.question(key));
    const auto opened = (*cache)->open(text, engine::cache_scope::everyone());
    REQUIRE(opened);
    std::vector<token_id> out;
    const auto seen = [&](int position, std::span<const float> logits) {
      if (position >= pairs) out.push_back(engine::greedy(logits));
    };
    REQUIRE(engine::feed(**model, **cache, opened->slot, text, 64, engine::observe::all, seen));
    (*cache)->close(opened->slot);
    return out;
  };
  for (const int pairs : {300, 299, 1, 0}) {
    const auto said = answers(pairs);
    std::set<token_id> different;
    for (int key = 0; key < words.keys; ++key) {
      INFO("key " << key << " of " << pairs << " told");
      const token_id expected = key < pairs ? words.answer(words.value_of(key)) : words.unknown();
      CHECK(said[static_cast<std::size_t>(key)] == expected);
      different.insert(expected);
    }
    if (pairs == 300) CHECK(different.size() > 50);  // an answer by chance would be noticed
  }
  CHECK(recall_vocabulary{300, 6}.value_of(0) != words.value_of(0));
}

TEST_CASE("a window answers exactly the keys inside it, to the token") {
  for (const int window : {1, 17, 64, 199, 200}) {
    recall_options o = every_pair_of(200);
    o.policies = {"window:" + std::to_string(window)};
    const recall_row row = rows_of(o)[1];
    INFO(window);
    CHECK(row.right == window);
    CHECK(row.unknown == 200 - window);
    CHECK(row.differs == 0);
    CHECK(row.ruled);
    CHECK(row.breaks_rule == 0);
    CHECK(row.tokens_held == window);
  }
}

TEST_CASE("sinks and window answer exactly theirs, in text and in cache positions") {
  recall_options o = every_pair_of(256);
  o.policies = {"streaming_llm:sinks=4,window=60,positions=text", "streaming_llm:sinks=4,window=60"};
  const auto rows = rows_of(o);
  CHECK(rows[1].right == 64);
  const auto in_cache =
      std::find_if(rows.begin() + 2, rows.end(), [](const auto& r) { return r.control.empty(); });
  REQUIRE(in_cache != rows.end());
  CHECK(in_cache->right == 16 + 64);  // a block of sinks, and a window of whole blocks
  CHECK(in_cache->unknown == 256 - 80);
  CHECK(recall_document(o, rows));
}

TEST_CASE("controls: full and oracle answer all, random its share") {
  recall_options o;
  o.length = 1024;
  o.asked = 128;
  o.policies = {"h2o:heavy=128,recent=128"};
  const auto rows = rows_of(o);
  CHECK(find(rows, "full").right == 128);
  CHECK(find(rows, "oracle").right == 128);
  CHECK(find(rows, "oracle").bytes_held == rows[1].bytes_held);
  CHECK(find(rows, "window").right == 32);
  int draws = 0;
  int right = 0;
  for (const recall_row& row : rows) {
    if (row.control != "random") continue;
    ++draws;
    right += row.right;
    CHECK(row.tokens_held == 256);
  }
  CHECK(draws == 3);
  // 384 draws of 1 in 4: mean 96, standard deviation 8.5.
  CHECK(right > 96 - 45);
  CHECK(right < 96 + 45);
}

TEST_CASE("every policy, format and moment: an answer is right exactly if its pair is held") {
  const std::string kinds[] = {"window:64",
                               "streaming_llm:sinks=4,window=60",
                               "h2o:heavy=32,recent=32",
                               "snapkv:capacity=64,window=32,kernel=5",
                               "tova:capacity=64",
                               "scissorhands:capacity=64",
                               "far_rms:capacity=64",
                               "moved_queries:capacity=64"};
  recall_options o;
  o.length = 256;
  o.asked = 32;
  o.random_seeds = 1;
  for (const std::string& policy : kinds) o.policies.push_back(policy);
  for (const char* scope : {"head", "layer", "global"})
    o.policies.push_back("moved_queries:capacity=64,budget=" + std::string(scope));
  for (const char* type : {"f32", "f16", "bf16"}) {
    for (const mode how : {mode::oneshot, mode::stream}) {
      for (const bool inside : {false, true}) {
        o.common.type = type;
        o.how = how;
        o.question_inside = inside;
        o.common.block_size = inside ? 8 : 16;
        const auto rows = rows_of(o);
        INFO(type << " " << name_of(how) << " inside " << inside);
        for (const recall_row& row : rows) {
          INFO(row.policy << " " << row.control);
          CHECK(row.differs == 0);
          CHECK(row.right == row.held);
          CHECK(row.right + row.unknown == o.asked);
        }
        CHECK(recall_document(o, rows));
      }
    }
  }
}

// The pairs asked for are the only ones a query looked at; 32 questions are the observation window.
TEST_CASE("a policy that sees the questions keeps their pairs, the same without them keeps its share") {
  recall_options o;
  o.length = 1024;
  o.asked = 32;
  o.policies = {"snapkv:capacity=128,window=32,kernel=1", "moved_queries:capacity=128"};
  o.question_inside = true;
  for (const recall_row& row : rows_of(o)) {
    if (row.control.empty()) CHECK(row.right == 32);
  }
  o.question_inside = false;
  for (const recall_row& row : rows_of(o)) {
    if (row.control.empty()) CHECK(row.right == 4);
  }
}

TEST_CASE("a document refuses outcomes that are not as known") {
  recall_options o = every_pair_of(64);
  o.policies = {"window:16"};
  auto rows = rows_of(o);
  REQUIRE(recall_document(o, rows));
  const auto refused = [&](auto change) {
    auto wrong = rows;
    change(wrong[1]);
    const auto made = recall_document(o, wrong);
    REQUIRE_FALSE(made);
    CHECK(made.error().code == "differs");
    CHECK(made.error().field == "window:16");
  };
  refused([](recall_row& r) { r.differs = 1; });
  refused([](recall_row& r) { r.breaks_rule = 1; });
}
