// SPDX-License-Identifier: Apache-2.0
// Requests from KV events: prefixes put together again, what is merged, what cannot be seen.
#include <nlohmann/json.hpp>

#include "cli/trace/support.hpp"

using namespace kvcache;
using namespace kvcache::test;
using nlohmann::json;

namespace {

std::string stored(const std::string& hashes, const std::string& parent, const std::string& more = "") {
  return "[\"BlockStored\",[" + hashes + "]," + parent + ",null,4" + more + "]";
}
std::string batch(const std::string& time, const std::string& events) {
  return "[" + time + ",[" + events + "]]\n";
}

}  // namespace

TEST_CASE("a stored block brings back the whole prefix before it") {
  const trace t = read_text(batch("1.5", stored("10,11", "null")) + batch("60", stored("12", "11")) +
                            batch("90", stored("13,14", "10")) + batch("100.25", stored("15", "12")));
  CHECK(t.format == "kv_events");
  CHECK(t.block_tokens == 4);
  REQUIRE(t.requests.size() == 4);
  CHECK(ids_of(t, 0) == std::vector<int>{0, 1});
  CHECK(ids_of(t, 1) == std::vector<int>{0, 1, 2});
  CHECK(ids_of(t, 2) == std::vector<int>{0, 3, 4});
  CHECK(ids_of(t, 3) == std::vector<int>{0, 1, 2, 5});
  CHECK(t.requests[3].time_us == 98'750'000);
  CHECK(t.requests[2].input_tokens == 12);
  CHECK(notes_say(t, "cached whole are missing"));
  CHECK(notes_say(t, "while generating"));
}

TEST_CASE("stores that go on where one ended shortly before are one request, also between those of another") {
  const std::string text = batch("1", stored("1,2", "null") + "," + stored("21", "null")) +
                           batch("1.4", stored("3", "2")) +
                           batch("1.8", stored("22", "21") + "," + stored("4", "3"));
  const trace t = read_text(text);
  REQUIRE(t.requests.size() == 2);
  CHECK(ids_of(t, 0) == std::vector<int>{0, 1, 2, 3});
  CHECK(ids_of(t, 1) == std::vector<int>{4, 5});
  read_options strict;
  strict.store_gap_us = 300'000;
  CHECK(read_text(text, strict).requests.size() == 5);
  // A second text that goes on from the same block is a request of its own.
  CHECK(read_text(batch("1", stored("1", "null")) + batch("1.1", stored("2", "1")) +
                  batch("1.2", stored("3", "1")))
            .requests.size() == 2);
}

TEST_CASE("batches may be arrays, objects or single events, short or long, with hashes of any kind") {
  const std::string text =
      R"([0.5, [["BlockStored", ["a","b"], null, [1,2,3,4,5,6,7,8], 4, null, "GPU", null, [], 0, "full", null, "more"]], null, "more"])"
      "\n"
      R"({"events":[{"block_hashes":[-5],"parent_block_hash":"b","type":"BlockStored","token_ids":[1,2,3,4],"block_size":4,"medium":null},)"
      R"({"type":"BlockRemoved","block_hashes":["a"],"medium":"GPU"},{"type":"AllBlocksCleared"}],"ts":9,"data_parallel_rank":0})"
      "\n"
      R"({"ts":19,"type":"BlockStored","block_hashes":[18446744073709551615],"parent_block_hash":-5,"block_size":4,"group_idx":0})"
      "\n"
      R"([20, [["AllBlocksCleared"], ["BlockRemoved", ["a"]], ["Unknown", {"x": [1]}]]])";
  const trace t = read_text(text);
  REQUIRE(t.requests.size() == 3);
  CHECK(ids_of(t, 2) == std::vector<int>{0, 1, 2, 3});
}

TEST_CASE("lower tiers and further groups of layers are passed over and counted") {
  const trace t =
      read_text(batch("1", stored("1", "null", ",null,\"GPU\"") + "," + stored("1", "null", ",null,\"CPU\"") +
                               "," + stored("7", "null", ",null,\"GPU\",null,null,1")));
  CHECK(t.requests.size() == 1);
  CHECK(t.distinct == 1);
  CHECK(notes_say(t, "1 BlockStored events of lower tiers"));
  CHECK(notes_say(t, "1 BlockStored events of further groups"));
}

TEST_CASE("ranks have clocks of their own") {
  const std::string a = R"({"ts":5,"data_parallel_rank":0,"events":[["BlockStored",[1],null,null,4]]})"
                        "\n";
  const std::string b = R"({"ts":4,"data_parallel_rank":1,"events":[["BlockStored",[1],null,null,4]]})"
                        "\n";
  const trace t = read_text(a + b);
  REQUIRE(t.requests.size() == 2);
  CHECK(t.requests[1].time_us == 1'000'000);
  check_refused(a + R"({"ts":4,"data_parallel_rank":0,"events":[]})", "out_of_order", "ts",
                "4000000 us, after 5000000 us", 2);
}

TEST_CASE("lost batches and unknown parents are counted, and too many of them refuse the log") {
  const std::string known = batch("1", stored("1", "null")) + batch("5", stored("2", "1"));
  const trace t = read_text(known + batch("9", stored("9", "8")));
  CHECK(t.requests.size() == 2);
  CHECK(t.distinct == 2);
  CHECK(notes_say(t, "1 BlockStored events were left out"));
  check_refused(
      batch("1", stored("1", "null")) + batch("2", stored("9", "8")) + batch("3", stored("10", "9")),
      "too_little", "parent_block_hash", "unknown in 2 of 3 BlockStored events", 4);
  const trace gap = read_text(R"({"ts":1,"seq":3,"events":[["BlockStored",[1],null,null,4]]})"
                              "\n"
                              R"({"ts":1,"seq":6,"events":[]})");
  CHECK(notes_say(gap, "2 batches are missing"));
}

TEST_CASE("logs that carry too little are refused with a reason") {
  check_refused(batch("1", "[\"AllBlocksCleared\"]"), "too_little", "BlockStored", "0 of 1 events", 2);
  check_refused(batch("1", "[\"BlockStored\",[1],null,[1,2]]"), "missing_field", "block_size", "", 1);
  check_refused(batch("1", "[\"BlockStored\"]"), "missing_field", "block_hashes", "", 1);
  check_refused(batch("1", "[]"), "missing_field", "type", "", 1);
  check_refused(batch("1", "{}"), "missing_field", "type", "", 1);
  check_refused("[1]\n", "missing_field", "events", "", 1);
  check_refused(R"({"events":[]})", "missing_field", "ts", "", 1);
  check_refused(R"({"ts":1,"block_hashes":[]})", "missing_field", "type", "", 1);
  check_refused(batch("NaN", stored("1", "null")), "bad_value", "ts", "NaN", 1);
  check_refused(batch("-1", stored("1", "null")), "out_of_range", "ts", "-1", 1);
  check_refused(batch("1", stored("1.5", "null")), "bad_value", "block_hashes[0]", "1.5", 1);
  check_refused(batch("1", "[\"BlockStored\",[1],null,null,0]"), "out_of_range", "block_size", "0", 1);
  check_refused(batch("1", "[\"BlockStored\",[1],null,null,-4]"), "out_of_range", "block_size", "-4", 1);
  check_refused(batch("1", "[\"BlockStored\",[1],null,[1,2,3],4]"), "bad_value", "token_ids",
                "3 tokens for 4", 1);
  check_refused(batch("1", stored("1", "null")) + batch("2", "[\"BlockStored\",[2],1,null,8]"), "bad_value",
                "block size", "8, 4 before", 2);
  check_refused(batch("1", stored("1,2", "null")) + batch("2", stored("2", "null")), "bad_value",
                "block_hashes", "a block that followed another one before", 2);
  check_refused(batch("1", stored("1,1", "null")), "bad_value", "block_hashes",
                "a block that followed another one before", 1);
  check_refused(batch("1", stored("1", "1")), "too_little", "parent_block_hash",
                "unknown in 1 of 1 BlockStored events", 2);
  read_options given;
  given.block_tokens = 2;
  CHECK(read_text(batch("1", "[\"BlockStored\",[1],null]"), given).requests[0].input_tokens == 2);
}

TEST_CASE("msgpack payloads say the same as JSON lines") {
  const std::vector<json> payloads = {
      json::array({0.5, {{"BlockStored", {"a", "b"}, nullptr, {1, 2, 3, 4, 5, 6, 7, 8}, 4, nullptr, "GPU"}}}),
      json::array({9.25,
                   {{{"type", "BlockStored"},
                     {"block_hashes", {-5}},
                     {"parent_block_hash", "b"},
                     {"block_size", 4},
                     {"quote\"\n", true}}},
                   0}),
      json::array({20, {{"BlockStored", {18446744073709551615u}, -5, nullptr, 4}, {"AllBlocksCleared"}}})};
  std::string lines, bytes;
  for (const json& p : payloads) {
    lines += p.dump() + "\n";
    const std::vector<std::uint8_t> one = json::to_msgpack(p);
    bytes.append(one.begin(), one.end());
  }
  for (const std::string& file : {bytes, packed(bytes)}) {
    const trace a = read_text(lines), b = read_text(file);
    CHECK(b.format == "kv_events");
    REQUIRE(a.requests.size() == 3);
    REQUIRE(b.requests.size() == 3);
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(a.requests[i].time_us == b.requests[i].time_us);
      CHECK(ids_of(a, i) == ids_of(b, i));
    }
  }
  for (std::size_t n = 1; n < bytes.size(); ++n) {
    const std::string cut = bytes.substr(0, n);
    if (n == json::to_msgpack(payloads[0]).size() ||
        n == json::to_msgpack(payloads[0]).size() + json::to_msgpack(payloads[1]).size())
      continue;
    CHECK(refusal([&] { read_text(cut); }).code == "truncated");
  }
}

TEST_CASE("byte strings are hashes, and msgpack that is wrong is refused with the number of the payload") {
  const auto event = [](const json& hashes, const json& parent) {
    const std::vector<std::uint8_t> v = json::to_msgpack(
        json::array({1.0, json::array({json::array({"BlockStored", hashes, parent, nullptr, 4})})}));
    return std::string(v.begin(), v.end());
  };
  const json x = json::binary({0x01, 0xff}), y = json::binary({0x02, 0x00});
  const trace t = read_text(event(json::array({x, y}), nullptr) + event(json::array({x}), nullptr));
  CHECK(ids_of(t, 0) == std::vector<int>{0, 1});
  CHECK(ids_of(t, 1) == std::vector<int>{0});
  const std::string good = event(json::array({x}), nullptr);
  check_refused(good + "\xc1", "damaged", "msgpack payload", "", 2);
  check_refused(good + std::string(1'000'000, '\x92'), "too_deep", "msgpack payload", "", 2);
  check_refused(good + std::string("\xdd\xff\xff\xff\xff", 5), "truncated", "msgpack payload", "", 2);
  const std::string half = packed(good + good);
  check_refused(half.substr(0, half.size() - 5), "truncated", "zstd data", "", 1);
  check_refused(good + std::string("\x92\xdb\xff\xff\xff\xff", 6) + std::string(20'000'000, 'a'), "too_long",
                "msgpack payload", "", 2);
  check_refused(good + std::string("\x92\xcb\x7f\xf8\0\0\0\0\0\0\x90", 11), "bad_value", "ts", "NaN", 2);
}
