// SPDX-License-Identifier: Apache-2.0
// Fault: compiles, with a warning.
int main() {
  int unused = 0;
  return 0;
}
