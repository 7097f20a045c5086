// SPDX-License-Identifier: Apache-2.0
#pragma once
// The real model, loaded once per test program.
#include <catch2/catch.hpp>
#include <memory>

#include "program.hpp"
#include "support/environment.hpp"

namespace engine::test {

/// Fails the test if the model is not there.
inline loaded& real_model() {
  static const std::unique_ptr<loaded> parts = [] {
    common_options options;
    options.model = kvcache::test::model_path();
    options.threads = 2;
    auto made = load_model(options);
    if (!made) FAIL(describe(made.error()));
    return std::move(*made);
  }();
  return *parts;
}

}  // namespace engine::test
