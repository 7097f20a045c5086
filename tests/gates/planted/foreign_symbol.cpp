// SPDX-License-Identifier: Apache-2.0
// Fault: exports a name outside kvcache's own, beside one that is right.
extern "C" [[gnu::visibility("default")]] int kvc_right() {
  return 0;
}
[[gnu::visibility("default")]] int helper_that_leaks() {
  return 0;
}
