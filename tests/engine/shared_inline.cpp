// SPDX-License-Identifier: Apache-2.0
// A planted fault for check_isolation.cmake: an inline function that is emitted and could be merged with
// another.

template <class T>
__attribute__((noinline)) T shared_between_files(T x) {
  return x * x;
}

float (*use_shared)(float) = &shared_between_files<float>;
