// SPDX-License-Identifier: Apache-2.0
#pragma once

// A retention policy as one line of text, the same in all programs: kvcache/retain/parse.hpp.

#include <string>
#include <string_view>

#include "error.hpp"
#include "kvcache/retain/any_retention.hpp"

namespace engine {

/// Reads a policy (kvcache/retain/parse.hpp). Fails: bad_input "bad_policy" with the key as field; its value
/// says what was found and what is allowed.
result<kvcache::retention> parse_policy(std::string_view text);

/// The policy as text; "custom" for one that is not the library's.
std::string policy_text(const kvcache::retention& policy);

}  // namespace engine
