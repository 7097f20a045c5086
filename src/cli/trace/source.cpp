// SPDX-License-Identifier: Apache-2.0
#include "trace/source.hpp"

#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <vector>

#include "error.hpp"

namespace kvcache::cli {
namespace {

/// The most that a frame may ask to remember, log2 of bytes: what the zstd program accepts without --long.
constexpr int window_limit = 27;

struct file_close {
  void operator()(std::FILE* f) const { std::fclose(f); }
};

class file_source final : public byte_source {
 public:
  file_source(const std::string& path, bytes_read_callback on_read)
      : byte_source(path), file_(std::fopen(path.c_str(), "rb")), on_read_(std::move(on_read)) {
    if (file_ == nullptr) throw error(failure::bad_input, "cannot_open", "file", std::strerror(errno), path);
    std::error_code ignored;
    if (std::filesystem::is_directory(path, ignored)) {
      throw error(failure::bad_input, "not_a_file", "file", "a folder", path);
    }
    std::setvbuf(file_.get(), nullptr, _IONBF, 0);
  }
  std::size_t read(char* to, std::size_t room) override {
    const std::size_t got = std::fread(to, 1, room, file_.get());
    if (got < room && std::ferror(file_.get()) != 0) {
      throw error(failure::bad_input, "cannot_read", "file", std::strerror(errno), name());
    }
    if (on_read_) on_read_(got);
    return got;
  }

 private:
  std::unique_ptr<std::FILE, file_close> file_;
  bytes_read_callback on_read_;
};

class memory_source final : public byte_source {
 public:
  memory_source(std::span<const char> bytes, const std::string& name) : byte_source(name), left_(bytes) {}
  std::size_t read(char* to, std::size_t room) override {
    const std::size_t n = std::min(room, left_.size());
    std::copy_n(left_.data(), n, to);
    left_ = left_.subspan(n);
    return n;
  }

 private:
  std::span<const char> left_;
};

/// A source whose first bytes were already looked at.
class peeked_source final : public byte_source {
 public:
  peeked_source(std::unique_ptr<byte_source> rest, std::string front)
      : byte_source(rest->name()), rest_(std::move(rest)), front_(std::move(front)) {}
  std::size_t read(char* to, std::size_t room) override {
    const std::size_t n = std::min(room, front_.size() - at_);
    std::copy_n(front_.data() + at_, n, to);
    at_ += n;
    return n < room ? n + rest_->read(to + n, room - n) : n;
  }

 private:
  std::unique_ptr<byte_source> rest_;
  std::string front_;
  std::size_t at_ = 0;
};

struct stream_free {
  void operator()(ZSTD_DStream* s) const { ZSTD_freeDStream(s); }
};

class zstd_source final : public byte_source {
 public:
  explicit zstd_source(std::unique_ptr<byte_source> packed)
      : byte_source(packed->name()),
        packed_(std::move(packed)),
        stream_(ZSTD_createDStream()),
        buffer_(ZSTD_DStreamInSize()) {
    if (stream_ == nullptr) throw error(failure::cannot_run, "out_of_memory", "zstd", "", name());
    ZSTD_DCtx_setParameter(stream_.get(), ZSTD_d_windowLogMax, window_limit);
  }

  std::size_t read(char* to, std::size_t room) override {
    ZSTD_outBuffer out{to, room, 0};
    while (out.pos < room && !ended_) {
      if (in_.pos == in_.size && !held_back_) refill();
      if (in_.pos == in_.size && !held_back_) {
        if (open_frame_) fail(out, "truncated", "");
        ended_ = true;
        break;
      }
      unpack(out);
    }
    return out.pos;
  }

 private:
  void refill() { in_ = {buffer_.data(), packed_->read(buffer_.data(), buffer_.size()), 0}; }

  [[noreturn]] void fail(const ZSTD_outBuffer& out, const char* code, const char* what) const {
    const char* begin = static_cast<const char*>(out.dst);
    throw broken_data(error(failure::bad_input, code, "zstd data", what, name()),
                      std::count(begin, begin + out.pos, '\n'));
  }

  void unpack(ZSTD_outBuffer& out) {
    const std::size_t in_before = in_.pos, out_before = out.pos;
    const std::size_t left = ZSTD_decompressStream(stream_.get(), &out, &in_);
    if (ZSTD_isError(left) != 0) {
      if (ZSTD_getErrorCode(left) == ZSTD_error_memory_allocation) throw std::bad_alloc();
      const bool window = ZSTD_getErrorCode(left) == ZSTD_error_frameParameter_windowTooLarge;
      fail(out, window ? "window_too_large" : "damaged", ZSTD_getErrorName(left));
    }
    const bool moved = in_.pos != in_before || out.pos != out_before;
    open_frame_ = left != 0;
    // A full output may leave unpacked bytes inside the stream though it has taken all of its input.
    held_back_ = open_frame_ && out.pos == out.size && moved;
  }

  std::unique_ptr<byte_source> packed_;
  std::unique_ptr<ZSTD_DStream, stream_free> stream_;
  std::vector<char> buffer_;
  ZSTD_inBuffer in_{nullptr, 0, 0};
  bool open_frame_ = false;
  bool held_back_ = false;
  bool ended_ = false;
};

/// zstd data starts with a frame's magic number, or with that of a frame to skip.
bool is_zstd(const std::string& front) {
  if (front.size() < 4) return false;
  std::uint32_t magic = 0;
  for (int i = 3; i >= 0; --i)
    magic = magic << 8 | static_cast<unsigned char>(front[static_cast<std::size_t>(i)]);
  return magic == ZSTD_MAGICNUMBER || (magic & ZSTD_MAGIC_SKIPPABLE_MASK) == ZSTD_MAGIC_SKIPPABLE_START;
}

std::unique_ptr<byte_source> unpacked(std::unique_ptr<byte_source> raw) {
  const bool packed = is_zstd(peek(raw, 4));
  if (packed) return std::make_unique<zstd_source>(std::move(raw));
  return raw;
}

}  // namespace

std::string peek(std::unique_ptr<byte_source>& source, std::size_t count) {
  std::string front(count, '\0');
  try {
    front.resize(source->read(front.data(), front.size()));
  } catch (const broken_data& e) {
    throw e.at_line(1 + e.lines);
  }
  source = std::make_unique<peeked_source>(std::move(source), front);
  return front;
}

std::unique_ptr<byte_source> open_file(const std::string& path, bytes_read_callback on_read) {
  return unpacked(std::make_unique<file_source>(path, std::move(on_read)));
}

std::unique_ptr<byte_source> open_bytes(std::span<const char> bytes, const std::string& name) {
  return unpacked(std::make_unique<memory_source>(bytes, name));
}

}  // namespace kvcache::cli
