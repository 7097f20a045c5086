// SPDX-License-Identifier: Apache-2.0
// What each format says, on files of a few lines, with the traps that real files hold.
#include "cli/trace/support.hpp"

using namespace kvcache;
using namespace kvcache::test;

TEST_CASE("a Mooncake line gives time, lengths and blocks") {
  const trace t =
      read_text(R"({"timestamp": 3000, "input_length": 1025, "output_length": 7, "hash_ids": [46, 47, 9]})"
                "\n"
                R"({"timestamp": 3000.5, "input_length": 512, "output_length": 0, "hash_ids": [46]})"
                "\n");
  CHECK(t.format == "mooncake");
  CHECK(t.block_tokens == 512);
  CHECK(t.distinct == 3);
  REQUIRE(t.requests.size() == 2);
  CHECK(t.requests[0].time_us == 0);
  CHECK(t.requests[1].time_us == 500);
  CHECK(t.requests[0].input_tokens == 1025);
  CHECK(t.requests[0].output_tokens == 7);
  CHECK(t.requests[0].session == -1);
  CHECK(ids_of(t, 0) == std::vector<int>{0, 1, 2});
  CHECK(ids_of(t, 1) == std::vector<int>{0});
}

TEST_CASE("members may stand in any order, and unknown ones of any kind are passed over") {
  const trace t = read_text(
      R"({"prompt":"caf\u00e9 \ud83d\ude00 \" \\ é","x":{"hash_ids":[[1],{"a":null}],"b":[true,false,-1.5e-3]},)"
      R"("hash_ids":[5],"output_length":1,"y":[],"z":{},"session_id":"s","input_length":512,"timestamp":1})");
  REQUIRE(t.requests.size() == 1);
  CHECK(t.requests[0].input_tokens == 512);
  CHECK(t.requests[0].session == 0);
  CHECK(ids_of(t, 0) == std::vector<int>{0});
}

TEST_CASE("many requests may share one time and keep their order") {
  std::string text;
  for (int i = 0; i < 50; ++i) {
    text += "{\"timestamp\":6000,\"input_length\":" + std::to_string(i) + ",\"hash_ids\":[" +
            std::to_string(i) + "]}\n";
  }
  const trace t = read_text(text);
  REQUIRE(t.requests.size() == 50);
  for (int i = 0; i < 50; ++i) {
    CHECK(t.requests[static_cast<std::size_t>(i)].input_tokens == i);
    CHECK(ids_of(t, static_cast<std::size_t>(i)) == std::vector<int>{i});
  }
}

TEST_CASE("ids of any size and kind are different blocks") {
  const trace t = read_text(
      R"({"timestamp":0,"hash_ids":[0,-1,18446744073709551615,9223372036854775807,9223372036854775808,)"
      R"(-9223372036854775808,-9223372036854775809,340282366920938463463374607431768211455,"0","-1","a","",)"
      R"(65536,4294967296,-0]})"
      "\n"
      R"({"timestamp":0,"hash_ids":["a",340282366920938463463374607431768211455,18446744073709551615,0,"\u0061"]})");
  CHECK(t.distinct == 14);
  CHECK(ids_of(t, 0) == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0});
  CHECK(ids_of(t, 1) == std::vector<int>{10, 7, 2, 0, 10});
  CHECK(t.repeated_ids == 2);
}

TEST_CASE("an id repeated inside one request stays and is counted") {
  const trace t = read_text(R"({"timestamp":0,"hash_ids":[4,5,4,4]})"
                            "\n"
                            R"({"timestamp":0,"hash_ids":[4]})");
  CHECK(ids_of(t, 0) == std::vector<int>{0, 1, 0, 0});
  CHECK(t.repeated_ids == 2);
}

TEST_CASE("prompts shorter than a block have an empty list") {
  const trace t =
      read_text(R"({"timestamp":0,"session_id":7,"input_length":8,"output_length":30,"hash_ids":[]})"
                "\n\n"
                R"({"timestamp":1,"session_id":7,"input_length":130,"output_length":30,"hash_ids":[ 1 , 2 ]})"
                "\r\n");
  CHECK(t.block_tokens == 64);
  CHECK(t.requests[0].count == 0);
  CHECK(t.requests[1].count == 2);
  CHECK(t.requests[1].session == 0);
}

TEST_CASE("a missing length is what the blocks hold, and the notes say so") {
  const trace t = read_text(R"({"timestamp":0,"hash_ids":[1,2]})"
                            "\n"
                            R"({"timestamp":0,"input_length":null,"hash_ids":[]})");
  CHECK(t.block_tokens == 512);
  CHECK(t.requests[0].input_tokens == 1024);
  CHECK(t.requests[1].input_tokens == 0);
  CHECK(notes_say(t, "512 are taken"));
  CHECK(notes_say(t, "Requests do not say how long they are"));
  const trace mixed = read_text(R"({"timestamp":0,"hash_ids":[1]})"
                                "\n"
                                R"({"timestamp":0,"input_length":600,"hash_ids":[1,2]})");
  CHECK(notes_say(mixed, "1 of 2 requests do not say how long they are"));
}

TEST_CASE("a request without blocks is kept with its length") {
  const trace t = read_text(R"({"timestamp":0,"input_length":99})"
                            "\n"
                            R"({"timestamp":0,"input_length":600,"hash_ids":[1,2]})");
  CHECK(t.requests[0].count == 0);
  CHECK(t.requests[0].input_tokens == 99);
  CHECK(t.block_tokens == 512);
  CHECK(notes_say(t, "1 of 2 requests do not say which blocks they have"));
  const trace none = read_text(R"({"timestamp":0,"input_length":99})");
  CHECK(none.block_tokens == 0);
  CHECK(notes_say(none, "lengths and times only"));
}

TEST_CASE("the block size follows from lengths and counts, rounded up or down") {
  const auto size_of = [](std::initializer_list<std::pair<int, int>> rows) {
    std::string text;
    for (const auto& [length, count] : rows) {
      text += "{\"timestamp\":0,\"input_length\":" + std::to_string(length) + ",\"hash_ids\":[";
      for (int i = 0; i < count; ++i) text.append(i != 0 ? "," : "").append(std::to_string(i));
      text += "]}\n";
    }
    return read_text(text).block_tokens;
  };
  CHECK(size_of({{512, 1}, {513, 2}}) == 512);                    // up
  CHECK(size_of({{16, 1}, {17, 2}}) == 16);                       // up, certain
  CHECK(size_of({{100, 1}, {150, 2}}) == 128);                    // up, a power of two
  CHECK(size_of({{63, 0}, {127, 1}, {128, 2}}) == 64);            // down
  CHECK(size_of({{64, 0}, {127, 1}, {128, 1}, {129, 2}}) == 64);  // down, lengths rounded up themselves
  CHECK(size_of({{48, 0}, {48, 1}, {96, 2}, {95, 1}}) == 48);     // no power of two
  CHECK(size_of({{5, 3}, {4000, 1}}) == 512);                     // nothing agrees
  const std::string one = R"({"timestamp":0,"input_length":100,"hash_ids":[1]})";
  CHECK(read_text(one).block_tokens == 512);
  CHECK(notes_say(read_text(one), "Lengths fit blocks of 100 to"));
  read_options asked;
  asked.block_tokens = 128;
  CHECK(read_text(one, asked).block_tokens == 128);
  CHECK(read_text(one, asked).notes.empty());
}

TEST_CASE("Bailian counts time in seconds and chains requests into chats") {
  const trace t = read_text(
      R"({"chat_id":1,"parent_chat_id":-1,"timestamp":1.5,"input_length":32,"output_length":3,"turn":1,"hash_ids":[1,2]})"
      "\n"
      R"({"chat_id":8,"parent_chat_id":-1,"timestamp":1.75,"input_length":33,"output_length":3,"turn":1,"hash_ids":[1,2,3]})"
      "\n"
      R"({"chat_id":9,"parent_chat_id":1,"timestamp":2.5,"input_length":40,"output_length":3,"turn":2,"hash_ids":[1,2,4]})");
  CHECK(t.format == "bailian");
  CHECK(t.block_tokens == 16);
  CHECK(t.requests[1].time_us == 250'000);
  CHECK(t.requests[2].time_us == 1'000'000);
  CHECK(t.requests[0].session == 0);
  CHECK(t.requests[1].session == 1);
  CHECK(t.requests[2].session == 0);
}

TEST_CASE("a weka session nests sub-agents whose time counts from their own start") {
  const trace t = read_text(R"({
    "id": "trace", "block_size": 64, "hash_id_scope": "local",
    "requests": [
      {"t": 0.5, "type": "n", "in": 128, "out": 4, "hash_ids": [1, 2]},
      {"requests": [{"t": 0, "type": "n", "in": 64, "out": 1, "hash_ids": [3]},
                    {"t": 2.5, "type": "s", "in": 64, "out": 1, "hash_ids": [3]},
                    {"t": 3, "type": "subagent", "requests": [{"t": 1, "in": 70, "hash_ids": [5]}]}],
       "type": "subagent", "t": 10},
      {"t": 11, "type": "n", "in": 130, "out": 4, "hash_ids": [1, 2], "ttft": 0.25},
      {"t": 12, "type": "subagent", "requests": []}
    ]})");
  CHECK(t.format == "weka");
  CHECK(t.block_tokens == 64);
  REQUIRE(t.requests.size() == 5);
  const std::vector<std::int64_t> times{0, 9'500'000, 10'500'000, 12'000'000, 13'500'000};
  const std::vector<std::vector<int>> blocks{{0, 1}, {2}, {0, 1}, {2}, {3}};
  for (std::size_t i = 0; i < 5; ++i) {
    CHECK(t.requests[i].time_us == times[i]);
    CHECK(t.requests[i].session == 0);
    CHECK(ids_of(t, i) == blocks[i]);
  }
}

TEST_CASE("ids of two weka sessions are apart unless the file or the reader says they are not") {
  const auto session = [](const std::string& scope) {
    return "{\"block_size\":64," + scope +
           "\"requests\":[{\"t\":0,\"in\":64,\"hash_ids\":[1]},{\"t\":1,\"in\":64,\"hash_ids\":[1]}]}\n";
  };
  const trace apart = read_text(session("") + session("\"hash_id_scope\":\"local\","));
  CHECK(apart.distinct == 2);
  CHECK(apart.requests[1].session == 1);
  CHECK(ids_of(apart, 1) == std::vector<int>{1});
  CHECK(ids_of(apart, 2) == std::vector<int>{0});
  CHECK(notes_say(apart, "2 of them start together"));
  CHECK(read_text(session("\"hash_id_scope\":\"global\",") + session("\"hash_id_scope\":\"global\","))
            .distinct == 1);
  read_options options;
  options.ids = cli::id_scope::shared;
  options.session_gap_us = 500'000;
  const trace shared = read_text(session("") + session(""), options);
  CHECK(shared.distinct == 1);
  CHECK(shared.requests[1].time_us == 500'000);
  CHECK(notes_say(shared, "500000 us apart"));
}

TEST_CASE("the Azure CSV gives lengths and times only") {
  const trace t = read_text(
      "\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2023-12-31 23:59:59.9999999,4808,10\r\n"
      "2024-01-01 00:00:00,3180,8\r\n"
      "2024-02-29T00:00:00.5+00:00,1,0\r\n"
      "2024-03-01T01:00:00+01:00,1,0\n");
  CHECK(t.format == "azure");
  CHECK(t.block_tokens == 0);
  CHECK(t.units.empty());
  CHECK(notes_say(t, "lengths and times only"));
  REQUIRE(t.requests.size() == 4);
  CHECK(t.requests[0].input_tokens == 4808);
  CHECK(t.requests[0].output_tokens == 10);
  CHECK(t.requests[1].time_us == 1);
  CHECK(t.requests[2].time_us == (std::int64_t{59} * 86400 * 1'000'000) + 500'001);
  CHECK(t.requests[3].time_us == (std::int64_t{60} * 86400 * 1'000'000) + 1);
}

TEST_CASE("lookups of the Tair log are requests, its writes are not") {
  const trace t = read_text(
      R"({"type":"StartWriteCache","trigger_time_us":5,"keys":[-9,8],"tokens":[]})"
      "\n"
      R"({"keys":[-7,-9],"type":"GetCacheLocation","trigger_time_us":10,"query_type":"prefix_match","tokens":[]})"
      "\n"
      R"({"type":"FinishWriteCache","trigger_time_us":9,"success_block":1})"
      "\n"
      R"({"type":"GetCacheLocation","trigger_time_us":11,"query_type":"batch_get","keys":[1]})"
      "\n"
      R"({"type":"GetCacheLocation","trigger_time_us":12,"query_type":"prefix_match","keys":[-7,8]})");
  CHECK(t.format == "tair");
  CHECK(t.block_tokens == 16);
  REQUIRE(t.requests.size() == 2);
  CHECK(t.distinct == 3);
  CHECK(t.units.size() == 4);
  CHECK(ids_of(t, 0) == std::vector<int>{0, 1});
  CHECK(ids_of(t, 1) == std::vector<int>{0, 2});
  CHECK(t.requests[1].time_us == 2);
  CHECK(t.requests[0].input_tokens == 32);
  CHECK(notes_say(t, "2 other events"));
  CHECK(notes_say(t, "1 lookups that do not ask for a prefix"));
}

TEST_CASE("token lines become full blocks by content, and a last block that is not full is none") {
  const std::string text = R"({"tokens":[1,2,3,4,5,6,7,8,9],"session":"a","timestamp":1})"
                           "\n"
                           R"({"tokens":[1,2,3,4,5,6,7,9],"session":"b","timestamp":2})"
                           "\n"
                           R"({"timestamp":3,"tokens":[5,6,7,8],"session":"a"})"
                           "\n"
                           R"({"timestamp":3,"token_ids":[4294967295,0,123456789,7,7,7]})"
                           "\n"
                           R"({"timestamp":3,"tokens":[]})";
  read_options options;
  options.block_tokens = 4;
  const trace t = read_text(text, options);
  CHECK(t.format == "tokens");
  CHECK(t.block_tokens == 4);
  CHECK(t.requests[0].input_tokens == 9);
  CHECK(ids_of(t, 0) == std::vector<int>{0, 1});
  CHECK(ids_of(t, 1) == std::vector<int>{0, 2});
  CHECK(ids_of(t, 2) == std::vector<int>{1});
  CHECK(ids_of(t, 3) == std::vector<int>{3});
  CHECK(t.requests[4].count == 0);
  CHECK(t.requests[2].session == 0);
  CHECK(t.requests[2].time_us == 2000);
  const trace usual = read_text(text);
  CHECK(usual.block_tokens == 16);
  CHECK(usual.units.empty());
  CHECK(notes_say(read_text(R"({"tokens":[1]})"), "no times"));
}

TEST_CASE("packed files are told by content, whatever pieces they were packed in") {
  const std::string line = R"({"timestamp":0,"input_length":512,"hash_ids":[1]})"
                           "\n";
  const std::string two = packed(line) + packed("") + packed(line);
  CHECK(read_text(two).requests.size() == 2);
  const std::string skippable(
      "\x50\x2a\x4d\x18\x03\x00\x00\x00"
      "abc",
      11);
  CHECK(read_text(skippable + packed(line)).requests.size() == 1);
  packer piecewise;
  for (int i = 0; i < 1000; ++i) piecewise.add(line);
  CHECK(read_text(piecewise.finish()).requests.size() == 1000);
}
