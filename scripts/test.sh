#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything quickstart.sh does, then every test and gate. The last line is ctest's summary; the exit code is 0 only
# if every test of every configuration ran and passed.   KVCACHE_JOBS=N limits compile and test jobs.
# Without nvcc the CUDA library and its tests are left out; with KVCACHE_REQUIRE_NVCC=1 that is a failure.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
steps_total=9

# build PRESET TEXT: configures from scratch settings and builds all targets, warnings as errors.
build() {
  step "$2"
  cmake --preset "$1" "${@:3}" >/dev/null
  cmake --build "build/$1" -j "$jobs"
}

step "packages"
need_packages "${run_packages[@]}" "${test_packages[@]}"

step "model"
fetch_model
if [ -n "$(find_nvcc)" ]; then fetch_cuda_tools; fi

build release "build: release, g++" -DKVCACHE_BUILD_TESTS=ON -DKVCACHE_BUILD_EXAMPLES=ON -DKVCACHE_BUILD_BENCH=ON \
  -DKVCACHE_REQUIRE_NVCC="${KVCACHE_REQUIRE_NVCC:-OFF}"

step "main job"
main_job

build clang "build: release, clang"
build asan "build: AddressSanitizer and UndefinedBehaviorSanitizer"
build tsan "build: ThreadSanitizer, tests that start threads"

step "compile cache"
ccache --show-stats 2>/dev/null | head -n 8 || true

step "tests and gates of all four builds"
KVCACHE_JOBS=$jobs scripts/run_ctest.sh build/ctest build/release build/clang build/asan build/tsan
