// SPDX-License-Identifier: Apache-2.0
#pragma once
// The C API, in one include. Compiles as C99, C++20 and under nvcc.
//
//   c/status.h      how calls answer                c/wire.h   structs that pass between the halves
//   c/data_plane.h  kvc_cpu_*: append, attend, run: bytes      c/cuda_plane.h  kvc_cuda_*: the same on a
//   stream c/cache.h       kvc_cache_*: create, count, plan    c/sequence.h  open, extend, fork, commit,
//   views: ids
//
// The halves work apart: an engine with its own block manager uses kvc_cpu_* with its own tables, one with
// its own kernels uses the rest.
//
// Frozen for all 0.x versions, since the packed formats have shaped them: c/wire.h, all structs and numbers
// of it, and of c/data_plane.h what goes into kvc_cpu_append, _attend, _score, _merge and _run. Fields keep
// place and meaning, and reserved ones stay zero. May still grow: the configurations and counters of
// c/cache.h and c/sequence.h, kvc_planes, the lists of fields, features and operations (at their ends), and
// calls are added. What grows begins with its size, so that a caller built against another version is refused
// (KVC_ABI) and never misread; the freeze ends with 1.0.

#include "kvcache/c/cache.h"
#include "kvcache/c/cuda_plane.h"
#include "kvcache/c/data_plane.h"
#include "kvcache/c/sequence.h"
#include "kvcache/c/status.h"
#include "kvcache/c/wire.h"
