// SPDX-License-Identifier: Apache-2.0
#include "report/output_file.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "error.hpp"

namespace kvcache::cli {
namespace {

// What a path leads to, links followed; the path itself where there is no such file or folder.
std::string followed(const std::string& path) {
  char* real = realpath(path.c_str(), nullptr);
  if (real == nullptr) return path;
  std::string out(real);
  std::free(real);
  return out;
}

// The same for a file that need not be there yet.
std::string behind_links(const std::string& path) {
  std::string file = followed(path);
  if (file != path) return file;
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return followed(".") + "/" + path;
  return followed(path.substr(0, slash + 1)) + path.substr(slash);
}

// Ctrl-C and the like wait while one of these lives, so that no half-written file is left beside its place.
class undisturbed {
 public:
  undisturbed() {
    sigset_t ends;
    sigemptyset(&ends);
    for (const int s : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) sigaddset(&ends, s);
    pthread_sigmask(SIG_BLOCK, &ends, &before_);
  }
  undisturbed(const undisturbed&) = delete;
  undisturbed& operator=(const undisturbed&) = delete;
  ~undisturbed() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

output_file::output_file(const char* field, const std::string& path)
    : field_(field), path_(path), target_(behind_links(path)) {
  struct stat there {};
  if (path.empty()) fail(ENOENT);
  if (stat(target_.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
    throw error(failure::cannot_run, "not_a_file", field_, path_).wanting("a new file, or one to write over");
  }
  temporary probe = open();
  probe.remove();
}

output_file::temporary output_file::open() const {
  temporary t{target_ + ".XXXXXX"};
  t.file = mkstemp(t.name.data());
  if (t.file < 0) fail(errno);
  const mode_t mask = umask(0);
  umask(mask);
  if (fchmod(t.file, 0666 & ~mask) != 0) fail(t, errno);
  return t;
}

void output_file::temporary::remove() const {
  close(file);
  unlink(name.c_str());
}

void output_file::fail(int code) const {
  throw error(failure::cannot_run, "cannot_write", field_, path_).wanting(std::strerror(code));
}

void output_file::fail(const temporary& t, int code) const {
  t.remove();
  fail(code);
}

void output_file::finish(const std::string& content) const {
  const undisturbed until_it_is_in_place;
  const temporary t = open();
  for (std::size_t at = 0; at < content.size();) {
    const ssize_t written = write(t.file, content.data() + at, content.size() - at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(t, errno);
    at += static_cast<std::size_t>(written);
  }
  if (fsync(t.file) != 0 && errno != EINVAL) fail(t, errno);
  if (std::rename(t.name.c_str(), target_.c_str()) != 0) fail(t, errno);
  close(t.file);
}

}  // namespace kvcache::cli
