// SPDX-License-Identifier: Apache-2.0
// Fault: an example that cannot do its work.
int main() {
  return 1;
}
