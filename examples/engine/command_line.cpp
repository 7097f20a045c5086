// SPDX-License-Identifier: Apache-2.0
#include "command_line.hpp"

#include <CLI/CLI.hpp>

namespace engine {

command_line::command_line(const std::string& about, const std::string& name)
    : app_(std::make_unique<CLI::App>(about, name)) {}
command_line::~command_line() = default;

std::string command_line::name() const {
  return app_->get_name();
}

void command_line::add(const char* option, int& value, const char* text, int least, int most) {
  app_->add_option(option, value, text)->check(CLI::Range(least, most))->capture_default_str();
}

void command_line::add(const char* option, double& value, const char* text, double least, double most) {
  app_->add_option(option, value, text)->check(CLI::Range(least, most))->capture_default_str();
}

void command_line::add(const char* option, std::uint64_t& value, const char* text) {
  app_->add_option(option, value, text)->capture_default_str();
}

void command_line::add(const char* option, std::string& value, const char* text) {
  CLI::Option* added = app_->add_option(option, value, text);
  if (!value.empty()) added->capture_default_str();
}

void command_line::add(const char* option, std::string& value, const char* text,
                       const std::vector<std::string>& among) {
  app_->add_option(option, value, text)->check(CLI::IsMember(among))->capture_default_str();
}

void command_line::add(const char* option, std::vector<std::string>& values, const char* text) {
  app_->add_option(option, values, text)->expected(static_cast<int>(values.size()))->capture_default_str();
}

void command_line::add(const char* option, bool& value, const char* text) {
  app_->add_flag(option, value, text);
}

}  // namespace engine
