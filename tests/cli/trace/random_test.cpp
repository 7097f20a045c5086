// SPDX-License-Identifier: Apache-2.0
// Random Mooncake files, written in every way that JSON allows and much longer than any buffer, beside a
// naive reader; and random damage, which may be refused but must never be read as something else than it
// says.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "cli/trace/support.hpp"

using namespace kvcache;
using namespace kvcache::test;
using nlohmann::json;

namespace {

/// Reads with a general JSON library, a whole line at a time.
trace naive_read(const std::string& text) {
  trace t;
  std::map<std::string, std::int32_t> ids, sessions;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const json row = json::parse(line);
    cli::request r;
    r.time_us = row["timestamp"].get<std::int64_t>() * 1000;
    r.input_tokens = row["input_length"].get<std::int64_t>();
    r.output_tokens = row.value("output_length", std::int64_t{0});
    if (row.contains("session_id")) {
      r.session = sessions.try_emplace(row["session_id"].dump(), static_cast<std::int32_t>(sessions.size()))
                      .first->second;
    }
    r.first = static_cast<std::int64_t>(t.units.size());
    for (const json& id : row["hash_ids"]) {
      t.units.push_back(ids.try_emplace(id.dump(), static_cast<std::int32_t>(ids.size())).first->second);
      ++r.count;
    }
    t.requests.push_back(r);
  }
  for (std::size_t i = t.requests.size(); i-- > 0;) t.requests[i].time_us -= t.requests[0].time_us;
  t.distinct = static_cast<std::int32_t>(ids.size());
  return t;
}

bool same(const trace& a, const trace& b) {
  if (a.units != b.units || a.distinct != b.distinct || a.requests.size() != b.requests.size()) return false;
  for (std::size_t i = 0; i < a.requests.size(); ++i) {
    const cli::request &x = a.requests[i], &y = b.requests[i];
    if (x.time_us != y.time_us || x.input_tokens != y.input_tokens || x.output_tokens != y.output_tokens ||
        x.first != y.first || x.count != y.count || x.session != y.session) {
      return false;
    }
  }
  return true;
}

class writer {
 public:
  explicit writer(std::uint64_t seed) : random_(seed) {}

  std::string file(std::size_t rows) {
    std::string out;
    const bool wild = random_() % 2 == 0;
    for (std::size_t i = 0; i < rows; ++i) {
      time_ += random_() % 3;
      std::vector<std::string> members = {"\"timestamp\"" + colon() + std::to_string(time_),
                                          "\"input_length\"" + colon() + std::to_string(random_() % 100000),
                                          "\"hash_ids\"" + colon() + list(wild)};
      if (random_() % 2 == 0) members.push_back("\"output_length\":" + std::to_string(random_() % 1000));
      if (random_() % 2 == 0)
        members.push_back("\"session_id\":" +
                          std::string(random_() % 2 == 0 ? "\"s\\u0041\"" : std::to_string(random_() % 9)));
      if (random_() % 4 == 0)
        members.push_back(R"("extra":{"a":[1,"é\n\u20ac",null,{"b":true}],"hash_ids":-0.5e+3})");
      if (random_() % 64 == 0) members.push_back("\"long\":\"" + std::string(random_() % 100000, 'q') + "\"");
      std::shuffle(members.begin(), members.end(), random_);
      std::string row = space() + "{" + space();
      for (std::size_t m = 0; m < members.size(); ++m)
        row += (m != 0 ? "," + space() : "") + members[m] + space();
      out += row + "}" + space() + (random_() % 16 == 0 ? "\r\n\n" : "\n");
    }
    return out;
  }

 private:
  std::string space() {
    return std::string(random_() % 4 == 0 ? random_() % 5 : 0, random_() % 2 == 0 ? ' ' : '\t');
  }
  std::string colon() { return space() + ":" + space(); }
  std::string list(bool wild) {
    std::string out = "[" + space();
    const std::size_t count = random_() % (random_() % 32 == 0 ? 3000 : 40);
    for (std::size_t i = 0; i < count; ++i) {
      if (i != 0) out += "," + (random_() % 8 == 0 ? space() : "");
      const std::uint64_t big = random_() >> (random_() % 64);
      switch (wild ? random_() % 8 : 0) {
        case 1:
          out += std::to_string(static_cast<std::int64_t>(big));
          break;
        case 2:
          out += std::to_string(big);
          break;
        case 3:
          out += "\"h" + std::to_string(random_() % 500) + "\"";
          break;
        default:
          out += std::to_string(random_() % 5000);
      }
      if (i + 1 == count) out += space();
    }
    return out + "]";
  }
  std::mt19937_64 random_;
  std::uint64_t time_ = 0;
};

}  // namespace

TEST_CASE("random files read as a naive reader reads them, plain and packed") {
  const std::uint64_t seed = test_seed("random traces", 11);
  for (std::uint64_t round = 0; round < 40; ++round) {
    writer write(seed + round);
    const std::string text = write.file(round < 36 ? round * 3 + 1 : static_cast<std::size_t>(effort(8000)));
    const trace expected = naive_read(text);
    INFO("round " << round);
    REQUIRE(same(read_text(text), expected));
    REQUIRE(same(read_text(packed(text)), expected));
  }
}

TEST_CASE("a file with a byte changed is refused, or says what it now says") {
  std::mt19937_64 random(test_seed("damaged traces", 13));
  std::int64_t read = 0, refused = 0;
  for (std::int64_t round = 0; round < effort(20000); ++round) {
    writer write(random());
    std::string text = write.file(2);
    if (text.size() > 3000) continue;
    constexpr std::string_view bytes = "0123456789-.eE,:[]{}\"\\ntu \xc3\xff";
    for (std::uint64_t i = random() % 3 + 1; i > 0; --i)
      text[random() % text.size()] = bytes[random() % bytes.size()];
    trace got;
    try {
      got = read_text(text);
    } catch (const cli::error& e) {
      CHECK(e.kind == cli::failure::bad_input);
      ++refused;
      continue;
    }
    ++read;
    // What a strict JSON library does not take must not have been read.
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      INFO(line);
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      try {
        const json row = json::parse(line);
        REQUIRE(row.is_object());
      } catch (const json::out_of_range&) {
        // A number that no double holds, in a member that nobody asks for, is no error of the file.
      }
    }
    REQUIRE(got.requests.size() <= 2);
  }
  CHECK(read > 0);
  CHECK(refused > 0);
}
