// SPDX-License-Identifier: Apache-2.0
#pragma once

// The engine's words in those of the library, and back: errors, element types, scopes.

#include <cstddef>

#include "cache_kind.hpp"
#include "kvcache/c/wire.h"
#include "kvcache/core/shape.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"
#include "kvcache/prefix/scope.hpp"

namespace engine {

error to_error(const kvcache::status& s);

/// For calls whose arguments were checked before: prints and aborts where that was not so.
void require(const kvcache::status& s);

kvcache::element element_of(kv_type type);

kvcache::scope scope_of(const cache_scope& s);

/// The value stored at `at`.
float widen(const std::byte* at, kv_type type);

/// Where the first value of a head's token lies; the others follow at the plane's dim_stride.
std::byte* cell(const kvc_plane& plane, kvcache::block_id block, int head, int offset);

}  // namespace engine
