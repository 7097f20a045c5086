// SPDX-License-Identifier: Apache-2.0
#pragma once

// A study as one page of HTML that needs nothing else: no script, no other file, no network. It is
// well-formed XML too, so that programs can read it. For light and dark, wide and narrow screens, and paper.

#include <string>

#include "replay/study.hpp"

namespace kvcache::cli {

/// The page. The same study gives the same bytes.
std::string page_of(const study& s);

}  // namespace kvcache::cli
