// SPDX-License-Identifier: Apache-2.0
// Fault: two threads write one integer without order.
#include <thread>

int shared_value = 0;

int main() {
  std::thread other([] {
    for (int i = 0; i < 100000; ++i) shared_value = shared_value + 1;
  });
  for (int i = 0; i < 100000; ++i) shared_value = shared_value + 1;
  other.join();
  return 0;
}
