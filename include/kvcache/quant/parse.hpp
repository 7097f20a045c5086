// SPDX-License-Identifier: Apache-2.0
#pragma once
// One line of text for a format, and back:
//
//   f16                     kv4                         (a preset: presets.hpp)
//   int4                    kv4:residual=32,exempt=sinks
//   k8v4                    int4:k=channel,v=token,group=32,residual=32,exempt=sinks
//   k=int8,v=int4           k=int8/channel,v=e4m3/token,group=0/64,symmetric=v,hadamard=both
//
//   k, v        code, axis or code/axis: f16 (as in an open block, whatever its type), int8 ... int2, fp8
//               (= e4m3), e5m2; tensor, head, token, channel. A code of another kind comes with its axis:
//               integers K per channel and V per token, small floats per token
//   group       values that share a scale, a multiple of 8; 0 = all
//   clip        none, middle, two_sided                     group and clip: for both, or K's/V's
//   symmetric   none, k, v, both
//   hadamard    none, k, v, both
//   residual    newest tokens that are read exactly
//   rope        after: K is packed as it is given; before: K is packed before its rotation by position, and
//               rotated at every read
//   dot         float, or integer: scores of packed keys are integer dot products
//   exempt      first tokens that stay exact: none, sinks (= 4), or 0, 1, 2, 4
//
// Wrong text is answered with where, which key, and what is allowed there.
#include <cstdint>
#include <span>
#include <string_view>

#include "kvcache/core/text.hpp"
#include "kvcache/quant/format.hpp"
#include "kvcache/quant/presets.hpp"

namespace kvcache {

/// What was read, or what is wrong.
struct parsed_format {
  kv_format value{};       ///< meaningful if ok()
  std::string_view key;    ///< what is wrong: a key's name, as in the text, or "format"; empty if nothing is
  std::string_view text;   ///< the value found there, as in the text
  char allowed[160] = {};  ///< what is allowed there, ends with 0; empty if nothing is wrong

  /// Whether the text was right.
  bool ok() const noexcept { return allowed[0] == 0; }
};

namespace detail {

inline constexpr const char* code_words = "f16|e4m3|e5m2|int8|int6|int5|int4|int3|int2";
inline constexpr const char* axis_words = "tensor|head|token|channel";
inline constexpr const char* clip_words = "none|middle|two_sided";
inline constexpr const char* side_words = "none|k|v|both";
inline constexpr const char* format_keys = "k|v|group|symmetric|clip|hadamard|residual|exempt|rope|dot";
enum format_key : int32_t {
  key_k,
  key_v,
  key_group,
  key_symmetric,
  key_clip,
  key_hadamard,
  key_residual,
  key_exempt,
  key_rope,
  key_dot
};

constexpr bool is_integer(code c) noexcept {
  return c >= code::int8;
}
constexpr bool read_code_word(std::string_view word, code& out) noexcept {
  if (word == "fp8") word = "e4m3";
  const int32_t i = word_index(word, code_words);
  if (i >= 0) out = static_cast<code>(i == 0 ? 0 : i + 2);
  return i >= 0;
}
constexpr std::string_view code_word(code c) noexcept {
  return word_at(c == code::exact ? 0 : static_cast<int32_t>(c) - 2, code_words);
}

/// Gives a side other codes, and the axis of their kind if that is another.
constexpr void set_codes(side_format& side, code c, bool keys) noexcept {
  const bool same_kind = is_integer(side.codes) == is_integer(c) && is_fp8(side.codes) == is_fp8(c);
  if (!same_kind) side.axis = keys && is_integer(c) ? scale_axis::channel : scale_axis::token;
  side.codes = c;
}

constexpr bool read_side(std::string_view value, bool keys, side_format& side) noexcept {
  const bool both = value.find('/') != std::string_view::npos;
  const std::string_view head = cut(value, '/');
  code c{};
  const bool is_code = read_code_word(head, c);
  if (is_code) set_codes(side, c, keys);
  if (is_code && !both) return true;
  const int32_t axis = word_index(both ? value : head, axis_words);
  if (axis < 0 || is_code != both) return false;
  side.axis = static_cast<scale_axis>(axis);
  return true;
}

/// Calls read(text, side) for K and V: with the halves of "a/b", or with the same text.
template <class F>
bool read_pair(std::string_view value, kv_format& to, F read) noexcept {
  const bool two = value.find('/') != std::string_view::npos;
  const std::string_view k = cut(value, '/');
  return read(k, to.k) && read(two ? value : k, to.v);
}

inline bool read_group(std::string_view value, side_format& side) noexcept {
  return read_int(value, side.group_size) && side.group_size >= 0 && side.group_size <= 1 << 20 &&
         side.group_size % 8 == 0;
}
inline bool read_clip(std::string_view value, side_format& side) noexcept {
  const int32_t i = word_index(value, clip_words);
  side.clip = static_cast<clip_search>(i < 0 ? 0 : i);
  return i >= 0;
}
inline bool read_flags(std::string_view value, kv_format& to, bool side_format::*member) noexcept {
  const int32_t i = word_index(value, side_words);
  to.k.*member = (i & 1) != 0;
  to.v.*member = (i & 2) != 0;
  return i >= 0;
}
inline bool read_exempt(std::string_view value, int32_t& out) noexcept {
  if (value == "none" || value == "sinks") {
    out = value == "none" ? 0 : 4;
    return true;
  }
  return read_int(value, out) && (out == 0 || out == 1 || out == 2 || out == 4);
}

/// Reads one key's value; returns what is allowed if it is wrong, null if it is right.
inline const char* read_format_key(int32_t key, std::string_view value, kv_format& to) noexcept {
  constexpr const char* side =
      "f16|int8|int6|int5|int4|int3|int2|fp8|e4m3|e5m2, tensor|head|token|channel, or both as int4/channel";
  switch (key) {
    case key_k:
      return read_side(value, true, to.k) ? nullptr : side;
    case key_v:
      return read_side(value, false, to.v) ? nullptr : side;
    case key_group:
      return read_pair(value, to, read_group) ? nullptr : "a multiple of 8, 0 = all; or K's/V's";
    case key_symmetric:
      return read_flags(value, to, &side_format::symmetric) ? nullptr : side_words;
    case key_clip:
      return read_pair(value, to, read_clip) ? nullptr : "none|middle|two_sided; or K's/V's";
    case key_hadamard:
      return read_flags(value, to, &side_format::hadamard) ? nullptr : side_words;
    case key_residual:
      return read_int(value, to.residual) && to.residual >= 0 && to.residual <= 1 << 28
                 ? nullptr
                 : "a whole number from 0 on";
    case key_rope:
      to.k_before_rope = value == "before";
      return value == "before" || value == "after" ? nullptr : "before|after";
    case key_dot:
      to.integer_dot = value == "integer";
      return value == "integer" || value == "float" ? nullptr : "integer|float";
    default:
      return read_exempt(value, to.exempt) ? nullptr : "none, sinks (4 tokens), 0, 1, 2 or 4";
  }
}

inline void refuse(parsed_format& out, std::string_view key, std::string_view text,
                   std::string_view allowed) noexcept {
  out.key = key;
  out.text = text;
  text_out(out.allowed).add(allowed);
}

/// Reads "key=value". `given` has a bit per key that was seen.
inline void read_format_item(std::string_view item, uint32_t& given, parsed_format& out) noexcept {
  std::string_view value = item;
  const std::string_view key = cut(value, '=');
  const int32_t i = word_index(key, format_keys);
  if (i < 0 || key.empty()) {
    refuse(out, key, value, "k, v, group, symmetric, clip, hadamard, residual, exempt, rope, dot");
  } else if ((given & (1u << i)) != 0) {
    refuse(out, key, value, "once");
  } else if (const char* allowed = read_format_key(i, value, out.value)) {
    refuse(out, key, value, allowed);
  }
  if (out.ok()) given |= 1u << i;
}

/// "k8v4": bits of K and of V.
constexpr bool read_bits(std::string_view name, kv_format& to) noexcept {
  constexpr const char* widths = "16|8|6|5|4|3|2";
  const size_t v = name.find('v');
  if (name.empty() || name[0] != 'k' || v == std::string_view::npos) return false;
  const int32_t k_bits = word_index(name.substr(1, v - 1), widths);
  const int32_t v_bits = word_index(name.substr(v + 1), widths);
  if (k_bits < 0 || v_bits < 0) return false;
  const auto code_at = [](int32_t i) { return static_cast<code>(i == 0 ? 0 : i + 4); };
  set_codes(to.k, code_at(k_bits), true);
  set_codes(to.v, code_at(v_bits), false);
  return true;
}

/// Reads what stands before the keys.
constexpr bool read_format_name(std::string_view name, kv_format& to) noexcept {
  if (const format_preset* p = find_preset(name)) {
    to = p->format;
    return true;
  }
  code c{};
  if (!read_code_word(name, c)) return read_bits(name, to);
  set_codes(to.k, c, true);
  set_codes(to.v, c, false);
  return true;
}

/// What single keys cannot say: settings that a side's codes do not have are refused if the text gave them,
/// dropped if a preset did.
inline void settle_side(bool keys, side_format& side, uint32_t given, parsed_format& out) noexcept {
  if (is_integer(side.codes)) return;
  if (side.codes == code::exact && side.axis != scale_axis::token) {
    refuse(out, keys ? "k" : "v", word_at(static_cast<int32_t>(side.axis), axis_words),
           "codes with a scale, as in int4/channel; f16 has none");
    return;
  }
  const bool symmetric = side.symmetric && (given & 1u << key_symmetric) != 0;
  const bool clip = side.clip != clip_search::none && (given & 1u << key_clip) != 0;
  if (symmetric || clip) {
    refuse(out, symmetric ? "symmetric" : "clip", code_word(side.codes), "int8 to int2 only");
    return;
  }
  side = {side.codes, side.axis, side.group_size, false, clip_search::none, side.hadamard};
  if (side.codes == code::exact) side = {.hadamard = side.hadamard};
}

inline void write_side(const side_format& side, bool codes, text_out& t) noexcept {
  if (codes) t.add(code_word(side.codes));
  if (side.codes == code::exact) return;
  if (codes) t.add("/");
  t.add(word_at(static_cast<int32_t>(side.axis), axis_words));
}

/// Writes ",key=" and the value for both, or K's/V's. The first key after a name follows a colon.
template <class F>
void write_pair(const char* key, bool same, char& separator, text_out& t, F write) noexcept {
  t.add({&separator, 1}).add(key).add("=");
  write(true);
  if (!same) {
    t.add("/");
    write(false);
  }
  separator = ',';
}

inline void write_settings(const kv_format& f, char separator, text_out& t) noexcept {
  if (f.k.group_size != 0 || f.v.group_size != 0) {
    write_pair("group", f.k.group_size == f.v.group_size, separator, t,
               [&](bool k) { t.add(k ? f.k.group_size : f.v.group_size); });
  }
  const auto flags = [&](const char* key, bool k, bool v) {
    if (!k && !v) return;
    write_pair(key, true, separator, t, [&](bool) { t.add(word_at(k + 2 * v, side_words)); });
  };
  flags("symmetric", f.k.symmetric, f.v.symmetric);
  if (f.k.clip != clip_search::none || f.v.clip != clip_search::none) {
    write_pair("clip", f.k.clip == f.v.clip, separator, t,
               [&](bool k) { t.add(word_at(static_cast<int32_t>(k ? f.k.clip : f.v.clip), clip_words)); });
  }
  flags("hadamard", f.k.hadamard, f.v.hadamard);
  if (f.residual != 0) write_pair("residual", true, separator, t, [&](bool) { t.add(f.residual); });
  if (f.exempt != 0) write_pair("exempt", true, separator, t, [&](bool) { t.add(f.exempt); });
  if (f.k_before_rope) write_pair("rope", true, separator, t, [&](bool) { t.add("before"); });
  if (f.integer_dot) write_pair("dot", true, separator, t, [&](bool) { t.add("integer"); });
}

}  // namespace detail

/// Reads a format. A key that is not given has the name's default; a side that is not named is f16. Whether
/// the format suits a shape, validate says. The result's views are into `text` or static.
inline parsed_format parse_format(std::string_view text) noexcept {
  parsed_format out;
  std::string_view items = text;
  std::string_view name = text.substr(0, text.find_first_of(":,"));
  if (name.find('=') == std::string_view::npos) {
    name = detail::cut(items, ':');
    if (!detail::read_format_name(name, out.value)) {
      detail::refuse(out, "format", name,
                     "f16, int8 (6, 5, 4, 3, 2), fp8, e4m3, e5m2, k8v4 and the like, kv8 (6, 5, 4, 3, 2), or "
                     "k=..., v=...");
    }
  }
  uint32_t given = 0;
  for (bool more = !items.empty(); more && out.ok();) {
    more = items.find(',') != std::string_view::npos;
    detail::read_format_item(detail::cut(items, ','), given, out);
  }
  if (out.ok()) detail::settle_side(true, out.value.k, given, out);
  if (out.ok()) detail::settle_side(false, out.value.v, given, out);
  return out;
}

/// Writes a format with all its settings, so that reading the text gives the same again. Returns how many
/// characters that takes, the final 0 not counted; writes as many as fit, and a final 0.
inline int32_t to_text(const kv_format& f, std::span<char> out) noexcept {
  detail::text_out t(out);
  const bool same = f.k.codes == f.v.codes;
  if (same) t.add(detail::code_word(f.k.codes));
  char separator = same ? ':' : ',';
  if (!same || f.k.codes != code::exact) {
    t.add(same ? ":k=" : "k=");
    detail::write_side(f.k, !same, t);
    t.add(",v=");
    detail::write_side(f.v, !same, t);
    separator = ',';
  }
  detail::write_settings(f, separator, t);
  return static_cast<int32_t>(t.size());
}

}  // namespace kvcache
