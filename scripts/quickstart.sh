#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a bare Debian 12 to a real model served from the paged cache, in one command. Can be run again at any time;
# what is already right is kept.   KVCACHE_JOBS=N limits the compile jobs.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
steps_total=4

step "packages"
need_packages "${run_packages[@]}"

step "model"
fetch_model

step "build (release)"
# A tree that test.sh configured stays as it is; only the programs are built here.
if [ -f build/release/CMakeCache.txt ]; then
  cmake --preset release >/dev/null
else
  cmake --preset release -DKVCACHE_BUILD_TESTS=OFF -DKVCACHE_BUILD_BENCH=OFF >/dev/null
fi
cmake --build build/release -j "$jobs" --target engine_serve engine_generate engine_score kvcache_command

step "main job"
main_job

seconds=$(($(date +%s) - started))
printf '\ndone in %02d:%02d; the programs are in %s\n' $((seconds / 60)) $((seconds % 60)) "$root/build/release/bin"
