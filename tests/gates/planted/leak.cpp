// SPDX-License-Identifier: Apache-2.0
// Fault: loses memory.
int* volatile kept;

int main() {
  kept = new int[4]{};
  kept = nullptr;
  return 0;
}
