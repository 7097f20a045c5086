#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Stands for the CUDA gates where they cannot run but have to (KVCACHE_REQUIRE_NVCC).
echo "nvcc was not found: the CUDA library and its tests are missing" >&2
exit 1
