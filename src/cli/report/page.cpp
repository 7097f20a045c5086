// SPDX-License-Identifier: Apache-2.0
#include "report/page.hpp"

#include <cmath>

#include "kvcache/core/config.hpp"
#include "report/plots.hpp"

namespace kvcache::cli {
namespace {

constexpr const char* page_style =
    ":root{color-scheme:light "
    "dark;--ink:#1b1f24;--soft:#59636e;--rule:#d8dee4;--paper:#ffffff;--ground:#f3f5f7;"
    "--strong:#0072b2}\n"
    "@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa4af;--rule:#3a424b;--paper:#14181d;"
    "--ground:#0c0f12;--strong:#4fa8e0}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,sans-serif}\n"
    "main{max-width:980px;margin:0 auto;padding:24px 16px 64px}\n"
    "h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}\n"
    "h2{font-size:19px;margin:0 0 8px}\n"
    "section{background:var(--paper);border:1px solid var(--rule);border-radius:8px;padding:16px "
    "20px;margin-top:16px}\n"
    "p,ul{margin:0 0 8px}ul{padding-left:20px}li{margin-bottom:6px}\n"
    ".soft,figcaption{color:var(--soft);font-size:14px}\n"
    ".facts{display:flex;flex-wrap:wrap;gap:8px 28px;margin:12px 0 0;padding:0;list-style:none}\n"
    ".facts b{display:block;font-size:20px;color:var(--strong)}\n"
    "figure{margin:0}svg{display:block;max-width:100%;height:auto}.narrow{display:none}\n"
    ".scroll{overflow-x:auto}\n"
    "table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}\n"
    "th,td{padding:5px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}\n"
    "th{vertical-align:bottom;color:var(--soft);font-weight:600}th:first-child,td:first-child{text-align:"
    "left}\n"
    "tr.beside td{font-style:italic;color:var(--soft)}\n"
    "summary{cursor:pointer;font-weight:600}dt{font-weight:600;margin-top:8px}dd{margin:0 0 4px 16px}\n"
    "code,pre{font:13px/1.5 "
    "ui-monospace,monospace}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0}\n"
    "@media (max-width:640px){main{padding:12px 8px 40px}section{padding:12px}h1{font-size:21px}"
    ".wide{display:none}.narrow{display:block}}\n"
    "@media print{body{background:none}section{break-inside:avoid}}\n";

constexpr const char* definitions =
    "<dl>\n"
    "<dt>Tokens found (token hit rate)</dt><dd>Of each request the leading blocks that are in the cache when "
    "it "
    "comes, in tokens, over the tokens of all prompts. A block behind a gap is no hit. Nothing is left out "
    "as "
    "warm-up: the first use of a block is a miss.</dd>\n"
    "<dt>Ceiling</dt><dd>What one cache without bound finds. Nothing finds more: the rest comes for the "
    "first "
    "time.</dd>\n"
    "<dt>Lost to capacity</dt><dd>The ceiling minus what one worker with all the room finds under this "
    "policy.</dd>\n"
    "<dt>Lost to routing</dt><dd>What one worker with all the room finds minus what these workers find, each "
    "with its part of the room. Below zero where the workers do better.</dd>\n"
    "<dt>The optimum (belady)</dt><dd>One worker with the same room that knows which block is used again "
    "when, "
    "and lets the one go that is needed last. No policy can know that; the difference is what a better one "
    "could "
    "gain.</dd>\n"
    "<dt>Where the curve bends</dt><dd>The point of the lru curve farthest above the straight line from its "
    "begin to its end: up to there a block more brings more than blocks do on average. What a block costs "
    "the "
    "curve does not know.</dd>\n"
    "<dt>Capacity</dt><dd>Room for cached prefixes. A serving engine has the blocks of running requests in "
    "the "
    "same memory; here there are none of them.</dd>\n"
    "<dt>What is simulated</dt><dd>Requests in the order of the trace, one at a time, each served at once; "
    "prompts only, what the model answers is not cached; block ids through the prefix tree and the "
    "eviction policies of the library.</dd>\n"
    "</dl>\n";

constexpr const char* metrics =
    "<ul>\n"
    "<li>vLLM: <code>vllm:prefix_cache_hits_total</code> / <code>vllm:prefix_cache_queries_total</code> "
    "(tokens, "
    "since the start; it counts full blocks only and computes the last token again). "
    "<code>vllm:kv_cache_usage_perc</code> counts blocks in use by running requests, not what is "
    "cached.</li>\n"
    "<li>SGLang: <code>sglang:cached_tokens_total</code> / <code>sglang:prompt_tokens_total</code>; "
    "<code>sglang:cache_hit_rate</code> is of the last batch and not comparable.</li>\n"
    "<li>TensorRT-LLM: <code>kvCacheStats.reusedBlocks</code>, <code>missedBlocks</code>, "
    "<code>cacheHitRate</code>; <code>trtllm_prompt_cached_tokens_total</code>.</li>\n"
    "<li>llm-d: <code>kv_cache_index_lookup_hits_total</code> counts lookups of its router.</li>\n"
    "</ul>\n";

std::string percent(double x, int digits = 1) {
  return number_text(x, digits) + " %";
}

std::string list(const std::vector<std::string>& sentences) {
  std::string out = "<ul>\n";
  for (const std::string& text : sentences) out += concat({"<li>", escaped(text), "</li>\n"});
  return out + "</ul>\n";
}

std::string section(const char* title, const std::string& inner) {
  return concat({"<section>\n<h2>", title, "</h2>\n", inner, "</section>\n"});
}

std::string folded(const char* title, const std::string& inner) {
  return concat({"<section>\n<details><summary>", title, "</summary>\n", inner, "</details>\n</section>\n"});
}

std::string fact(const std::string& value, const std::string& what) {
  return concat({"<li><b>", escaped(value), "</b>", escaped(what), "</li>\n"});
}

// Only what comes behind the last slash: a report is passed on.
std::string names(const study& s) {
  std::string out;
  for (const std::string& file : s.asked.files) {
    if (!out.empty()) out += ", ";
    out += file.substr(file.rfind('/') + 1);
  }
  return out;
}

std::string head(const study& s) {
  const trace_facts& f = s.source;
  std::string out = concat({"<header>\n<h1>Prefix cache replay: ", escaped(names(s)), "</h1>\n"});
  std::string what = concat({"Format ", f.format, ", blocks of ", count_text(f.block_tokens), " tokens, ",
                             count_text(std::llround(f.seconds)), " seconds"});
  if (f.sessions > 0) what += concat({", ", count_text(f.sessions), " sessions"});
  if (s.asked.workers > 1) what += concat({", ", std::to_string(s.asked.workers), " workers"});
  if (s.asked.size) {
    what += concat({", a token of ", s.asked.size->model, " in ", s.asked.size->kv, " is ",
                    bytes_text(s.asked.size->bytes)});
  }
  out += concat({"<p class=\"soft\">", escaped(what), "</p>\n<ul class=\"facts\">\n"});
  out += fact(count_text(f.requests), "requests");
  out += fact(count_text(f.tokens), "prompt tokens");
  out += fact(count_text(f.unique_blocks), concat({"different of ", count_text(f.blocks), " blocks"}));
  out += fact(percent(percent_of(s.summary.ceiling.tokens, f.tokens)), "of the tokens can be found again");
  return out + "</ul>\n</header>\n";
}

std::string figure(const plot& p) {
  return concat({"<figure>\n<div class=\"wide\">\n", p.wide, "</div>\n<div class=\"narrow\">\n", p.narrow,
                 "</div>\n<figcaption>", escaped(p.caption), "</figcaption>\n</figure>\n"});
}

// ---- the table

using cells = std::vector<std::string>;

std::string cell_row(const cells& row, const char* kind, const char* classes) {
  std::string out = concat({"<tr", classes, ">"});
  for (const std::string& text : row) out += concat({"<", kind, ">", escaped(text), "</", kind, ">"});
  return out + "</tr>\n";
}

cells titles(const study& s) {
  cells out{"policy", "blocks", "= tokens"};
  if (s.asked.size) out.push_back("= GiB");
  out.insert(out.end(),
             {"tokens found", "blocks found", "requests with a hit", "of the optimum", "lost to capacity"});
  if (s.asked.workers > 1) out.push_back("lost to routing");
  out.insert(out.end(), {"evictions", "mean resident blocks"});
  return out;
}

std::string row_title(const study& s, const study_row& row) {
  std::string out = row_name(s, row);
  if (s.asked.workers > 1 && row.result.workers == 1) out += ", one worker";
  return out;
}

cells values(const study& s, const study_row& row) {
  const replay_result& r = row.result;
  const trace_facts& f = s.source;
  const double room = static_cast<double>(r.capacity_blocks) * f.block_tokens;
  const bool bound = r.capacity_blocks >= 0;
  cells out{row_title(s, row), bound ? count_text(r.capacity_blocks) : "no bound",
            bound && room < 1e15 ? tokens_text(static_cast<std::int64_t>(room)) : ""};
  if (s.asked.size) {
    out.push_back(bound ? number_text(room * static_cast<double>(s.asked.size->bytes) / (1 << 30), 2) : "");
  }
  out.push_back(percent(percent_of(r.hit_tokens, f.tokens), 2));
  out.push_back(percent(percent_of(r.hit_blocks, f.blocks), 2));
  out.push_back(percent(percent_of(r.requests_with_hit, f.requests)));
  out.push_back(row.optimum_tokens > 0 ? percent(percent_of(r.hit_tokens, row.optimum_tokens)) : "");
  out.push_back(percent(percent_of(row.lost_to_capacity.tokens, f.tokens), 2));
  if (s.asked.workers > 1) out.push_back(percent(percent_of(row.lost_to_routing.tokens, f.tokens), 2));
  out.push_back(count_text(r.evictions));
  out.push_back(count_text(std::llround(r.mean_resident_blocks)));
  return out;
}

std::string table_of(const study& s) {
  std::string out = "<div class=\"scroll\">\n<table>\n<thead>\n";
  out += concat({cell_row(titles(s), "th", ""), "</thead>\n<tbody>\n"});
  bool beside = false;
  for (const study_row& row : s.rows) {
    out += cell_row(values(s, row), "td", row.asked ? "" : " class=\"beside\"");
    beside |= !row.asked;
  }
  out += "</tbody>\n</table>\n</div>\n";
  if (beside)
    out +=
        "<p class=\"soft\">In italics: the optimum that knows the future, one worker with all the "
        "room.</p>\n";
  return out;
}

std::string version() {
  return std::to_string(KVCACHE_VERSION_MAJOR) + "." + std::to_string(KVCACHE_VERSION_MINOR) + "." +
         std::to_string(KVCACHE_VERSION_PATCH);
}

}  // namespace

std::string page_of(const study& s) {
  std::string out =
      concat({"<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
              "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>Replay: ",
              escaped(names(s)), "</title>\n<style>\n", page_style, svg_style(),
              "</style>\n</head>\n<body>\n<main>\n", head(s)});
  out += section("What is lost where", list(s.findings));
  if (!s.advice.empty()) out += section("What to do", list(s.advice));
  for (const plot& p : plots_of(s, false)) out += section(escaped(p.title).c_str(), figure(p));
  out += section("All rows", table_of(s));
  out += folded("What the words mean", definitions);
  out += folded("Where engines count the same", metrics);
  if (!s.notes.empty()) out += section("Notes on the trace", list(s.notes));
  out += section("Made with", concat({"<pre>", escaped(s.asked.command), "</pre>\n<p class=\"soft\">kvcache ",
                                      version(), "</p>\n"}));
  return out + "</main>\n</body>\n</html>\n";
}

}  // namespace kvcache::cli
