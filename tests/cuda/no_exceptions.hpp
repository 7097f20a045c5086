// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "kvcache/kvcache.h"

namespace kvcache::test {
/// A plan made by code that is compiled without exceptions and RTTI.
kvc_status plan_without_exceptions();
/// Whether CUDA finds no driver: asked through an entry point, with arguments that launch nothing harmful.
bool has_no_driver();
}  // namespace kvcache::test
