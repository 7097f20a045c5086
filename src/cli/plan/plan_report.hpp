// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plan as a document for programs and, from the document, as text for people.

#include <string>

#include "output.hpp"
#include "plan/plan.hpp"

namespace kvcache::cli {

/// The document, schema kvcache.plan.v1 (docs/plan.md names every field).
json to_document(const plan& p);

/// The document of a plan, or of --list, for people.
std::string plan_text(const json& document);

/// The catalogue, schema kvcache.models.v1.
json catalogue_document();

}  // namespace kvcache::cli
