// SPDX-License-Identifier: Apache-2.0
#include "report/output_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "error.hpp"

namespace kvcache::cli {
namespace {

// What a link leads to; the path itself where there is none.
std::string behind_links(const std::string& path) {
  char* real = realpath(path.c_str(), nullptr);
  if (real == nullptr) return path;
  std::string out(real);
  std::free(real);
  return out;
}

}  // namespace

output_file::output_file(const char* field, const std::string& path)
    : field_(field), path_(path), target_(behind_links(path)), temporary_(target_ + ".XXXXXX") {
  struct stat there {};
  if (path.empty()) fail(ENOENT);
  if (stat(target_.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
    throw error(failure::cannot_run, "not_a_file", field_, path_).wanting("a new file, or one to write over");
  }
  file_ = mkstemp(temporary_.data());
  if (file_ < 0) fail(errno);
  const mode_t mask = umask(0);
  umask(mask);
  if (fchmod(file_, 0666 & ~mask) != 0) fail(errno);
}

output_file::output_file(output_file&& other) noexcept
    : field_(other.field_),
      path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      temporary_(std::move(other.temporary_)),
      file_(std::exchange(other.file_, -1)) {}

output_file::~output_file() {
  if (file_ < 0) return;
  close(file_);
  unlink(temporary_.c_str());
}

void output_file::fail(int code) {
  if (file_ >= 0) {
    close(std::exchange(file_, -1));
    unlink(temporary_.c_str());
  }
  throw error(failure::cannot_run, "cannot_write", field_, path_).wanting(std::strerror(code));
}

void output_file::finish(const std::string& content) {
  for (std::size_t at = 0; at < content.size();) {
    const ssize_t written = write(file_, content.data() + at, content.size() - at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(errno);
    at += static_cast<std::size_t>(written);
  }
  if (fsync(file_) != 0 && errno != EINVAL) fail(errno);
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
  close(std::exchange(file_, -1));
}

}  // namespace kvcache::cli
