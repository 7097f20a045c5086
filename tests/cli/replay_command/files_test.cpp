// SPDX-License-Identifier: Apache-2.0
// Drawings and the report: well-formed, whole, needing nothing else, and there as a whole or not at all.
#include <filesystem>
#include <string>
#include <vector>

#include "program.hpp"
#include "report/output_file.hpp"
#include "report/svg.hpp"

using namespace kvcache::test;
namespace fs = std::filesystem;

namespace {

// By another parser than ours.
void check_xml(const std::string& path) {
  INFO(path);
  CHECK(
      std::system(("python3 -c 'import sys, xml.etree.ElementTree as e; e.parse(sys.argv[1])' '" + path + "'")
                      .c_str()) == 0);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(folder)) out.push_back(entry.path().filename());
  std::sort(out.begin(), out.end());
  return out;
}

// Nothing that a browser would fetch or run.
void check_alone(std::string text) {
  for (const char* declared : {"http://www.w3.org/2000/svg"}) {
    for (std::size_t at; (at = text.find(declared)) != std::string::npos;) {
      text.erase(at, std::string(declared).size());
    }
  }
  for (const char* outside :
       {"http", "src=", "href", "url(", "@import", "<script", "<link", "<img", "<iframe"}) {
    INFO(outside);
    CHECK(text.find(outside) == std::string::npos);
  }
}

}  // namespace

TEST_CASE("the report is one well-formed page that needs nothing else, the same each time") {
  const scratch folder;
  const std::string page = folder.path + "/report.html", plots = folder.path + "/a/b";
  const std::string arguments = published("mooncake_synthetic.jsonl.zst") +
                                " --policy lru,slru,ttl --ttl 60 --capacity 2048b,8192b,inf --workers 2"
                                " --route round_robin,affinity_load --model llama-3-8b --html '" +
                                page + "' --plot '" + plots + "'";
  const json d = answer(arguments);
  CHECK(d["files"] == json{plots + "/hit_rate.svg", plots + "/losses.svg", plots + "/over_time.svg",
                           plots + "/reuse_distance.svg", page});
  CHECK(names_in(plots) ==
        std::vector<std::string>{"hit_rate.svg", "losses.svg", "over_time.svg", "reuse_distance.svg"});
  CHECK(names_in(folder.path) == std::vector<std::string>{"a", "report.html"});
  check_xml(page);
  const std::string text = read_file(page);
  check_alone(text);
  for (const json& sentence : d["findings"])
    CHECK(text.find(sentence.get<std::string>()) != std::string::npos);
  for (const char* part : {"<details>", "prefers-color-scheme", "max-width:640px", "class=\"scroll\"",
                           "viewport", "kvcache replay", "belady", "vllm:prefix_cache_hits_total"}) {
    INFO(part);
    CHECK(text.find(part) != std::string::npos);
  }
  std::vector<std::string> before{text};
  for (const std::string& name : names_in(plots)) {
    check_xml(plots + "/" + name);
    check_alone(read_file(plots + "/" + name));
    before.push_back(read_file(plots + "/" + name));
  }
  answer(arguments);
  CHECK(read_file(page) == before[0]);
  CHECK(read_file(plots + "/hit_rate.svg") == before[1]);
}

TEST_CASE("traces with little in them are drawn too") {
  const scratch folder;
  const std::string page = folder.path + "/p.html";
  for (const char* content :
       {R"({"timestamp": 0, "input_length": 16, "hash_ids": [1]})",
        R"({"timestamp": 0, "tokens": [1, 2, 3]})", "{\"tokens\": [1, 2]}\n{\"tokens\": [1, 2]}\n"}) {
    const std::string trace = folder.file("t.jsonl", content);
    for (const char* options : {"", " --block 1", " --policy belady --capacity inf", " --workers 2"}) {
      const outcome o =
          run("'" + trace + "'" + options + " --html '" + page + "' --plot '" + folder.path + "'");
      INFO(content << options << o.out << o.err);
      CHECK(o.code == 0);
      check_xml(page);
      const std::string text = read_file(page);
      CHECK(text.find("nan") == std::string::npos);
      CHECK(text.find("=\"inf") == std::string::npos);
    }
  }
}

TEST_CASE("names of files may be anything") {
  const scratch folder;
  const std::string name = "<script>alert(1)</script>&\"\xff\x1b[31m\n--x";
  std::string file_name = name;
  std::replace(file_name.begin(), file_name.end(), '/', '_');
  folder.file(file_name, small_trace);
  // Through a variable, as a shell hands it over.
  const std::string page = folder.path + "/p.html", quoted = "'" + folder.path + "'/*x";
  const outcome o = run(quoted + " --html '" + page + "'");
  CHECK(o.code == 0);
  CHECK(o.out.find('\x1b') == std::string::npos);
  check_xml(page);
  CHECK(read_file(page).find("<script") == std::string::npos);
  CHECK(read_file(page).find("&lt;script&gt;alert(1)&lt;_script&gt;&amp;&quot;") != std::string::npos);
  run(quoted + " --json").document();
}

TEST_CASE("what cannot be written ends with 1, before the work and without a trace") {
  const scratch folder;
  const std::string trace = std::string("'") + folder.file("small.jsonl", small_trace) + "' ";
  check_error(trace + "--html /nonexistent/folder/r.html", 1, "--html", "/nonexistent/folder/r.html");
  check_error(trace + "--html ''", 1, "--html", "");
  check_error(trace + "--html /dev/full", 1, "--html", "/dev/full");
  check_error(trace + "--html '" + folder.path + "'", 1, "--html", folder.path);
  check_error(trace + "--plot '" + folder.path + "/small.jsonl'", 1, "--plot", "");
  check_error(trace + "--plot '" + folder.path + "/small.jsonl/x'", 1, "--plot",
              folder.path + "/small.jsonl/x");
  CHECK(names_in(folder.path) == std::vector<std::string>{"small.jsonl"});
}

TEST_CASE("a report does not take the place of the trace") {
  const scratch folder;
  const std::string trace = folder.file("small.jsonl", small_trace);
  fs::create_symlink(trace, folder.path + "/link");
  check_error("'" + trace + "' --html '" + trace + "'", 2, "--html", trace);
  check_error("'" + trace + "' --html '" + folder.path + "/link'", 2, "--html", folder.path + "/link");
  CHECK(read_file(trace) == small_trace);
}

TEST_CASE("a report does not take the place of a drawing") {
  const scratch folder;
  const std::string trace = "'" + folder.file("small.jsonl", small_trace) + "'";
  fs::create_directory_symlink(folder.path, folder.path + "/link");
  const std::string page = folder.path + "/link/losses.svg";
  check_error(trace + " --plot '" + folder.path + "' --html '" + page + "'", 2, "--html", page);
  CHECK(names_in(folder.path) == std::vector<std::string>{"link", "small.jsonl"});
  CHECK(run("small.jsonl --plot . --html page.html", folder.path).code == 0);
}

TEST_CASE("when the trace is bad an older report stays, and nothing is left beside it") {
  const scratch folder;
  const std::string bad = folder.file("bad.jsonl", "{\"timestamp\": 0,");
  const std::string page = folder.file("r.html", "older");
  check_error("'" + bad + "' --html '" + page + "'", 3, "object", "");
  CHECK(read_file(page) == "older");
  CHECK(names_in(folder.path) == std::vector<std::string>{"bad.jsonl", "r.html"});
}

TEST_CASE("an output file goes through links, and is not there before it is whole") {
  const scratch folder;
  const std::string target = folder.file("target", "older"), link = folder.path + "/link";
  fs::create_symlink(target, link);
  kvcache::cli::output_file out("--html", link);
  CHECK(read_file(target) == "older");
  // A program that is killed while it works leaves what is there now.
  CHECK(names_in(folder.path) == std::vector<std::string>{"link", "target"});
  out.finish("newer");
  CHECK(read_file(target) == "newer");
  CHECK(fs::is_symlink(link));
  CHECK(names_in(folder.path) == std::vector<std::string>{"link", "target"});
}

TEST_CASE("text for XML loses nothing that XML has") {
  using kvcache::cli::escaped;
  CHECK(escaped("a<b>&\"c") == "a&lt;b&gt;&amp;&quot;c");
  CHECK(escaped("\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80") == "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
  const std::string lost = "\xEF\xBF\xBD";
  CHECK(escaped("\xFF") == lost);
  CHECK(escaped("\x1b") == lost);
  CHECK(escaped("\xE2\x82") == lost + lost);
  CHECK(escaped("\xED\xA0\x80") == lost + lost + lost);
  CHECK(escaped("\xEF\xBF\xBF") == lost + lost + lost);
  CHECK(escaped("\xC0\x80") == lost + lost);
  CHECK(escaped("\xF4\x90\x80\x80").size() == 4 * lost.size());
}

TEST_CASE("ticks are round") {
  using kvcache::cli::round_step;
  CHECK(round_step(100, 5) == Approx(20));
  CHECK(round_step(37.4, 6) == Approx(10));
  CHECK(round_step(1, 5) == Approx(0.2));
  CHECK(round_step(0.03, 6) == Approx(0.005));
}
