// SPDX-License-Identifier: Apache-2.0
#include "trace/read.hpp"

#include <filesystem>

#include "trace/formats.hpp"
#include "trace/msgpack.hpp"
#include "trace/source.hpp"

namespace kvcache::cli {
namespace {

/// How much of a file is looked at to tell its format.
constexpr std::size_t front_bytes = std::size_t{1} << 18;

void check_options(const read_options& options) {
  const auto refuse = [](const char* field, std::int64_t value) {
    throw error(failure::usage, "out_of_range", field, std::to_string(value));
  };
  if (options.block_tokens < 0 || options.block_tokens > 1 << 20)
    refuse("block_tokens", options.block_tokens);
  if (options.session_gap_us < 0 || options.session_gap_us > std::int64_t{1} << 40)
    refuse("session_gap_us", options.session_gap_us);
  if (options.store_gap_us < 0) refuse("store_gap_us", options.store_gap_us);
}

void read_one(std::unique_ptr<byte_source> source, trace_builder& out) {
  if (is_msgpack(peek(source, 1))) source = json_of_msgpack(std::move(source));
  const byte_source& from = *source;
  scanner in(*source);
  in.skip_byte_order_mark();
  const std::string_view front = in.ahead(front_bytes);
  if (front.empty()) throw error(failure::bad_input, "empty", "file", "", from.name());
  const format_reader reader = recognise(front);
  if (reader == nullptr) in.fail("unknown_format", "begin of file", in.excerpt());
  const std::int64_t before = out.requests();
  reader(in, out);
  if (out.requests() == before) throw error(failure::bad_input, "empty", "requests", "0", from.name());
}

std::int64_t size_of(const std::string& path) {
  std::error_code failed;
  const std::uintmax_t size = std::filesystem::file_size(path, failed);
  return failed ? 0 : static_cast<std::int64_t>(size);
}

}  // namespace

trace read_trace(std::span<const std::string> paths, const read_options& options,
                 const progress_callback& progress) {
  check_options(options);
  if (paths.empty()) throw error(failure::usage, "missing_field", "FILE", "");
  trace_builder builder(options);
  read_progress now;
  for (const std::string& path : paths) now.total += size_of(path);
  const auto on_read = [&](std::size_t bytes) {
    now.bytes += static_cast<std::int64_t>(bytes);
    now.requests = builder.requests();
    if (progress) progress(now);
  };
  for (const std::string& path : paths) {
    read_one(open_file(path, on_read), builder);
  }
  return builder.finish();
}

trace read_trace_bytes(std::span<const char> bytes, const std::string& name, const read_options& options) {
  check_options(options);
  trace_builder builder(options);
  read_one(open_bytes(bytes, name), builder);
  return builder.finish();
}

}  // namespace kvcache::cli
