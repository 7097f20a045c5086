// SPDX-License-Identifier: Apache-2.0
#pragma once

// One reader per file format. Each reads one file to its end and adds its requests to the trace.

#include <string_view>

#include "trace/builder.hpp"
#include "trace/scanner.hpp"

namespace kvcache::cli {

/// Reads the rest of a file into a trace. Fails: `error`.
using format_reader = void (*)(scanner&, trace_builder&);

void read_azure(scanner& in, trace_builder& out);
void read_bailian(scanner& in, trace_builder& out);
void read_kv_events(scanner& in, trace_builder& out);
void read_mooncake(scanner& in, trace_builder& out);
void read_tair(scanner& in, trace_builder& out);
void read_tokens(scanner& in, trace_builder& out);
void read_weka(scanner& in, trace_builder& out);

/// The reader for a file that begins with these bytes; nullptr if it is none of ours.
format_reader recognise(std::string_view front);

/// Reads every row of a file of JSON lines: calls read_row() with the scanner before a value, once for each
/// line that is not empty.
template <class F>
void each_row(scanner& in, F&& read_row) {
  while (!in.at_end()) {
    in.begin_row();
    read_row();
    in.end_row();
  }
}

/// Refuses a member that came before in the same object.
class seen_fields {
 public:
  /// `bit` numbers the members of one object.
  void once(scanner& in, int bit, const char* field) {
    if ((bits_ >> bit & 1u) != 0) in.fail("duplicate_field", field, "");
    bits_ |= 1u << bit;
  }
  bool has(int bit) const { return (bits_ >> bit & 1u) != 0; }

 private:
  unsigned bits_ = 0;
};

/// Reads a list of block ids into the request that is being built.
inline void read_blocks(scanner& in, trace_builder& out, const char* field) {
  const auto check = [&] {
    if (out.too_long())
      in.fail("too_long", field, "more than " + std::to_string(trace_builder::most_blocks) + " blocks");
  };
  in.ids(
      field,
      [&](std::uint32_t id) {
        out.add_small(id);
        if (out.too_long()) [[unlikely]]
          check();
      },
      [&](const scanned_id& id) {
        out.add(id);
        check();
      });
}

/// Checks that times never fall along a file.
class time_order {
 public:
  void check(scanner& in, std::int64_t line, const char* field, std::int64_t time_us) {
    if (time_us < last_) {
      in.fail_at(line, "out_of_order", field,
                 std::to_string(time_us) + " us, after " + std::to_string(last_) + " us");
    }
    last_ = time_us;
  }

 private:
  std::int64_t last_ = 0;
};

}  // namespace kvcache::cli
