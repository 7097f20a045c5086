// SPDX-License-Identifier: Apache-2.0
#pragma once
// From the C calls' status and field to `status`. Everything in attend/ needs the compiled data plane
// (kvcache::cpu) at link time.
#include <cstdint>

#include "kvcache/core/status.hpp"
#include "kvcache/kvcache.h"

namespace kvcache {

/// The C++ form of a failed or successful kvc_cpu_* call.
inline status to_status(kvc_status s, const kvc_error& error) noexcept {
  switch (s) {
    case KVC_OK:
      return {};
    case KVC_UNSUPPORTED:
      return {errc::unsupported, kvc_field_text(error.field), error.value};
    case KVC_WORKSPACE:
      return {errc::out_of_memory, kvc_field_text(error.field), error.value};
    default:
      return {errc::bad_argument, kvc_field_text(error.field), error.value};
  }
}

}  // namespace kvcache
