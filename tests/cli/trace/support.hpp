// SPDX-License-Identifier: Apache-2.0
#pragma once
// Traces from text, what is refused, and packing, for the tests of the readers.
#include <zstd.h>

#include <catch2/catch.hpp>
#include <functional>
#include <string>
#include <vector>

#include "error.hpp"
#include "support/environment.hpp"
#include "trace/read.hpp"

namespace kvcache::test {

using cli::read_options;
using cli::trace;

/// The trace that a file with this content makes.
inline trace read_text(const std::string& text, const read_options& options = {}) {
  return cli::read_trace_bytes(text, "FILE", options);
}

/// The error that `run` ends with.
inline cli::error refusal(const std::function<void()>& run) {
  try {
    run();
  } catch (const cli::error& e) {
    return e;
  }
  FAIL("nothing was refused");
  throw std::logic_error("unreachable");
}

/// Asks that a file with this content is refused, and how.
inline void check_refused(const std::string& text, const std::string& code, const std::string& field,
                          const std::string& value, std::int64_t line, const read_options& options = {}) {
  INFO(text.substr(0, 200));
  const cli::error e = refusal([&] { read_text(text, options); });
  INFO(e.what());
  CHECK(e.kind == cli::failure::bad_input);
  CHECK(e.code == code);
  CHECK(e.field == field);
  CHECK(e.value == value);
  CHECK(e.file == "FILE");
  CHECK(e.line == line);
}

inline std::vector<int> ids_of(const trace& t, std::size_t request) {
  const auto units = t.units_of(t.requests.at(request));
  return {units.begin(), units.end()};
}

/// Whether one of the notes contains these words.
inline bool notes_say(const trace& t, const std::string& words) {
  for (const std::string& note : t.notes) {
    if (note.find(words) != std::string::npos) return true;
  }
  return false;
}

/// `text` packed by zstd.
inline std::string packed(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

/// A stream of zstd, packed piece by piece, so that the whole is never in memory.
class packer {
 public:
  explicit packer(int window_log = 0) : context_(ZSTD_createCCtx()) {
    if (window_log > 0) ZSTD_CCtx_setParameter(context_, ZSTD_c_windowLog, window_log);
  }
  ~packer() { ZSTD_freeCCtx(context_); }
  packer(const packer&) = delete;
  packer& operator=(const packer&) = delete;
  void add(const std::string& text) { run(text, ZSTD_e_continue); }
  std::string finish() {
    run("", ZSTD_e_end);
    return std::move(out_);
  }

 private:
  void run(const std::string& text, ZSTD_EndDirective how) {
    ZSTD_inBuffer in{text.data(), text.size(), 0};
    std::size_t left = 1;
    char buffer[4096];
    while (in.pos < in.size || (how == ZSTD_e_end && left != 0)) {
      ZSTD_outBuffer to{buffer, sizeof buffer, 0};
      left = ZSTD_compressStream2(context_, &to, &in, how);
      REQUIRE(ZSTD_isError(left) == 0);
      out_.append(buffer, to.pos);
    }
  }
  ZSTD_CCtx* context_;
  std::string out_;
};

}  // namespace kvcache::test
