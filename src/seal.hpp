// SPDX-License-Identifier: Apache-2.0
#pragma once
// Packing a full block: KVC_OP_SEAL of a layer whose planes hold codes.
#include "kvcache/kvcache.h"

namespace kvcache::detail {

/// Whether K or V of sealed blocks are codes.
bool packs(const kvc_kv& kv) noexcept;

/// Every value of open block c.src that would become a code is finite and within f16's range. Fails:
/// KVC_BAD_ARGUMENT with KVC_FIELD_VALUE, the flat index of the value in its head as value and `at` as index.
kvc_status check_seal(const kvc_kv& kv, const kvc_command& c, int64_t at, kvc_error* error) noexcept;

/// The first channel of a slot in the open space that could not be packed, -1 if all can or none is to be.
int32_t find_unpackable(const kvc_kv& kv, bool keys, int32_t id, int32_t head, int32_t slot) noexcept;

/// Packs open block c.src into block c.dst; the first c.arg slots are left out of all ranges. K or V that are
/// no codes are not touched. Requires: checked.
void seal_codes(const kvc_kv& kv, const kvc_command& c) noexcept;

/// Copies codes and scales of block c.src to block c.dst; K or V that are no codes are not touched.
void copy_codes(const kvc_kv& kv, const kvc_command& c) noexcept;

}  // namespace kvcache::detail
