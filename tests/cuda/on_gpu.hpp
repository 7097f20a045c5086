// SPDX-License-Identifier: Apache-2.0
#pragma once
// Included before everything else of the tests of tests/simt where they are compiled to run on a GPU: every
// call is followed by a wait, so that results can be read.
#include "kvcache/kvcache.h"

namespace kvcache::simt {
/// Waits for the device; what the kernels did wrong becomes the status.
kvc_status waited(kvc_status status);
}  // namespace kvcache::simt

#define kvc_cuda_append(...) kvcache::simt::waited(kvc_cuda_append(__VA_ARGS__))
#define kvc_cuda_attend(...) kvcache::simt::waited(kvc_cuda_attend(__VA_ARGS__))
#define kvc_cuda_merge(...) kvcache::simt::waited(kvc_cuda_merge(__VA_ARGS__))
#define kvc_cuda_rope(...) kvcache::simt::waited(kvc_cuda_rope(__VA_ARGS__))
#define kvc_cuda_run(...) kvcache::simt::waited(kvc_cuda_run(__VA_ARGS__))
#define kvc_cuda_unpack(...) kvcache::simt::waited(kvc_cuda_unpack(__VA_ARGS__))
