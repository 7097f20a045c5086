// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the programs that need a GPU share: owners of device memory, streams, events and graphs, every call of
// the CUDA runtime checked. A failure is an exception; `on_a_gpu` turns it into a line and exit code 1.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/kvcache.h"

namespace kvcache::gpu_check {

struct gpu_failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw gpu_failure(std::string(what) + ": " + cudaGetErrorString(code));
}
inline void check(kvc_status status, const kvc_error& e, const char* what) {
  if (status == KVC_OK) return;
  throw gpu_failure(std::string(what) + ": status " + std::to_string(int(status)) + ", field " +
                    kvc_field_text(e.field) + ", value " + std::to_string(e.value) + ", CUDA " +
                    std::to_string(e.native));
}

/// Device memory; freed with its owner.
class device_memory {
 public:
  device_memory() = default;
  explicit device_memory(size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, bytes == 0 ? 1 : bytes), "cudaMalloc");
  }
  device_memory(device_memory&& b) noexcept
      : data_(std::exchange(b.data_, nullptr)), bytes_(std::exchange(b.bytes_, 0)) {}
  device_memory& operator=(device_memory&& b) noexcept {
    std::swap(data_, b.data_);
    std::swap(bytes_, b.bytes_);
    return *this;
  }
  ~device_memory() {
    if (data_ != nullptr) (void)cudaFree(data_);
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

class device_stream {
 public:
  device_stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  device_stream(const device_stream&) = delete;
  device_stream& operator=(const device_stream&) = delete;
  ~device_stream() { (void)cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  void wait() const { check(cudaStreamSynchronize(stream_), "kernel"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class device_event {
 public:
  device_event() { check(cudaEventCreateWithFlags(&event_, cudaEventDefault), "event"); }
  device_event(const device_event&) = delete;
  device_event& operator=(const device_event&) = delete;
  ~device_event() { (void)cudaEventDestroy(event_); }
  void record(const device_stream& s) const { check(cudaEventRecord(event_, s.get()), "event"); }
  /// Microseconds from `a` to this one; waits for it.
  double since(const device_event& a) const {
    float ms = 0;
    check(cudaEventSynchronize(event_), "kernel");
    check(cudaEventElapsedTime(&ms, a.event_, event_), "event");
    return double{ms} * 1000;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// n values of T on the device.
template <class T>
class device_array {
 public:
  device_array() = default;
  explicit device_array(size_t n) : memory_(n * sizeof(T)), n_(n) {}
  device_array(const std::vector<T>& from, const device_stream& s) : device_array(from.size()) {
    put(from, s);
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  size_t size() const { return n_; }
  /// Pageable memory: it has been read when this returns.
  void put(const std::vector<T>& from, const device_stream& s) const {
    if (from.size() > n_) throw gpu_failure("an array is too small for what is put there");
    check(cudaMemcpyAsync(data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice, s.get()),
          "copy to the device");
  }
  std::vector<T> get(const device_stream& s) const {
    std::vector<T> out(n_);
    check(cudaMemcpyAsync(out.data(), data(), n_ * sizeof(T), cudaMemcpyDeviceToHost, s.get()),
          "copy from the device");
    s.wait();
    return out;
  }

 private:
  device_memory memory_;
  size_t n_ = 0;
};

/// What `queue` launches, captured once and launched as often as wanted.
class device_graph {
 public:
  template <class Queue>
  device_graph(const device_stream& s, Queue&& queue) {
    check(cudaStreamBeginCapture(s.get(), cudaStreamCaptureModeThreadLocal), "capture");
    queue();
    check(cudaStreamEndCapture(s.get(), &graph_), "capture");
    check(cudaGraphInstantiate(&replay_, graph_, 0), "graph");
  }
  device_graph(const device_graph&) = delete;
  device_graph& operator=(const device_graph&) = delete;
  ~device_graph() {
    if (replay_ != nullptr) (void)cudaGraphExecDestroy(replay_);
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
  }
  void launch(const device_stream& s) const { check(cudaGraphLaunch(replay_, s.get()), "replay"); }
  /// Kernels and copies in it.
  size_t nodes() const {
    size_t n = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &n), "graph");
    return n;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

/// Runs `body` if there is a GPU; without one says so and answers 1, as after a failure.
template <class Body>
int on_a_gpu(Body&& body) {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess || devices == 0) {
    std::printf("no GPU: %s\n", code != cudaSuccess ? cudaGetErrorString(code) : "no device");
    return 1;
  }
  try {
    return body();
  } catch (const std::exception& e) {
    std::printf("failed: %s\n", e.what());
    return 1;
  }
}

}  // namespace kvcache::gpu_check
