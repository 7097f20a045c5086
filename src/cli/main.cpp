// SPDX-License-Identifier: Apache-2.0
// The `kvcache` command: what operators of inference engines ask before and after they run one. Exit codes:
// 0 answered, 1 cannot run, 2 wrong command line, 3 bad input. Under --json one document on stdout, the
// result or a kvcache.error.v1; else text on stdout or one line on stderr. Nothing of a result is printed
// before all of it is there.
#include <cstdio>
#include <cstring>
#include <new>
#include <sstream>

#include "command.hpp"
#include "kvcache/core/config.hpp"

namespace cli = kvcache::cli;

namespace {

/// Every command. A new one is a line here.
constexpr cli::command (*commands[])(CLI::App&) = {
    &cli::add_plan,
    &cli::add_replay,
};

struct common_options {
  bool as_json = false;
  bool progress = false;
};

std::string version() {
  return std::to_string(KVCACHE_VERSION_MAJOR) + "." + std::to_string(KVCACHE_VERSION_MINOR) + "." +
         std::to_string(KVCACHE_VERSION_PATCH);
}

// The parser may have given up before it came to it.
bool asks_for_json(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) return true;
  }
  return false;
}

// False if not all of it could be written.
bool print(const std::string& text) {
  return std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
}

int print_or_fail(const std::string& text) {
  if (print(text)) return 0;
  std::fprintf(stderr, "error: stdout: cannot_write\n");
  return static_cast<int>(cli::failure::cannot_run);
}

int report(const cli::error& e, bool as_json) {
  if (!as_json) {
    std::fprintf(stderr, "error: %s\n", cli::describe(e).c_str());
  } else if (!print(cli::to_text(cli::to_json(e)) + "\n")) {
    return static_cast<int>(cli::failure::cannot_run);
  }
  return static_cast<int>(e.kind);
}

// CLI11 says "--option: message" when a value is wrong.
cli::error usage_error(const std::string& message) {
  const std::size_t colon = message.find(": ");
  const bool names_option = message.rfind("--", 0) == 0 && colon != std::string::npos;
  std::string field = names_option ? message.substr(0, colon) : "arguments";
  return {cli::failure::usage, "usage", std::move(field), names_option ? message.substr(colon + 2) : message};
}

int run(const cli::command& chosen, const common_options& options) {
  try {
    cli::json document;
    {
      cli::progress meter(options.progress);
      document = chosen.run(meter);
    }
    const std::string text =
        options.as_json ? cli::to_text(document) + "\n" : cli::harmless(chosen.describe(document));
    return print_or_fail(text);
  } catch (const cli::error& e) {
    return report(e, options.as_json);
  } catch (const std::bad_alloc&) {
    return report({cli::failure::cannot_run, "out_of_memory", "memory", "exhausted"}, options.as_json);
  } catch (const std::exception& e) {
    return report({cli::failure::cannot_run, "failed", "exception", e.what()}, options.as_json);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("What an inference engine's KV cache needs, holds and hits.", "kvcache");
  common_options options;
  program.set_version_flag("--version", "kvcache " + version());
  program.require_subcommand(1);
  program.footer(
      "`kvcache COMMAND --help` describes a command. Exit codes: 0 answered, 1 cannot run,\n"
      "2 wrong command line, 3 bad input.\n");
  std::vector<cli::command> known;
  for (auto* add : commands) {
    cli::command c = add(program);
    c.app->add_flag("--json", options.as_json, "one JSON document on stdout");
    c.app->add_flag("--progress", options.progress, "say on stderr how far it is, terminal or not");
    known.push_back(std::move(c));
  }
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) {  // --help, --version
      std::ostringstream text;
      program.exit(e, text);
      return print_or_fail(text.str());
    }
    return report(usage_error(e.what()), asks_for_json(argc, argv));
  } catch (const cli::error& e) {
    return report(e, asks_for_json(argc, argv));
  }
  for (const cli::command& c : known) {
    if (c.app->parsed()) return run(c, options);
  }
  return static_cast<int>(cli::failure::usage);
}
