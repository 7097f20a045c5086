// SPDX-License-Identifier: Apache-2.0
// No fault: shows that what stops the others is their fault and not the machine.
#include <atomic>
#include <thread>

int main() {
  std::atomic<int> sum{0};
  std::thread other([&] { ++sum; });
  ++sum;
  other.join();
  return sum == 2 ? 0 : 1;
}
