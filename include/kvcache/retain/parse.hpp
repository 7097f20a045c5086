// SPDX-License-Identifier: Apache-2.0
#pragma once
// One line of text for a policy, and back:
//
//   full                                     window:256                    (a bare value: the first key)
//   snapkv:capacity=256,window=32,kernel=7   far_rms:capacity=256,budget=global,floor=1/5
//
// Wrong text is answered with where, which key, and what is allowed there.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>

#include "kvcache/core/text.hpp"
#include "kvcache/retain/any_retention.hpp"
#include "kvcache/retain/far_rms.hpp"
#include "kvcache/retain/h2o.hpp"
#include "kvcache/retain/moved_queries.hpp"
#include "kvcache/retain/policy_keys.hpp"
#include "kvcache/retain/scissorhands.hpp"
#include "kvcache/retain/sliding_window.hpp"
#include "kvcache/retain/snapkv.hpp"
#include "kvcache/retain/streaming_llm.hpp"
#include "kvcache/retain/tova.hpp"

namespace kvcache {

/// What was read, or what is wrong.
struct parsed_retention {
  retention value;         ///< meaningful if ok()
  std::string_view key;    ///< what is wrong: a policy's or key's name, as in the text; empty if nothing is
  std::string_view text;   ///< the value found there, as in the text
  char allowed[160] = {};  ///< what is allowed there, ends with 0; empty if nothing is wrong

  /// Whether the text was right.
  bool ok() const noexcept { return allowed[0] == 0; }
};

namespace detail {

inline constexpr const char* budget_words = "uniform|head|layer|global";

/// Reads budget= and floor=, which every scoring policy takes. Returns false if `key` is neither.
inline bool read_budget(std::string_view key, std::string_view value, budget_rule& to,
                        parsed_retention& out) noexcept {
  if (key == "budget") {
    const int32_t i = word_index(value, budget_words);
    if (i < 0) text_out(out.allowed).add(budget_words);
    to.scope = static_cast<budget_scope>(std::max(i, 0));
  } else if (key == "floor") {
    std::string_view rest = value;
    const bool read = read_int(cut(rest, '/'), to.floor_above) && read_int(rest, to.floor_below) &&
                      to.floor_above >= 0 && to.floor_below >= 1 && to.floor_above <= to.floor_below;
    if (!read) text_out(out.allowed).add("a fraction from 0/1 to 1/1, such as 1/5");
  } else {
    return false;
  }
  if (!out.ok()) {
    out.key = key;
    out.text = value;
  }
  return true;
}

template <class R>
constexpr auto key_table() noexcept {
  if constexpr (requires { R::keys; }) {
    return std::span<const policy_key<R>>(R::keys);
  } else {
    return std::span<const policy_key<R>>();
  }
}
template <class R>
constexpr std::string_view name_of_policy() noexcept {
  if constexpr (requires { R::name; }) {
    return R::name;
  } else {
    return "full";
  }
}

template <class R>
void read_key(const policy_key<R>& k, std::string_view value, R& to, parsed_retention& out) noexcept {
  int32_t& member = to.*k.member;
  if (k.words != nullptr) {
    member = word_index(value, k.words);
    if (member < 0) text_out(out.allowed).add(k.words);
  } else if (!read_int(value, member) || member < k.least || member > (1 << 28)) {
    text_out(out.allowed).add("a whole number from ").add(k.least).add(" on");
  }
  if (out.ok()) return;
  out.key = k.name;
  out.text = value;
}

template <class R>
void list_keys(parsed_retention& out) noexcept {
  text_out t(out.allowed);
  for (const auto& k : key_table<R>()) t.add(t.size() > 0 ? ", " : "").add(k.name);
  if constexpr (token_scorer<R>) t.add(", budget, floor");
  if (t.size() == 0) t.add("no keys");
}

/// What single keys cannot say.
template <class R>
void check_together(const R& r, parsed_retention& out) noexcept {
  if constexpr (requires { r.kernel; }) {
    if (r.kernel % 2 == 0) {
      out.key = "kernel";
      text_out(out.allowed).add("an odd number");
    }
  }
  if constexpr (requires {
                  r.capacity;
                  r.window;
                }) {
    if (r.window >= r.capacity) {
      out.key = "window";
      text_out(out.allowed).add("less than capacity, ").add(r.capacity);
    }
  }
  if constexpr (requires {
                  r.capacity;
                  r.recent;
                }) {
    int32_t safe = r.recent;
    if constexpr (requires { r.sinks; }) safe += r.sinks;
    if (safe > r.capacity) {
      out.key = "capacity";
      text_out(out.allowed).add("at least sinks and recent together, ").add(safe);
    }
  }
}

/// Reads "key=value", or a bare value if it is the first item. `given` has a bit per key that was seen.
template <class R>
void read_item(std::string_view item, bool first, R& policy, uint32_t& given,
               parsed_retention& out) noexcept {
  std::string_view value = item;
  std::string_view key = cut(value, '=');
  if (item.find('=') == std::string_view::npos) {
    value = item;
    if (first && !key_table<R>().empty()) key = key_table<R>()[0].name;
  }
  if constexpr (token_scorer<R>) {
    if (read_budget(key, value, out.value.budget, out)) return;
  }
  uint32_t bit = 1;
  for (const auto& k : key_table<R>()) {
    if (key == k.name) {
      if ((given & bit) == 0) read_key(k, value, policy, out);
      if ((given & bit) != 0) {
        out.key = k.name;
        out.text = value;
        text_out(out.allowed).add("once");
      }
      given |= bit;
      return;
    }
    bit <<= 1;
  }
  out.key = key;
  out.text = value;
  list_keys<R>(out);
}

template <class R>
void read_keys(std::string_view text, parsed_retention& out) noexcept {
  R policy{};
  uint32_t given = 0;
  bool first = true;
  for (bool more = !text.empty(); more && out.ok(); first = false) {
    more = text.find(',') != std::string_view::npos;
    read_item(cut(text, ','), first, policy, given, out);
  }
  uint32_t bit = 1;
  for (const auto& k : key_table<R>()) {
    if (out.ok() && k.required && (given & bit) == 0) {
      out.key = k.name;
      text_out(out.allowed).add("a whole number from ").add(k.least).add(" on; it has no default");
    }
    bit <<= 1;
  }
  if (out.ok()) check_together(policy, out);
  out.value.policy = policy;
}

/// Every policy of the library.
using known_policies = std::tuple<keep_all, sliding_window, streaming_llm, h2o, snapkv, tova, scissorhands,
                                  far_rms, moved_queries>;

template <class... R>
void read_policy(std::string_view name, std::string_view keys, parsed_retention& out,
                 std::tuple<R...>*) noexcept {
  const bool known = ((name == name_of_policy<R>() ? (read_keys<R>(keys, out), true) : false) || ...);
  if (known) return;
  out.key = "policy";
  out.text = name;
  text_out t(out.allowed);
  ((t.add(t.size() > 0 ? ", " : "").add(name_of_policy<R>())), ...);
}

template <class R>
bool write_policy(const retention& from, text_out& t) noexcept {
  const R* r = from.policy.get<R>();
  if (r == nullptr) return false;
  t.add(name_of_policy<R>());
  char separator = ':';
  for (const auto& k : key_table<R>()) {
    t.add({&separator, 1}).add(k.name).add("=");
    const int32_t value = r->*k.member;
    k.words != nullptr ? t.add(word_at(value, k.words)) : t.add(value);
    separator = ',';
  }
  if (from.budget.scope != budget_scope::uniform) {
    t.add(",budget=").add(word_at(static_cast<int32_t>(from.budget.scope), budget_words));
    t.add(",floor=").add(from.budget.floor_above).add("/").add(from.budget.floor_below);
  }
  return true;
}

template <class... R>
bool write_policy(const retention& from, text_out& t, std::tuple<R...>*) noexcept {
  return (write_policy<R>(from, t) || ...);
}

}  // namespace detail

/// Reads a policy. A key that is not given has its default. The result's views are into `text`.
inline parsed_retention parse_retention(std::string_view text) noexcept {
  parsed_retention out;
  std::string_view keys = text;
  const std::string_view name = detail::cut(keys, ':');
  detail::read_policy(name, keys, out, static_cast<detail::known_policies*>(nullptr));
  return out;
}

/// Writes a policy of the library with all its settings, so that reading the text gives the same again.
/// Returns how many characters that takes, the final 0 not counted; writes as many as fit, and a final 0.
/// 0 for a policy of the caller's own.
inline int32_t to_text(const retention& from, std::span<char> out) noexcept {
  detail::text_out t(out);
  return detail::write_policy(from, t, static_cast<detail::known_policies*>(nullptr))
             ? static_cast<int32_t>(t.size())
             : 0;
}

}  // namespace kvcache
