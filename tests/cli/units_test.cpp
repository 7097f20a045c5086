// SPDX-License-Identifier: Apache-2.0
#include "units.hpp"

#include <catch2/catch.hpp>
#include <initializer_list>

#include "error.hpp"

namespace cli = kvcache::cli;

namespace {

template <class F>
void check_refused(F parse, std::initializer_list<const char*> texts) {
  for (const char* text : texts) {
    CAPTURE(text);
    try {
      parse("--option", text);
      FAIL_CHECK("was read");
    } catch (const cli::error& e) {
      CHECK(e.kind == cli::failure::usage);
      CHECK(e.code == "bad_value");
      CHECK(e.field == "--option");
      CHECK(e.value == (*text == 0 ? "empty" : text));
      CHECK(!e.wanted.empty());
      CHECK(std::string(e.what()).find(e.wanted) != std::string::npos);
    }
  }
}

}  // namespace

TEST_CASE("bytes are read in units of 1000 and of 1024") {
  CHECK(cli::parse_bytes("m", "80GiB") == 80LL << 30);
  CHECK(cli::parse_bytes("m", "24GB") == 24'000'000'000);
  CHECK(cli::parse_bytes("m", "24gb") == 24'000'000'000);
  CHECK(cli::parse_bytes("m", "1.5KiB") == 1536);
  CHECK(cli::parse_bytes("m", "0.001kB") == 1);
  CHECK(cli::parse_bytes("m", "2TiB") == 2LL << 40);
  CHECK(cli::parse_bytes("m", "7B") == 7);
  CHECK(cli::parse_bytes("m", "4611686018427387903") == (1LL << 62) - 1);
  check_refused(cli::parse_bytes, {"",
                                   "GB",
                                   "24G",
                                   "24b",
                                   "24Gb",
                                   "-1GB",
                                   "+1GB",
                                   " 1GB",
                                   "1 GB",
                                   "1GB ",
                                   "1e9",
                                   "0x10",
                                   "nan",
                                   "inf",
                                   "1.GB",
                                   ".5GB",
                                   "1.2.3GB",
                                   "1,5GB",
                                   "4611686018427387904",
                                   "4.7EB",
                                   "5000000000GB",
                                   "99999999999999999999"});
}

TEST_CASE("bandwidths are bytes per second and say so") {
  CHECK(cli::parse_bandwidth("b", "3.35TB/s") == 3.35e12);
  CHECK(cli::parse_bandwidth("b", "900GB/s") == 900e9);
  CHECK(cli::parse_bandwidth("b", "1GiB/s") == 1073741824.0);
  check_refused(cli::parse_bandwidth, {"", "/s", "3.35TB", "0GB/s", "3TBps", "3Tb/s", "-1GB/s"});
}

TEST_CASE("tokens are read in powers of 1024") {
  CHECK(cli::parse_tokens("t", "4096") == 4096);
  CHECK(cli::parse_tokens("t", "8k") == 8192);
  CHECK(cli::parse_tokens("t", "8K") == 8192);
  CHECK(cli::parse_tokens("t", "4M") == 4LL << 20);
  CHECK(cli::parse_tokens("t", "0.5k") == 512);
  check_refused(cli::parse_tokens,
                {"", "0", "0k", "-1", "1.5", "4G", "4MB", "k", "4kk", "99999999999999999M"});
}

TEST_CASE("amounts are read in powers of 1000") {
  CHECK(cli::parse_amount("a", "8030261248") == 8'030'261'248);
  CHECK(cli::parse_amount("a", "8.03B") == 8'030'000'000);
  CHECK(cli::parse_amount("a", "135M") == 135'000'000);
  CHECK(cli::parse_amount("a", "70e9") == 70'000'000'000);
  check_refused(cli::parse_amount, {"", "0", "7.5", "7x", "-7B", "70000e18"});
  check_refused(cli::parse_amount, {"1e19", "1e30", "1e", "1e-3", "1e+3", "1e3x"});
}

TEST_CASE("capacities say blocks, tokens, bytes or no limit") {
  using unit = cli::capacity::unit;
  const auto is = [](const char* text, unit in, int64_t amount) {
    const cli::capacity c = cli::parse_capacity("--capacity", text);
    CAPTURE(text);
    CHECK(c.in == in);
    CHECK(c.amount == amount);
  };
  is("2048b", unit::blocks, 2048);
  is("2048blocks", unit::blocks, 2048);
  is("4M", unit::tokens, 4LL << 20);
  is("512", unit::tokens, 512);
  is("80GiB", unit::bytes, 80LL << 30);
  is("24GB", unit::bytes, 24'000'000'000);
  is("4096B", unit::bytes, 4096);
  is("inf", unit::unbounded, 0);
  check_refused(cli::parse_capacity, {"", "0", "0b", "1.5b", "infinite", "-1b", "2048 b", "4G", "b"});
}

TEST_CASE("whole numbers keep to their range") {
  CHECK(cli::parse_count("n", "16", 1, 16) == 16);
  const auto small = [](std::string_view option, std::string_view text) {
    return cli::parse_count(option, text, 1, 16);
  };
  check_refused(small, {"", "0", "17", "-1", "1.0", "1x", "99999999999999999999"});
}

TEST_CASE("lists have no empty parts") {
  CHECK(cli::split_list("l", "lru,fifo") == std::vector<std::string>{"lru", "fifo"});
  CHECK(cli::split_list("l", "lru") == std::vector<std::string>{"lru"});
  check_refused(cli::split_list, {"", ",", "a,", ",a", "a,,b"});
}
