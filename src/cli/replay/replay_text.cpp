// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "replay/study.hpp"

namespace kvcache::cli {
namespace {

// Names of files and what readers quote from them may hold anything.
std::string word(const json& text) {
  std::string out = text.get<std::string>();
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return out;
}

std::string count(const json& n) {
  return count_text(n.get<std::int64_t>());
}

std::string percent(std::int64_t part, std::int64_t whole) {
  return number_text(percent_of(part, whole), 2) + " %";
}

// After at most `width` characters a new line, indented.
std::string wrapped(const std::string& text, std::size_t indent) {
  constexpr std::size_t width = 100;
  std::string out;
  std::size_t column = 0;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = std::min(text.find(' ', at), text.size());
    if (text.compare(end, 2, " %") == 0) end = std::min(text.find(' ', end + 1), text.size());
    const std::size_t length = end - at;
    if (column != 0 && column + 1 + length > width) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    } else if (column != 0) {
      out += ' ';
      ++column;
    }
    out.append(text, at, length);
    column += length;
    at = end + 1;
  }
  return out + '\n';
}

std::string head(const json& d) {
  const json& t = d["trace"];
  std::string out;
  for (const json& file : t["files"]) out += word(file) + '\n';
  out += "  " + count(t["requests"]) + " requests, " + count(t["tokens"]) + " tokens, " + count(t["blocks"]) +
         " blocks of " + count(t["block_tokens"]) + " tokens, of them " + count(t["unique_blocks"]) +
         " different (" + word(t["format"]) + ")\n";
  if (const json& m = d["model"]; !m.is_null()) {
    out += "  a token of " + word(m["name"]) + " in " + word(m["kv"]) + ": " +
           bytes_text(m["bytes_per_token"].get<std::int64_t>()) + "\n";
  }
  return out;
}

// Columns that say the same in every row are left out.
struct columns {
  bool ttl = false, route = false, bytes = false, optimum = false;
};

columns columns_of(const json& d) {
  columns c;
  for (const json& r : d["results"]) {
    c.ttl |= !r["ttl_s"].is_null();
    c.route |= !r["route"].is_null();
    c.bytes |= !r["capacity_bytes"].is_null();
    c.optimum |= !r["of_optimum"].is_null();
  }
  return c;
}

std::vector<std::string> titles(const columns& c) {
  std::vector<std::string> out{"policy"};
  if (c.ttl) out.push_back("ttl");
  if (c.route) out.push_back("route");
  out.insert(out.end(), {"blocks", "= tokens"});
  if (c.bytes) out.push_back("= GiB");
  out.insert(out.end(), {"tokens hit", "blocks hit"});
  if (c.optimum) out.push_back("of optimum");
  out.push_back("lost: capacity");
  if (c.route) out.push_back("routing");
  out.push_back("evictions");
  return out;
}

std::string tokens_of(const json& d, const json& capacity) {
  if (capacity.is_null()) return "";
  std::int64_t tokens = 0;
  const bool huge = __builtin_mul_overflow(capacity.get<std::int64_t>(),
                                           d["trace"]["block_tokens"].get<std::int64_t>(), &tokens);
  return huge ? "" : tokens_text(tokens);
}

std::vector<std::string> cells(const json& d, const json& r, const columns& c) {
  const auto blocks = d["trace"]["blocks"].get<std::int64_t>(),
             tokens = d["trace"]["tokens"].get<std::int64_t>();
  std::vector<std::string> out{word(r["policy"]) + (r["asked"].get<bool>() ? "" : " *")};
  if (c.ttl) out.push_back(r["ttl_s"].is_null() ? "" : to_text(r["ttl_s"]) + " s");
  if (c.route) out.push_back(r["route"].is_null() ? "one worker" : word(r["route"]));
  out.push_back(r["capacity_blocks"].is_null() ? "inf" : count(r["capacity_blocks"]));
  out.push_back(tokens_of(d, r["capacity_blocks"]));
  if (c.bytes) {
    const json& bytes = r["capacity_bytes"];
    out.push_back(bytes.is_null() ? "" : number_text(bytes.get<double>() / (1 << 30), 2));
  }
  out.push_back(percent(r["hit_tokens"].get<std::int64_t>(), tokens));
  out.push_back(percent(r["hit_blocks"].get<std::int64_t>(), blocks));
  if (c.optimum) {
    const json& of = r["of_optimum"];
    out.push_back(of.is_null() ? "" : number_text(100 * of.get<double>(), 1) + " %");
  }
  out.push_back(percent(r["lost_to_capacity"]["tokens"].get<std::int64_t>(), tokens));
  if (c.route) out.push_back(percent(r["lost_to_routing"]["tokens"].get<std::int64_t>(), tokens));
  out.push_back(count(r["evictions"]));
  return out;
}

std::string results(const json& d) {
  const columns c = columns_of(d);
  table t;
  t.add(titles(c));
  bool beside = false;
  for (const json& r : d["results"]) {
    t.add(cells(d, r, c));
    beside |= !r["asked"].get<bool>();
  }
  std::string out = concat({"\n", t.text()});
  if (beside) out += "  * the optimum, which knows the future: what a policy could find in this room\n";
  return out;
}

std::string sentences(const char* title, const json& all) {
  if (all.empty()) return {};
  std::string out = std::string("\n") + title + "\n";
  for (const json& text : all) out += wrapped(concat({"- ", word(text)}), 2);
  return out;
}

// The whole curve is for programs; here it is at powers of two.
std::string curve(const json& d) {
  if (d["curve"].is_null()) return {};
  const auto tokens = d["trace"]["tokens"].get<std::int64_t>();
  table t;
  t.add({"lru, blocks", "= tokens", "tokens hit"});
  std::int64_t next = 1;
  for (const json& p : d["curve"]) {
    const auto c = p["capacity_blocks"].get<std::int64_t>();
    const bool last = &p == &d["curve"].back();
    if (c == 0 || (c != next && !last)) continue;
    if (c == next) next *= 2;
    t.add({count_text(c), tokens_of(d, p["capacity_blocks"]),
           percent(p["hit_tokens"].get<std::int64_t>(), tokens)});
  }
  return concat({"\n", t.text()});
}

}  // namespace

std::string replay_text(const json& d) {
  std::string out = head(d) + results(d) + curve(d) + sentences("What is lost where", d["findings"]) +
                    sentences("What to do", d["advice"]);
  if (!d["notes"].empty()) out += '\n';
  for (const json& note : d["notes"]) out += wrapped(concat({"note: ", word(note)}), 2);
  if (d.contains("files")) {
    for (const json& file : d["files"]) out += concat({"wrote ", word(file), "\n"});
  }
  return out;
}

}  // namespace kvcache::cli
