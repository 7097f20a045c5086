// SPDX-License-Identifier: Apache-2.0
// The part core by itself: errors as values, shapes in bytes, 16-bit numbers. Regions are shown in
// docs/core.md.
#include "expect.hpp"
#include "kvcache/core/config.hpp"
#include "kvcache/core/numeric.hpp"
#include "kvcache/core/shape.hpp"
#include "kvcache/core/status.hpp"
#include "kvcache/core/units.hpp"

namespace kvc = kvcache;

namespace {

// [errors]
kvc::result<int32_t> half(int32_t n) {
  if (n % 2 != 0) return {kvc::errc::bad_argument, "n", n};  // why, which field, what it was
  return n / 2;
}
// [errors]

void show_errors() {
  expect(bool(half(8)) && *half(8) == 4, "a result that is true holds a value");
  const kvc::status s = half(7).error();
  expect(!s && s.code == kvc::errc::bad_argument && s.value == 7,
         "one that is false says which field was what");
}

void show_shapes() {
  // [shapes]
  constexpr kvc::group_shape llama{
      .layers = 32, .kv_heads = 8, .head_dim_k = 128, .head_dim_v = 128, .type = kvc::element::f16};
  static_assert(kvc::bytes_per_token(llama) == kvc::kibibytes(128));
  static_assert(kvc::block_bytes(llama, 16) == kvc::mebibytes(2));
  static_assert(kvc::validate(llama, 24).code == kvc::errc::bad_argument);  // not a power of two
  // [shapes]
  expect(kvc::layout_fingerprint(llama, 16, {}) != kvc::layout_fingerprint(llama, 32, {}),
         "blocks of another size have another fingerprint");
}

void show_numbers() {
  expect(kvc::to_float(kvc::to_f16(0.1f)) == 0.0999755859375f, "0.1 is rounded to the nearest f16");
  expect(kvc::to_float(kvc::to_bf16(0.1f)) == 0.10009765625f, "and to the nearest bf16");
}

// [contract]
void quiet(const char* /*what*/, const char* /*file*/, int /*line*/) noexcept {}

void show_contracts() {
  const kvc::violation_handler before = kvc::set_violation_handler(&quiet);  // a debug build would trap
  const uint64_t seen = kvc::contract_violations();
  const bool held = KVCACHE_CONTRACT(1 + 1 == 3);
  expect(!held && kvc::contract_violations() == seen + 1, "a broken contract is refused and counted");
  kvc::set_violation_handler(before);
}
// [contract]

}  // namespace

int main() {
  show_errors();
  show_shapes();
  show_numbers();
  show_contracts();
  return wrong;
}
