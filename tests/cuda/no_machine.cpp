// SPDX-License-Identifier: Apache-2.0
// Where launches go to a GPU there is no machine; its settings are still set, and mean nothing.
#include "simt/backend.hpp"

namespace kvcache::simt {

backend& the_backend() {
  static backend b;
  return b;
}

}  // namespace kvcache::simt
