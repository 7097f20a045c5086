// SPDX-License-Identifier: Apache-2.0
#pragma once

// Figures that are known for one model and one text: what `run --quick` must find again. A cache that turns
// keys by a wrong angle, keeps a token too few or mixes up heads still prints fluent text and a plausible
// table; it does not print these figures.

#include "program.hpp"

namespace lab {

/// Compares the divergences of a quick run with those that are known, where its model, text and settings are
/// the known ones; says on stderr when they are not. Fails: cannot_run "figure_differs" naming the policy.
engine::status check_known(const engine::json& report);

}  // namespace lab
