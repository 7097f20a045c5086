// SPDX-License-Identifier: Apache-2.0
// Files that are damaged or lie: refused with file, line, field and value, never read half.
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "cli/trace/support.hpp"

using namespace kvcache;
using namespace kvcache::test;

namespace {

const std::string good = R"({"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]})"
                         "\n";

/// A good line, then one with these members: what is wrong there is on line 2.
void check_line(const std::string& members, const std::string& code, const std::string& field,
                const std::string& value) {
  check_refused(good + "{" + members + "}\n" + good, code, field, value, 2);
}

/// Peak of this process's memory, KiB; 0 where the system does not say.
long peak_kib() {
  std::FILE* file = std::fopen("/proc/self/status", "r");
  if (file == nullptr) return 0;
  char line[256];
  long peak = 0;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::strncmp(line, "VmHWM:", 6) == 0) peak = std::strtol(line + 6, nullptr, 10);
  }
  std::fclose(file);
  return peak;
}

}  // namespace

TEST_CASE("wrong numbers are refused with field and value") {
  check_line(R"("timestamp":NaN,"hash_ids":[1])", "bad_value", "timestamp", "NaN");
  check_line(R"("timestamp":Infinity,"hash_ids":[1])", "bad_value", "timestamp", "Infinity");
  check_line(R"("timestamp":-1,"hash_ids":[1])", "out_of_range", "timestamp", "-1");
  check_line(R"("timestamp":-0.5,"hash_ids":[1])", "out_of_range", "timestamp", "-0.5");
  check_line(R"("timestamp":1e300,"hash_ids":[1])", "out_of_range", "timestamp", "1e300");
  check_line(R"("timestamp":1e999,"hash_ids":[1])", "out_of_range", "timestamp", "1e999");
  check_line(R"("timestamp":99999999999999999999,"hash_ids":[1])", "out_of_range", "timestamp",
             "99999999999999999999");
  check_line(R"("timestamp":"0","hash_ids":[1])", "bad_type", "timestamp", "\"0\"");
  check_line(R"("timestamp":null,"hash_ids":[1])", "bad_type", "timestamp", "null");
  check_line(R"("timestamp":0,"input_length":-1,"hash_ids":[1])", "out_of_range", "input_length", "-1");
  check_line(R"("timestamp":0,"input_length":1.5,"hash_ids":[1])", "bad_value", "input_length", "1.5");
  check_line(R"("timestamp":0,"input_length":1e30,"hash_ids":[1])", "out_of_range", "input_length", "1e30");
  check_line(R"("timestamp":0,"input_length":1099511627777,"hash_ids":[1])", "out_of_range", "input_length",
             "1099511627777");
  check_line(R"("timestamp":0,"input_length":[4],"hash_ids":[1])", "bad_type", "input_length", "[4");
  check_line(R"("timestamp":0,"output_length":-7,"hash_ids":[1])", "out_of_range", "output_length", "-7");
  check_line(R"("timestamp":0,"output_length":true,"hash_ids":[1])", "bad_type", "output_length", "true");
  check_line(R"("timestamp":0,"input_length":012,"hash_ids":[1])", "bad_value", "input_length", "012");
  check_line(R"("timestamp":0,"input_length":+1,"hash_ids":[1])", "bad_value", "input_length", "+1");
  check_line(R"("timestamp":0,"input_length":1.,"hash_ids":[1])", "bad_value", "input_length", "1.");
  check_line(R"("timestamp":0,"input_length":1e,"hash_ids":[1])", "bad_value", "input_length", "1e");
  check_line(R"("timestamp":0,"x":nul,"hash_ids":[1])", "bad_value", "value", "nul");
  check_line("\"timestamp\":0,\"input_length\":" + std::string(300, '1'), "out_of_range", "input_length",
             std::string(40, '1'));
}

TEST_CASE("wrong blocks are refused with their place in the list") {
  check_line(R"("timestamp":0,"hash_ids":{"a":1})", "bad_type", "hash_ids", R"({"a":1)");
  check_line(R"("timestamp":0,"hash_ids":7)", "bad_type", "hash_ids", "7");
  check_line(R"("timestamp":0,"hash_ids":[1,2.5])", "bad_value", "hash_ids[1]", "2.5");
  check_line(R"("timestamp":0,"hash_ids":[1,[2]])", "bad_type", "hash_ids[1]", "[2");
  check_line(R"("timestamp":0,"hash_ids":[1,null])", "bad_type", "hash_ids[1]", "null");
  check_line(R"("timestamp":0,"hash_ids":[1,2,true])", "bad_type", "hash_ids[2]", "true");
  check_line(R"("timestamp":0,"hash_ids":[NaN])", "bad_value", "hash_ids[0]", "NaN");
  check_line(R"("timestamp":0,"hash_ids":[1,01])", "bad_value", "hash_ids[1]", "01");
  check_line(R"("timestamp":0,"hash_ids":[1,,2])", "bad_value", "hash_ids[1]", ",2");
  check_line(R"("timestamp":0,"hash_ids":[1 2])", "bad_syntax", "hash_ids", "2");
  check_line(R"("timestamp":0,"hash_ids":[1,])", "bad_value", "hash_ids[1]", "]");
  check_line(R"("timestamp":0,"session_id":{},"hash_ids":[1])", "bad_type", "session_id", "{");
}

TEST_CASE("missing, doubled and misplaced members are refused") {
  check_line(R"("input_length":5,"hash_ids":[1])", "missing_field", "timestamp", "");
  check_line(R"("timestamp":0)", "missing_field", "hash_ids", "");
  check_line("", "missing_field", "timestamp", "");
  check_line(R"("timestamp":0,"timestamp":0,"hash_ids":[1])", "duplicate_field", "timestamp", "");
  check_line(R"("timestamp":0,"hash_ids":[1],"hash_ids":[1])", "duplicate_field", "hash_ids", "");
  check_line(R"("timestamp":0,"hash_ids":[1],)", "bad_syntax", "member name", "}");
  check_line(R"("timestamp" 0,"hash_ids":[1])", "bad_syntax", "timestamp", "0");
  check_line(R"("timestamp":0 "hash_ids":[1])", "bad_syntax", "request", "\"hash_ids\"");
  check_line(R"(timestamp:0)", "bad_syntax", "member name", "timestamp:0");
  check_line(R"(""timestamp":0)", "bad_syntax", "member name", "timestamp\":0");
  check_refused(good + "[1]\n", "bad_type", "request", "[1", 2);
  check_refused(good + "garbage\n", "bad_type", "request", "garbage", 2);
  check_refused(good + good.substr(0, good.size() - 1) + good, "bad_syntax", "after the object",
                R"({"timestamp":0)", 2);
}

TEST_CASE("text that is cut off is refused at any place") {
  const std::string whole =
      good + R"({"timestamp":1,"session_id":"a\u00e9b","x":[{"y":null}],"hash_ids":[12,345,"q"]})";
  for (std::size_t n = good.size() + 1; n < whole.size(); ++n) {
    const std::string cut = whole.substr(0, n);
    INFO(cut);
    const cli::error at_end = refusal([&] { read_text(cut); });
    CHECK(at_end.line == 2);
    CHECK(at_end.kind == cli::failure::bad_input);
    // The same with more lines after it: they do not heal it, and the line named is still the one that is
    // cut.
    CHECK(refusal([&] { read_text(cut + "\n" + good); }).line == 2);
    CHECK(refusal([&] { read_text(packed(cut)); }).line == 2);
  }
  CHECK(read_text(whole).requests.size() == 2);
}

TEST_CASE("bytes that are not UTF-8 are refused wherever a string may be") {
  const std::vector<std::string> bad = {"\xff",
                                        "\xc0\xaf",
                                        "\xc3",
                                        "\xe0\x80\x80",
                                        "\xed\xa0\x80",
                                        "\xf0\x80\x80\x80",
                                        "\xf4\x90\x80\x80",
                                        "\xf8\x88\x80\x80\x80",
                                        "\x80",
                                        "\xe2\x82"};
  for (const std::string& bytes : bad) {
    for (const std::string& members :
         {"\"timestamp\":0,\"hash_ids\":[\"" + bytes + "\"]",
          "\"timestamp\":0,\"x\":\"" + bytes + "\",\"hash_ids\":[1]",
          "\"timestamp\":0,\"" + bytes + "\":1,\"hash_ids\":[1]",
          "\"timestamp\":0,\"session_id\":\"a" + bytes + "\",\"hash_ids\":[1]"}) {
      const cli::error e = refusal([&] { read_text(good + "{" + members + "}\n"); });
      CHECK(e.code == "bad_utf8");
      CHECK(e.line == 2);
      for (const char c : std::string(e.what())) CHECK(static_cast<unsigned char>(c) < 0x7f);
    }
  }
  check_line(R"("timestamp":0,"session_id":"\ud800","hash_ids":[1])", "bad_utf8", "session_id",
             "a half of a surrogate pair");
  check_line(R"("timestamp":0,"session_id":"\ud800\u0041","hash_ids":[1])", "bad_utf8", "session_id",
             "a half of a surrogate pair");
  check_line(R"("timestamp":0,"session_id":"\udc00","hash_ids":[1])", "bad_utf8", "session_id",
             "a half of a surrogate pair");
  check_line(R"("timestamp":0,"session_id":"\x41","hash_ids":[1])", "bad_syntax", "session_id", R"(\x41")");
  check_line("\"timestamp\":0,\"session_id\":\"a\tb\",\"hash_ids\":[1]", "bad_syntax", "session_id",
             R"(\x09b")");
  check_line("\"timestamp\":0,\xff", "bad_syntax", "member name", R"(\xff)");
  check_refused(std::string("{\"timestamp\":0,\0", 16), "bad_syntax", "member name", R"(\x00)", 1);
}

TEST_CASE("two requests swapped in time are refused in every format that has times") {
  check_refused(good + R"({"timestamp":5,"hash_ids":[1]})"
                       "\n"
                       R"({"timestamp":4,"hash_ids":[1]})",
                "out_of_order", "timestamp", "4000 us, after 5000 us", 3);
  check_refused(R"({"tokens":[1],"timestamp":2})"
                "\n"
                R"({"tokens":[1],"timestamp":1})",
                "out_of_order", "timestamp", "1000 us, after 2000 us", 2);
  check_refused("{\"requests\":[{\"t\":2,\"in\":1},\n{\"t\":1,\"in\":1}]}", "out_of_order", "t",
                "1000000 us, after 2000000 us", 2);
  check_refused("{\"requests\":[{\"t\":2,\"requests\":[{\"t\":2,\"in\":1},\n{\"t\":1,\"in\":1}]}]}",
                "out_of_order", "t", "1000000 us, after 2000000 us", 2);
  check_refused("TIMESTAMP,ContextTokens\n2023-11-16 18:00:01,1\n2023-11-16 18:00:00,1\n", "out_of_order",
                "TIMESTAMP", "1700157600000000 us, after 1700157601000000 us", 3);
  check_refused(R"({"type":"GetCacheLocation","trigger_time_us":2,"keys":[1]})"
                "\n"
                R"({"type":"GetCacheLocation","trigger_time_us":1,"keys":[1]})",
                "out_of_order", "trigger_time_us", "1 us, after 2 us", 2);
  check_refused(R"([2,[["BlockStored",[1],null,[1],1]]])"
                "\n"
                R"([1,[["BlockStored",[2],1,[1],1]]])",
                "out_of_order", "ts", "1000000 us, after 2000000 us", 2);
}

TEST_CASE("each format names its own missing and wrong fields") {
  check_refused(R"({"block_size":64,"hash_id_scope":"local"})", "missing_field", "requests", "", 1);
  check_refused(R"({"requests":[{"in":4}]})", "missing_field", "t", "", 1);
  check_refused(R"({"requests":[{"t":0}]})", "missing_field", "hash_ids", "", 1);
  check_refused(R"({"requests":[4]})", "bad_type", "requests[]", "4", 1);
  check_refused(R"({"block_size":0,"requests":[]})", "out_of_range", "block_size", "0", 1);
  check_refused(R"({"hash_id_scope":"galaxy","requests":[]})", "bad_value", "hash_id_scope", "galaxy", 1);
  check_refused(R"({"requests":[],"hash_id_scope":"global"})", "bad_value", "hash_id_scope",
                "global after the requests", 1);
  check_refused(R"({"requests":[{"t":0,"hash_ids":[1],"type":"subagent"}]})", "bad_value", "hash_ids",
                "of a subagent itself", 1);
  check_refused(R"({"requests":[{"t":0,"hash_ids":[1],"requests":[]}]})", "bad_value", "requests",
                "beside hash_ids", 1);
  check_refused(R"({"requests":[{"t":0,"requests":[],"hash_ids":[1]}]})", "bad_value", "hash_ids",
                "beside nested requests", 1);
  check_refused(R"({"requests":[{"t":1e12,"requests":[{"t":1e12,"in":3}]}]})", "out_of_range", "t",
                "1000000000000000000 us, later by 1000000000000000000 us", 1);
  check_refused(R"({"block_size":64,"requests":[{"t":0,"in":5}]})"
                "\n"
                R"({"block_size":32,"requests":[]})",
                "bad_value", "block size", "32, 64 before", 2);
  check_refused(R"({"requests":[]})", "empty", "requests", "0", -1);
  check_refused(R"({"trigger_time_us":0,"keys":[1]})", "missing_field", "type", "", 1);
  check_refused(R"({"type":"GetCacheLocation","trigger_time_us":0})", "missing_field", "keys", "", 1);
  check_refused(R"({"trigger_time_us":1,"type":"StartWriteCache"})"
                "\n"
                R"({"type":"GetCacheLocation","keys":[]})",
                "missing_field", "trigger_time_us", "", 2);
  check_refused(R"({"tokens":[1,-2]})", "out_of_range", "tokens[1]", "-2", 1);
  check_refused(R"({"tokens":[1,4294967296]})", "out_of_range", "tokens[1]", "4294967296", 1);
  check_refused(R"({"tokens":[1,18446744073709551615]})", "out_of_range", "tokens[1]", "18446744073709551615",
                1);
  check_refused(R"({"tokens":["a"]})", "bad_type", "tokens[0]", "a", 1);
  check_refused(R"({"tokens":[1.5]})", "bad_value", "tokens[0]", "1.5", 1);
  check_refused(R"({"tokens":[1],"timestamp":1})"
                "\n"
                R"({"tokens":[1]})",
                "missing_field", "timestamp", "", 2);
  check_refused(R"({"tokens":[1]})"
                "\n"
                R"({"tokens":[1],"timestamp":1})",
                "bad_value", "timestamp", "there, but not in the first request", 2);
  check_refused(R"({"tokens":[1]})"
                "\n"
                R"({"timestamp":1})",
                "missing_field", "tokens", "", 2);
}

TEST_CASE("a wrong CSV is refused with line and column") {
  const std::string head = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  check_refused("ContextTokens,GeneratedTokens\n1,2\n", "missing_field", "TIMESTAMP", "", 1);
  for (const char* time :
       {"2023-11-16", "2023-13-01 00:00:00", "2023-02-29 00:00:00", "2023-11-31 00:00:00",
        "2023-11-16 24:00:00", "2023-11-16 00:60:00", "2023-11-16 00:00:00.", "2023-11-16 00:00:00+1",
        "23-11-16 00:00:00", "NaN", "1969-12-31 00:00:00", "1970-01-01 00:00:00+01:00"}) {
    check_refused(head + time + ",1,2\n", "bad_value", "TIMESTAMP", time, 2);
  }
  const std::string at = "2023-11-16 18:17:03,";
  check_refused(head + at + "x,2\n", "bad_value", "ContextTokens", "x", 2);
  check_refused(head + at + "1.5,2\n", "bad_value", "ContextTokens", "1.5", 2);
  check_refused(head + at + "-1,2\n", "out_of_range", "ContextTokens", "-1", 2);
  check_refused(head + at + "99999999999999999999,2\n", "out_of_range", "ContextTokens",
                "99999999999999999999", 2);
  check_refused(head + at + "1,-2\n", "out_of_range", "GeneratedTokens", "-2", 2);
  check_refused(head + at + "1\n", "missing_field", "column 3", "", 2);
  check_refused(head + at + "1,2,3\n", "bad_value", "columns", "4", 2);
  check_refused(head + at + "\xff,2\n", "bad_value", "ContextTokens", R"(\xff)", 2);
  check_refused(head + at + std::string(70000, '1'), "too_long", "line", at.substr(0, at.size() - 1), 2);
  check_refused(head, "empty", "requests", "0", -1);
}

TEST_CASE("what is no trace is refused with how it begins") {
  check_refused("", "empty", "file", "", -1);
  check_refused(packed(""), "empty", "file", "", -1);
  check_refused(" \n\n", "unknown_format", "begin of file", R"( )", 1);
  check_refused("hello\n", "unknown_format", "begin of file", "hello", 1);
  check_refused(R"({"a":1})", "unknown_format", "begin of file", R"({"a":1)", 1);
  check_refused("\x1f\x8b\x08", "unknown_format", "begin of file", R"(\x1f\x8b\x08)", 1);
  check_refused("GGUF", "unknown_format", "begin of file", "GGUF", 1);
}

TEST_CASE("folders, missing files and no files are refused") {
  const auto read = [](std::vector<std::string> paths) { cli::read_trace(paths); };
  const std::string folder = std::filesystem::temp_directory_path().string();
  CHECK(refusal([&] { read({folder}); }).code == "not_a_file");
  const cli::error missing = refusal([&] { read({folder + "/there/is/none"}); });
  CHECK(missing.code == "cannot_open");
  CHECK(missing.kind == cli::failure::bad_input);
  CHECK(missing.file == folder + "/there/is/none");
  CHECK(refusal([&] { read({}); }).kind == cli::failure::usage);
  read_options options;
  options.block_tokens = -1;
  CHECK(refusal([&] { read_text(good, options); }).kind == cli::failure::usage);
}

TEST_CASE("packed data that is cut off or damaged is refused") {
  std::string text;
  for (int i = 0; i < 3000; ++i)
    text +=
        "{\"timestamp\":" + std::to_string(i) + ",\"hash_ids\":[" + std::to_string(i * 7919 % 3001) + "]}\n";
  const std::string whole = packed(text);
  CHECK(read_text(whole).requests.size() == 3000);
  for (std::size_t n = 4; n < whole.size(); n += n < 64 ? 1 : 97) {
    const cli::error e = refusal([&] { read_text(whole.substr(0, n)); });
    CHECK(e.code == "truncated");
    CHECK(e.field == "zstd data");
    CHECK(e.file == "FILE");
    CHECK(e.line == 1);  // all of it is one block of zstd
  }
  const std::string more = packed("{\"timestamp\":3000,\"hash_ids\":[1]}\n");
  for (std::size_t n = 1; n < more.size(); ++n)
    check_refused(whole + more.substr(0, n), "truncated", "zstd data", "", 3001);
  std::string damaged = whole;
  damaged[5] = '\xff';
  CHECK(refusal([&] { read_text(damaged); }).field == "zstd data");
  check_refused(whole + "trailing", "damaged", "zstd data", "Unknown frame descriptor", 3001);
}

TEST_CASE("a frame that asks for more memory than allowed is refused") {
  packer wide(28);
  wide.add(good);
  const std::string bytes = wide.finish();
  const cli::error e = refusal([&] { read_text(bytes); });
  CHECK(e.code == "window_too_large");
  packer allowed(27);
  allowed.add(good);
  CHECK(read_text(allowed.finish()).requests.size() == 1);
}

TEST_CASE("a bomb is read through, or refused, in little memory") {
  const std::int64_t megabytes = effort(400);
  const std::string spaces(1 << 20, ' '), letters(1 << 20, 'x'), digits(1 << 20, '7'),
      empty_lines(1 << 20, '\n');
  const auto bomb = [&](const std::string& front, const std::string& piece, const std::string& back) {
    packer p;
    p.add(front);
    for (std::int64_t i = 0; i < megabytes; ++i) p.add(piece);
    p.add(back);
    return p.finish();
  };
  const std::string blank = bomb("{\"timestamp\":0,", spaces, "\"hash_ids\":[1]}");
  const std::string text = bomb("{\"timestamp\":0,\"x\":\"", letters, "\",\"hash_ids\":[1]}");
  const std::string lines = bomb(good, empty_lines, good + "!");
  const std::string number = bomb("{\"timestamp\":0,\"hash_ids\":[1,", digits, "]}");
  const std::string name = bomb("{\"timestamp\":0,\"", letters, "\":0,\"hash_ids\":[1]}");
  const std::string id = bomb("{\"timestamp\":0,\"hash_ids\":[\"", letters, "\"]}");
  CHECK(blank.size() < 1 << 20);
  const long before = peak_kib();
  CHECK(read_text(blank).requests.size() == 1);
  CHECK(read_text(text).requests.size() == 1);
  check_refused(lines, "bad_type", "request", "!", 3 + (megabytes << 20));
  check_refused(number, "out_of_range", "hash_ids[1]", std::string(40, '7'), 1);
  CHECK(refusal([&] { read_text(name); }).code == "too_long");
  CHECK(refusal([&] { read_text(id); }).code == "too_long");
  // Windows of zstd, buffers of the readers, and what an allocator keeps.
  CHECK(peak_kib() - before < 48 * 1024);
}

TEST_CASE("a line of a hundred megabytes is read if a request may be so long, else refused") {
  std::string text = R"({"timestamp":0,"x":")" + std::string(100'000'000, 'y') + R"(","hash_ids":[1]})";
  CHECK(read_text(text).requests.size() == 1);
  text = R"({"timestamp":0,"hash_ids":[)";
  while (text.size() < 100'000'000) text += "1,22,333,4444,55555,1,1,1,";
  text += "1]}";
  check_refused(text, "too_long", "hash_ids", "more than 16777216 blocks", 1);
  text = R"({"tokens":[)";
  while (text.size() < 100'000'000) text += "1,22,333,4444,55555,1,1,1,";
  text += "1]}";
  read_options one;
  one.block_tokens = 1;
  CHECK(refusal([&] { read_text(text, one); }).code == "too_long");
  CHECK(read_text(text).requests[0].input_tokens > 30'000'000);
}

TEST_CASE("nesting has a limit") {
  check_line("\"timestamp\":0,\"x\":" + std::string(100, '[') + std::string(100, ']'), "too_deep", "value",
             "65");
  check_line("\"timestamp\":0,\"hash_ids\":[1],\"x\":" + std::string(1'000'000, '['), "too_deep", "value",
             "65");
}
