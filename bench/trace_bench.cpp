// SPDX-License-Identifier: Apache-2.0
// Reading traces, from bytes in memory to a trace: the Claude Code trace (10.7 million blocks), the Mooncake
// conversation trace, and made-up files of the other formats. The limit is a pass over the same bytes that
// finds the ends of lines (memchr). An item is a byte of the unpacked file: the target, 3.3 ns, is 300 MB/s;
// `MB/s` says the same.
#include <zstd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

#include "support/rounds.hpp"
#include "trace/read.hpp"

namespace {

std::string bytes_of(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) throw std::runtime_error("cannot open " + path);
  std::string bytes;
  char buffer[65536];
  for (std::size_t n = 1; n > 0;) {
    n = std::fread(buffer, 1, sizeof buffer, file);
    bytes.append(buffer, n);
  }
  std::fclose(file);
  return bytes;
}

std::string unpacked(const std::string& packed) {
  std::string out, buffer(ZSTD_DStreamOutSize(), '\0');
  ZSTD_DStream* stream = ZSTD_createDStream();
  ZSTD_inBuffer in{packed.data(), packed.size(), 0};
  std::size_t left = 1;
  while (in.pos < in.size || left > 0) {
    ZSTD_outBuffer to{buffer.data(), buffer.size(), 0};
    left = ZSTD_decompressStream(stream, &to, &in);
    if (ZSTD_isError(left) != 0) throw std::runtime_error("damaged data");
    out.append(buffer, 0, to.pos);
  }
  ZSTD_freeDStream(stream);
  return out;
}

std::string data(const std::string& name) {
  return bytes_of(KVCACHE_BENCH_TRACES "/" + name);
}

/// About `megabytes` of lines, each made by `line`.
template <class F>
std::string lines(std::size_t megabytes, F line) {
  std::string out;
  std::mt19937_64 random(1);
  while (out.size() < megabytes * 1'000'000) out += line(random) + "\n";
  return out;
}

/// Hashes of 64 bits, as engines write them: 200 texts of 200 blocks.
std::string hash_line(std::mt19937_64& random, bool quoted) {
  std::string out = "{\"timestamp\":0,\"input_length\":3200,\"hash_ids\":[";
  std::mt19937_64 text(random() % 200);
  for (int i = 0; i < 200; ++i) {
    const std::string id = std::to_string(static_cast<std::int64_t>(text()));
    if (i != 0) out.push_back(',');
    if (quoted) out.push_back('"');
    out.append(id);
    if (quoted) out.push_back('"');
  }
  return out + "]}";
}

std::string token_line(std::mt19937_64& random) {
  std::string out = "{\"tokens\":[";
  std::mt19937_64 text(random() % 200);
  for (int i = 0; i < 2000; ++i) {
    if (i != 0) out.push_back(',');
    out.append(std::to_string(text() % 128000));
  }
  return out + "]}";
}

void find_lines(const std::string& text) {
  std::int64_t count = 0;
  const char* last = text.data() + text.size();
  for (const char* p = text.data(); p != nullptr && p < last; ++count) {
    p = static_cast<const char*>(std::memchr(p, '\n', static_cast<std::size_t>(last - p)));
    if (p != nullptr) ++p;
  }
  benchmark::DoNotOptimize(count);
}

void read(benchmark::State& state, const std::string& bytes, const std::string& text, bench::target aim) {
  bench::rounds work, limit;
  const auto items = static_cast<std::int64_t>(text.size());
  for (auto _ : state) {
    state.PauseTiming();
    limit.time(items, [&] { find_lines(text); });
    state.ResumeTiming();
    work.time(items,
              [&] { benchmark::DoNotOptimize(kvcache::cli::read_trace_bytes(bytes, "trace").distinct); });
  }
  bench::report(state, "ns/byte", work, limit, aim);
  state.counters["MB/s"] = 1000 / work.median();
}

const bench::target fast = bench::at_most_ns(1000.0 / 300);

void parse(benchmark::State& state, const char* name) {
  const std::string text = unpacked(data(name));
  read(state, text, text, fast);
}
void parse_zstd(benchmark::State& state, const char* name) {
  const std::string packed = data(name);
  read(state, packed, unpacked(packed), bench::no_target());
}
void parse_made(benchmark::State& state, std::string (*line)(std::mt19937_64&)) {
  const std::string text = lines(bench::quick() ? 2 : 50, line);
  read(state, text, text, bench::no_target());
}

BENCHMARK_CAPTURE(parse, weka_cc_512, "weka_cc_512.jsonl.zst")->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(parse_zstd, weka_cc_512, "weka_cc_512.jsonl.zst")->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(parse, weka_cc_64_small, "weka_cc_64_small.jsonl.zst")->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(parse, mooncake_conversation, "mooncake_conversation.jsonl.zst")
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(parse, weka_session, "weka_raw/trace_0274.json.zst")->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(parse, azure, "azure_llm_2023_code.csv.zst")->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(parse_made, hashes, [](std::mt19937_64& r) {
  return hash_line(r, false);
})->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(parse_made, text_hashes, [](std::mt19937_64& r) {
  return hash_line(r, true);
})->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(parse_made, tokens, token_line)->Unit(benchmark::kMillisecond);

}  // namespace
