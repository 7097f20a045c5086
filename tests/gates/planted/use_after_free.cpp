// SPDX-License-Identifier: Apache-2.0
// Fault: reads memory it has given back.
int main() {
  volatile int* p = new int[4]{};
  delete[] p;
  return p[1];
}
