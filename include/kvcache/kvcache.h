// SPDX-License-Identifier: Apache-2.0
#pragma once
// The C API, in one include. Compiles as C99, C++20 and under nvcc.
//
//   c/status.h      how calls answer                c/wire.h   structs that pass between the halves
//   c/data_plane.h  kvc_cpu_*: append, attend, run: bytes
//   c/cache.h       kvc_cache_*: create, count, plan    c/sequence.h  open, extend, fork, commit, views: ids
//
// The halves work apart: an engine with its own block manager uses kvc_cpu_* with its own tables, one with
// its own kernels uses the rest. Unstable until the packed formats have shaped it: structs may grow and calls
// may change between 0.x versions. Structs that may grow begin with their size, so that a caller built
// against another version is refused (KVC_ABI) and never misread.

#include "kvcache/c/cache.h"
#include "kvcache/c/data_plane.h"
#include "kvcache/c/sequence.h"
#include "kvcache/c/status.h"
#include "kvcache/c/wire.h"
