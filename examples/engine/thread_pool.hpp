// SPDX-License-Identifier: Apache-2.0
#pragma once

// A fixed set of threads that share one indexed loop at a time. Which thread runs which index is not fixed,
// so the bodies given to it must write to places that depend on the index only; then results do not depend on
// the number of threads.

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace engine {

/// Runs loop bodies on `threads` threads, the calling one included; with 1 everything runs inline.
/// Thread safety: one caller at a time; a body must not call parallel_for.
class thread_pool {
 public:
  explicit thread_pool(int threads = 1) {
    for (int worker = 1; worker < threads; ++worker) {
      threads_.emplace_back([this, worker] { serve(worker); });
    }
  }

  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;

  ~thread_pool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  /// Number of threads, the caller's included.
  int size() const { return static_cast<int>(threads_.size()) + 1; }

  /// Calls body(index, worker) once for each index in [0, count) and returns when all are done. `worker` is
  /// in [0, size()) and never the same for two bodies that run at the same time: use it to pick scratch
  /// memory.
  template <class Body>
  void parallel_for(int count, const Body& body) {
    if (threads_.empty() || count <= 1) {
      for (int index = 0; index < count; ++index) body(index, 0);
      return;
    }
    const auto call = [](const void* erased, int index, int worker) {
      (*static_cast<const Body*>(erased))(index, worker);
    };
    run({call, &body, count});
  }

 private:
  struct loop {
    void (*call)(const void* body, int index, int worker) = nullptr;
    const void* body = nullptr;
    int count = 0;
  };

  void run(const loop& work) {
    std::unique_lock lock(mutex_);
    current_ = work;
    next_ = 0;
    unfinished_ = work.count;
    work_ready_.notify_all();
    take_indices(lock, 0);
    all_done_.wait(lock, [this] { return unfinished_ == 0; });
    current_ = {};
  }

  void serve(int worker) {
    std::unique_lock lock(mutex_);
    while (true) {
      work_ready_.wait(lock, [this] { return stopping_ || next_ < current_.count; });
      if (stopping_) return;
      take_indices(lock, worker);
    }
  }

  // Bodies are long (tens of microseconds and more), so a lock per index costs nothing that can be seen.
  void take_indices(std::unique_lock<std::mutex>& lock, int worker) {
    while (next_ < current_.count) {
      const int index = next_++;
      const loop work = current_;
      lock.unlock();
      work.call(work.body, index, worker);
      lock.lock();
      if (--unfinished_ == 0) all_done_.notify_all();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable work_ready_;
  std::condition_variable all_done_;
  loop current_;
  int next_ = 0;
  int unfinished_ = 0;
  bool stopping_ = false;
};

}  // namespace engine
