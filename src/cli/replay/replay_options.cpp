// SPDX-License-Identifier: Apache-2.0
#include "replay/replay_options.hpp"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>

#include "kvcache/evict/parse.hpp"
#include "plan/plan.hpp"
#include "plan/source.hpp"

namespace kvcache::cli {
namespace {

[[noreturn]] void refuse(const char* code, const char* option, const std::string& value, std::string wanted) {
  throw error(failure::usage, code, option, value.empty() ? "empty" : value).wanting(std::move(wanted));
}

void refuse_repeats(const char* option, const std::vector<std::string>& parts) {
  for (auto at = parts.begin(); at != parts.end(); ++at) {
    if (std::find(parts.begin(), at, *at) != at) refuse("repeated", option, *at, "each once");
  }
}

// A number of seconds, digits and at most one point.
double parse_seconds(const char* option, const std::string& text, double most) {
  double value = 0;
  const char* end = text.data() + text.size();
  const bool plain = text.find_first_not_of("0123456789.") == std::string::npos;
  const auto read = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  if (text.empty() || !plain || read.ec != std::errc() || read.ptr != end || !(value <= most)) {
    refuse("bad_value", option, text,
           std::string("seconds from 0 to ") + number_text(most, 0) + ", such as 60 or 0.5");
  }
  return value;
}

double parse_rate(const char* option, const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, value);
  if (text.empty() || read.ec != std::errc() || read.ptr != end || !(value > 0 && value <= 1)) {
    refuse("bad_value", option, text, "a share above 0 and up to 1, such as 0.1");
  }
  return value;
}

// The names of the papers beside ours.
std::string with_our_name(std::string text) {
  constexpr struct {
    const char *paper, *ours;
  } names[] = {{"s3-fifo", "s3_fifo"}, {"s3fifo", "s3_fifo"}, {"2q", "two_q"}};
  const std::size_t end = std::min(text.find(':'), text.size());
  for (const auto& n : names) {
    if (text.compare(0, end, n.paper) == 0) return text.replace(0, end, n.ours);
  }
  return text;
}

// Settings have commas too: what is no policy but a further setting belongs to the one before.
std::vector<std::string> split_policies(const std::string& text) {
  std::vector<std::string> out;
  for (std::string& part : split_list("--policy", text)) {
    const bool setting = part.find('=') != std::string::npos && part.find(':') == std::string::npos;
    if (setting && !out.empty() && out.back().find(':') != std::string::npos) {
      out.back() += "," + part;
    } else {
      out.push_back(with_our_name(std::move(part)));
    }
  }
  return out;
}

const policy_info& policy_of(const std::string& text) {
  const std::string name = text.substr(0, text.find(':'));
  std::string known;
  for (const policy_info& p : policies()) {
    if (name == p.name) return p;
    known += (known.empty() ? "" : ", ") + std::string(p.name);
  }
  refuse("unknown_policy", "--policy", text, known);
}

// Whether any of them takes the times of --ttl.
bool check_policies(const std::vector<std::string>& all) {
  refuse_repeats("--policy", all);
  bool timed = false;
  for (const std::string& text : all) {
    const policy_info& info = policy_of(text);
    const bool settings = text.find(':') != std::string::npos;
    timed |= info.timed && !settings;
    if (!settings) continue;
    if (info.optimum) refuse("bad_value", "--policy", text, std::string(info.name) + " without settings");
    const parsed_eviction read = parse_eviction(text);
    if (!read.ok()) {
      refuse("bad_value", "--policy", text, std::string(read.key) + ": " + std::string(read.allowed));
    }
  }
  return timed;
}

void read_policies(const CLI::App& app, const replay_arguments& o, study_request& to) {
  to.policies = split_policies(o.policies);
  const bool timed = check_policies(to.policies);
  if (app.count("--ttl") == 0) {
    if (timed)
      throw error(failure::usage, "missing", "--ttl", {}).wanting("seconds for policy ttl, such as 60,300");
    return;
  }
  const std::vector<std::string> ttls = split_list("--ttl", o.ttls);
  refuse_repeats("--ttl", ttls);
  for (const std::string& text : ttls) to.ttls.push_back(parse_seconds("--ttl", text, 1e9));
  if (!timed) refuse("conflict", "--ttl", o.ttls, "policy ttl beside it");
}

void read_routes(const CLI::App& app, const replay_arguments& o, study_request& to) {
  to.workers = static_cast<std::int32_t>(parse_count("--workers", o.workers, 1, 4096));
  const std::vector<std::string> names = split_list("--route", o.routes);
  refuse_repeats("--route", names);
  to.routes.clear();
  for (const std::string& name : names) {
    try {
      to.routes.push_back(route_of(name));
    } catch (const error&) {
      refuse("unknown_route", "--route", name, "random, round_robin, prefix_affinity, affinity_load");
    }
  }
  if (app.count("--seed") != 0) {
    to.seed = static_cast<std::uint64_t>(
        parse_count("--seed", o.seed, 0, std::numeric_limits<std::int64_t>::max()));
  } else if (to.workers > 1 &&
             std::find(to.routes.begin(), to.routes.end(), route::random) != to.routes.end()) {
    throw error(failure::usage, "missing", "--seed", {})
        .wanting("a number for --route random, so that it can be repeated");
  }
}

void read_capacities(const CLI::App& app, const replay_arguments& o, study_request& to) {
  if (app.count("--capacity") == 0) return;
  to.capacities = split_list("--capacity", o.capacities);
  refuse_repeats("--capacity", to.capacities);
  for (const std::string& text : to.capacities) {
    if (parse_capacity("--capacity", text).in == capacity::unit::bytes && app.count("--model") == 0) {
      refuse("conflict", "--capacity", text, "--model beside it: what a token takes");
    }
  }
}

void read_model(const CLI::App& app, const replay_arguments& o, study_request& to) {
  if (app.count("--model") == 0) {
    if (app.count("--kv") != 0) refuse("conflict", "--kv", o.kv, "--model beside it");
    return;
  }
  plan_request r;
  r.kv = parse_kv("--kv", o.kv);
  r.subject = model_of_name("--model", o.model);
  const plan p = make_plan(std::move(r));
  to.size = token_size{p.asked.subject.name, p.asked.kv.text, p.held.bytes_per_token};
}

void read_reading(const CLI::App& app, const replay_arguments& o, study_request& to) {
  if (app.count("--block") != 0) {
    to.reading.block_tokens = static_cast<std::int32_t>(parse_count("--block", o.block, 1, 1 << 20));
  }
  if (o.ids == "shared") {
    to.reading.ids = id_scope::shared;
  } else if (o.ids == "per_file") {
    to.reading.ids = id_scope::per_file;
  } else if (o.ids != "automatic") {
    refuse("bad_value", "--ids", o.ids, "automatic, shared or per_file");
  }
  to.reading.session_gap_us =
      static_cast<std::int64_t>(parse_seconds("--session-gap", o.session_gap, 1e6) * 1e6);
}

void read_files(const replay_arguments& o, study_request& to) {
  if (o.files.empty()) throw error(failure::usage, "missing", "FILE", {}).wanting("one trace or more");
  to.files = o.files;
  for (std::size_t i = 0; i < o.files.size(); ++i) {
    for (std::size_t k = 0; k < i; ++k) {
      std::error_code unknown;
      if (o.files[i] == o.files[k] || std::filesystem::equivalent(o.files[i], o.files[k], unknown)) {
        refuse("repeated", "FILE", o.files[i], "each file once");
      }
    }
  }
}

}  // namespace

study_request read_arguments(const CLI::App& app, const replay_arguments& o) {
  study_request to;
  read_policies(app, o, to);
  read_routes(app, o, to);
  read_capacities(app, o, to);
  read_model(app, o, to);
  read_reading(app, o, to);
  to.optimum = !o.no_optimum;
  to.curve = o.curve;
  if (app.count("--sample") != 0) {
    to.sample = parse_rate("--sample", o.sample);
    const bool used = o.curve || app.count("--plot") != 0 || app.count("--html") != 0;
    if (!used) refuse("conflict", "--sample", o.sample, "--curve, --plot or --html beside it");
  }
  read_files(o, to);
  return to;
}

}  // namespace kvcache::cli
