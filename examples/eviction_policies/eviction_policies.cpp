// SPDX-License-Identifier: Apache-2.0
//
// eviction_policies: the same traffic through one small cache, once per policy. Which cached prefixes go when
// blocks are needed decides how much of the next prompts is found; the policy is one line of text.
//
//   conversations   a ─ a b ─ a b c ─ ...    each unit is found once more, by the next step: recency is all
//   documents       d   e   d   f   d ...    some are asked about often, most once: frequency pays
//
// The control plane runs alone, with token ids but without keys, values or a model. What a cache with room
// for everything finds is the most that any policy can.

#include <cstdio>

#include "example.hpp"
#include "kvcache/cache.hpp"
#include "kvcache/evict/parse.hpp"
#include "traffic.hpp"

namespace {

using eviction_policies::request;

struct options {
  engine::common_options common;
  int scale = 72;       ///< agents; three times as many chats
  int documents = 400;  ///< asked about once
  int blocks = 1200;    ///< of 16 tokens
  std::uint64_t seed = 1;
};

struct outcome {
  std::int64_t tokens = 0, found = 0;  // of prompts
  std::int64_t agent_tokens = 0, agent_found = 0;
  std::int64_t evicted = 0, expired = 0;  // units; expired ones are among the evicted
  bool sound = true;

  double percent() const { return 100.0 * static_cast<double>(found) / static_cast<double>(tokens); }
  double agent_percent() const {
    return 100.0 * static_cast<double>(agent_found) /
           static_cast<double>(std::max<std::int64_t>(agent_tokens, 1));
  }
};

engine::error failed(const kvcache::status& s) {
  return engine::cannot_run(kvcache::to_text(s.code), s.field, std::to_string(s.value));
}

/// All requests, one at a time, through a cache of `blocks` blocks.
engine::result<outcome> serve(const std::vector<request>& requests, const std::string& policy, int blocks) {
  const kvcache::parsed_eviction read = kvcache::parse_eviction(policy);
  if (!read.ok()) return engine::bad_input("bad_value", std::string(read.key), std::string(read.text));
  const kvcache::group_config group{.shape = {.layers = 1, .kv_heads = 1, .head_dim_k = 8, .head_dim_v = 8},
                                    .total = kvcache::blocks{blocks}};
  auto cache = kvcache::basic_cache<kvcache::dynamic>::create({.groups = {&group, 1}, .max_sequences = 1},
                                                              kvcache::make_eviction(read.value));
  if (!cache) return failed(cache.error());
  outcome out;
  for (const request& r : requests) {
    // [time]
    out.expired += cache->set_time(static_cast<std::uint64_t>(r.at * 1e9));
    kvcache::open_options how;
    if (r.agent) how = {.priority = 1, .priority_ms = 300'000};  // its next step comes within five minutes
    auto seq = cache->open(r.text, kvcache::scope::shared(), how);
    // [time]
    if (!seq) return failed(seq.error());
    const auto length = static_cast<std::int32_t>(r.text.size());
    const std::int32_t reused = seq->reused();
    out.sound = out.sound && seq->extend(length - reused) && seq->commit(r.text);
    out.tokens += length;
    out.found += reused;
    out.agent_tokens += r.agent ? length : 0;
    out.agent_found += r.agent ? reused : 0;
  }
  const kvcache::stats s = cache->count();
  out.evicted = static_cast<std::int64_t>(s.nodes_evicted);
  out.sound = out.sound && cache->check_invariants() == nullptr && s.blocks_used == 0 && s.refusals == 0;
  return out;
}

/// One policy on both kinds of traffic.
struct row {
  std::string policy;
  outcome talk, read;
};

const row& of(const std::vector<row>& rows, const std::string& policy) {
  return *std::find_if(rows.begin(), rows.end(), [&](const row& r) { return r.policy == policy; });
}

void check(engine::report& out, const std::vector<row>& rows, const outcome& again) {
  const row& all = rows.back();
  const row& lru = rows.front();
  bool sound = all.talk.evicted == 0 && all.read.evicted == 0;
  bool bounded = true;
  bool recency = true;
  for (const row& r : rows) {
    sound = sound && r.talk.sound && r.read.sound && r.talk.tokens == all.talk.tokens;
    bounded = bounded && r.talk.found <= all.talk.found && r.read.found <= all.read.found;
    if (r.policy != "priority" && r.policy != all.policy) recency = recency && r.talk.found <= lru.talk.found;
  }
  out.claim("every policy serves every request, and every cache is sound", sound);
  out.claim("no policy finds more than a cache with room for everything", bounded);
  out.claim("of growing contexts none finds more than lru, unless it is told which ones matter", recency);
  out.claim("a priority keeps more of the agents' contexts than lru does",
            of(rows, "priority").talk.agent_found > lru.talk.agent_found);
  out.claim("among documents that are read once, slru and s3_fifo keep more of the popular ones than lru",
            of(rows, "slru").read.found > lru.read.found && of(rows, "s3_fifo").read.found > lru.read.found);
  const outcome& ttl = of(rows, "ttl:120").talk;
  out.claim("a time to live only takes away from lru", ttl.expired > 0 && ttl.found <= lru.talk.found);
  out.claim("the same requests evict the same units",
            again.found == lru.talk.found && again.evicted == lru.talk.evicted);
}

void print_row(engine::report& out, const row& r) {
  out.print("%-12s %13.1f %% %11.1f %% %10s %9s %11.1f %% %10s\n", r.policy.c_str(), r.talk.percent(),
            r.talk.agent_percent(), engine::thousands(r.talk.evicted).c_str(),
            engine::thousands(r.talk.expired).c_str(), r.read.percent(),
            engine::thousands(r.read.evicted).c_str());
  const auto figures = [](const outcome& o) {
    return engine::json{
        {"tokens", o.tokens}, {"tokens_found", o.found}, {"evicted", o.evicted}, {"expired", o.expired}};
  };
  out.figures["rows"].push_back(
      {{"policy", r.policy}, {"conversations", figures(r.talk)}, {"documents", figures(r.read)}});
}

engine::result<std::string> run(const options& o, engine::report& out) {
  eviction_policies::hour talk(o.seed), read(o.seed);
  talk.conversations(o.scale);
  read.documents(o.documents);
  const std::vector<request> talks = talk.take(), reads = read.take();
  out.print("%zu requests of conversations, %zu about documents; %d blocks of 16 tokens\n\n", talks.size(),
            reads.size(), o.blocks);
  out.print("%-12s %15s %13s %10s %9s %13s %10s\n", "policy", "conversations", "their agents", "evicted",
            "expired", "documents", "evicted");
  std::vector<row> rows;
  for (const char* policy :
       {"lru", "fifo", "lfu", "slru", "ttl:120", "priority", "gdsf", "s3_fifo", "two_q", "room for all"}) {
    const bool all = std::string(policy) == "room for all";
    auto a = serve(talks, all ? "lru" : policy, all ? 1 << 20 : o.blocks);
    auto b = serve(reads, all ? "lru" : policy, all ? 1 << 20 : o.blocks);
    if (!a) return a.error();
    if (!b) return b.error();
    rows.push_back({policy, *a, *b});
    print_row(out, rows.back());
  }
  auto again = serve(talks, "lru", o.blocks);
  if (!again) return again.error();
  out.print("\n");
  check(out, rows, *again);
  const row& lru = rows.front();
  return engine::formatted(
      "conversations: lru %.1f %% of the tokens, s3_fifo %.1f %%, priority %.1f %% (agents %.1f %% instead "
      "of "
      "%.1f %%); documents: lru %.1f %%, s3_fifo %.1f %%, slru %.1f %%",
      lru.talk.percent(), of(rows, "s3_fifo").talk.percent(), of(rows, "priority").talk.percent(),
      of(rows, "priority").talk.agent_percent(), lru.talk.agent_percent(), lru.read.percent(),
      of(rows, "s3_fifo").read.percent(), of(rows, "slru").read.percent());
}

}  // namespace

int main(int argc, char** argv) {
  engine::command_line line("Every eviction policy on an hour of conversations and an hour of documents.",
                            "eviction_policies");
  options o;
  line.add("--scale", o.scale, "agents; there are three times as many chats", 1, 1000);
  line.add("--documents", o.documents, "read once", 0, 100000);
  line.add("--blocks", o.blocks, "of 16 tokens that the cache has", 200, 1 << 20);
  line.add("--seed", o.seed, "of the traffic");
  line.add("--json", o.common.as_json, "one JSON document on stdout, progress on stderr");
  return engine::run_example(line, argc, argv, o.common, [&](engine::report& out) { return run(o, out); });
}
