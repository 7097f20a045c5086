// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the small programs of this folder share: a line per fact, and an exit code that counts the wrong ones.
#include <cstdio>

inline int wrong = 0;

inline void expect(bool fact, const char* text) {
  std::printf("%-72s %s\n", text, fact ? "yes" : "NO");
  wrong += !fact;
}
