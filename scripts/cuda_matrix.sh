#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles every kernel for every architecture and compares registers, shared memory and blocks per multiprocessor with
# cuda/resources.txt.   cuda_matrix.sh [--update]     Needs nvcc; takes minutes; runs nothing on a GPU.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build/cuda-matrix
cmake -G Ninja -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DKVCACHE_WITH_CUDA=ON -DKVCACHE_REQUIRE_NVCC=ON \
  -DKVCACHE_BUILD_TESTS=OFF -DKVCACHE_BUILD_EXAMPLES=OFF -DKVCACHE_BUILD_BENCH=OFF -DKVCACHE_BUILD_CLI=OFF >/dev/null
cmake --build "$build" --target kvcache_cuda
"$root/scripts/cuda_resources.py" "$build" "$@"
