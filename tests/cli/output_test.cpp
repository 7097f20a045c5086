// SPDX-License-Identifier: Apache-2.0
#include "output.hpp"

#include <catch2/catch.hpp>
#include <limits>

namespace cli = kvcache::cli;

TEST_CASE("documents have short floats, and null where there is no number") {
  const cli::json d = {{"a", 1.0 / 3},
                       {"b", {1, 2.5, true, nullptr}},
                       {"c", std::numeric_limits<double>::infinity()},
                       {"d\n", "\xff\x01"},
                       {"e", cli::json::object()}};
  CHECK(cli::to_text(d) ==
        "{\"a\": 0.333333333, \"b\": [1, 2.5, true, null], \"c\": null, \"d\\n\": \"\xEF\xBF\xBD\\u0001\", "
        "\"e\": {}}");
  CHECK(cli::json::parse(cli::to_text(d))["b"][0] == 1);
}

TEST_CASE("errors name what they know and nothing else") {
  const cli::error plain(cli::failure::bad_input, "truncated", "magic", "4", "model.gguf", 3);
  CHECK(cli::to_text(cli::to_json(plain)) ==
        "{\"schema\": \"kvcache.error.v1\", \"error\": {\"code\": \"truncated\", \"field\": \"magic\", "
        "\"value\": \"4\", \"file\": \"model.gguf\", \"line\": 3}}");
  CHECK(cli::describe(plain) == "model.gguf:3: magic is 4: truncated");
  const cli::error hostile(cli::failure::usage, "bad_value", "--x", "\x1b[31m");
  CHECK(cli::describe(hostile) == "--x is ?[31m: bad_value");
  const cli::error helped = cli::error(cli::failure::usage, "bad_value", "--x", "y").wanting("z");
  CHECK(cli::to_json(helped)["error"]["wanted"] == "z");
  CHECK(cli::describe(helped) == "--x is y: bad_value (wanted: z)");
}

TEST_CASE("a terminal gets no control characters but line ends") {
  CHECK(cli::harmless("a\x1b[2J\tb\x7f\n") == "a?[2J?b?\n");
  CHECK(cli::describe(cli::error(cli::failure::usage, "c", "f", "a\nb")) == "f is a?b: c");
}

TEST_CASE("amounts of bytes are given in both kinds of units") {
  CHECK(cli::bytes_text(12) == "12 B");
  CHECK(cli::bytes_text(131072) == "131.07 kB = 128.00 KiB");
  CHECK(cli::bytes_text(42949672960) == "42.95 GB = 40.00 GiB");
  CHECK(cli::bytes_text(10485760) == "10.49 MB = 10.00 MiB");
  CHECK(cli::bytes_text(999'999) == "1.00 MB = 0.95 MiB");
  CHECK(cli::bytes_text(std::numeric_limits<int64_t>::max()) == "9.22 EB = 8.00 EiB");
}

TEST_CASE("counts are grouped by thousands") {
  CHECK(cli::count_text(0) == "0");
  CHECK(cli::count_text(999) == "999");
  CHECK(cli::count_text(1000) == "1,000");
  CHECK(cli::count_text(-1234567) == "-1,234,567");
}

TEST_CASE("tables line up") {
  cli::table t;
  t.add({"name", "n"});
  t.add({"a", "1,000", "x"});
  CHECK(t.text() == "  name      n\n  a     1,000  x\n");
}
