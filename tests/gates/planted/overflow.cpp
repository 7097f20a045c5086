// SPDX-License-Identifier: Apache-2.0
// Fault: signed overflow, undefined but harmless on this machine.
int main() {
  volatile int big = 0x7fffffff;
  volatile int sum = big + 1;
  return sum == 0;
}
