// SPDX-License-Identifier: Apache-2.0
#pragma once

// Collects the requests that the readers find, gives ids their numbers, and makes one trace of all files:
// merged by time, ids numbered in order of first appearance. Also finds out how many tokens a block has where
// a file gives only lengths and numbers of blocks.

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "trace/id_table.hpp"
#include "trace/read.hpp"
#include "trace/scanner.hpp"
#include "trace/trace.hpp"

namespace kvcache::cli {

/// Which block sizes agree with all lengths and numbers of blocks seen so far, by each rule that a writer may
/// have followed.
class block_evidence {
 public:
  /// A request of `tokens` tokens in `blocks` blocks.
  void add(std::int64_t tokens, std::int64_t blocks);
  void add(const block_evidence& other);

  struct answer {
    std::int32_t tokens = 0;  ///< 0: no size agrees
    bool certain = false;     ///< no other size agrees
    std::int64_t least = 0, most = 0;
  };
  /// The size to take: `usual` where several agree and it is one of them, else the least power of two.
  answer decide(std::int32_t usual) const;
  bool any() const { return rows_ > 0; }

 private:
  struct range {
    std::int64_t least = 1, most = std::numeric_limits<std::int32_t>::max();
    void at_least(std::int64_t v) { least = v > least ? v : least; }
    void at_most(std::int64_t v) { most = v < most ? v : most; }
  };
  range up_;     // blocks = tokens / size, rounded up: the last may be partial
  range down_;   // rounded down: full blocks only
  range loose_;  // rounded down, the length itself a token too long
  std::int64_t rows_ = 0;
};

/// What a reader knows of a request beside its blocks.
struct request_facts {
  std::int64_t time_us = 0;
  std::int64_t input_tokens = -1;  ///< -1: what its blocks hold
  std::int64_t output_tokens = 0;
  std::int32_t session = -1;
  bool has_blocks = true;  ///< false: the file does not say which blocks
};

/// Makes a trace.
class trace_builder {
 public:
  /// Most blocks of one request.
  static constexpr std::int64_t most_blocks = std::int64_t{1} << 24;
  /// Most tokens that a length may be.
  static constexpr std::int64_t most_tokens = std::int64_t{1} << 40;

  explicit trace_builder(const read_options& options) : options_(options) {}

  /// A file begins. Fails: `error` if files of another format came before.
  void start_file(const scanner& from, const char* format);
  /// A session begins whose times count from its own start; `own_ids`: its ids mean nothing in others.
  void start_session(bool own_ids);
  std::int32_t current_session() const { return -1 - sessions_begun_; }
  std::int64_t session_start_us() const { return (sessions_begun_ - 1) * options_.session_gap_us; }
  const read_options& options() const { return options_; }

  /// A request begins; the blocks added from here on are its own.
  void begin() { first_ = out_.units.size(); }
  void add_small(std::uint32_t id) { add_unit(ids_.of(id)); }
  void add(const scanned_id& id) { add_unit(number_of(id)); }
  /// A block known by its content.
  void add_content(std::string_view bytes) { add_unit(ids_.of_bytes(bytes, id_table::kind::text)); }
  void add_unit(std::int32_t unit) { out_.units.push_back(unit); }
  std::int32_t number_of(const scanned_id& id);
  std::int64_t blocks_so_far() const { return static_cast<std::int64_t>(out_.units.size() - first_); }
  /// Whether the request has more blocks than is allowed.
  bool too_long() const { return blocks_so_far() > most_blocks; }
  /// The request is complete.
  void end(const request_facts& facts);
  /// Forgets the blocks added since begin().
  void cancel() { out_.units.resize(first_); }

  /// The number of a session.
  std::int32_t session_of(const scanned_id& id);
  /// Moves the requests from number `from` on to a later time.
  void shift(const scanner& in, std::int64_t from, std::int64_t by_us);

  /// The file says how many tokens a block has.
  void block_tokens_are(scanner& from, std::int64_t line, std::int32_t tokens);
  /// The size to take where nothing in the file says it, and what the note calls it.
  void assume_block_tokens(std::int32_t tokens) { assumed_ = tokens; }
  void note(std::string sentence) { out_.notes.push_back(std::move(sentence)); }

  std::int64_t requests() const { return static_cast<std::int64_t>(out_.requests.size()); }

  /// All files were read.
  trace finish();

 private:
  void forget_ids();
  std::int32_t number_in(id_table& table, const scanned_id& id);
  void decide_block_tokens();
  void check_files_agree() const;
  void merge_by_time();
  void renumber();
  void fill_lengths();
  std::int64_t repeated(std::size_t from);

  read_options options_;
  trace out_;
  id_table ids_, sessions_;
  std::size_t first_ = 0;
  std::int32_t stated_ = 0, assumed_ = 512;
  std::int32_t sessions_begun_ = 0;  // by start_session(); their numbers are -2, -3, ... until the end
  std::int64_t without_blocks_ = 0, without_length_ = 0;
  std::vector<block_evidence> evidence_;  // of each file
  std::vector<std::string> names_;
  std::vector<std::int32_t> scratch_;
};

}  // namespace kvcache::cli
