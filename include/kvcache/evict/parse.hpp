// SPDX-License-Identifier: Apache-2.0
#pragma once
// One line of text for an eviction policy, and back:
//
//   lru      slru      ttl:300 (a bare value: the first key)      s3_fifo:small=10,uses=2
//
// Wrong text is answered with where, which key, and what is allowed there.
#include <cstdint>
#include <iterator>
#include <span>
#include <string_view>

#include "kvcache/core/text.hpp"
#include "kvcache/evict/any_eviction.hpp"
#include "kvcache/evict/fifo.hpp"
#include "kvcache/evict/gdsf.hpp"
#include "kvcache/evict/lfu.hpp"
#include "kvcache/evict/lru.hpp"
#include "kvcache/evict/priority.hpp"
#include "kvcache/evict/s3_fifo.hpp"
#include "kvcache/evict/slru.hpp"
#include "kvcache/evict/ttl.hpp"
#include "kvcache/evict/two_q.hpp"

namespace kvcache {

/// Which policy of the library, with which settings: a value to keep and to make policies of.
struct eviction_choice {
  int32_t policy = 0;     ///< number of its name, see eviction_name; 0 = lru
  int32_t value[2] = {};  ///< its settings, in the order of their keys

  /// The same policy with the same settings.
  constexpr bool operator==(const eviction_choice&) const noexcept = default;
};

/// What was read, or what is wrong.
struct parsed_eviction {
  eviction_choice value;   ///< meaningful if ok()
  std::string_view key;    ///< what is wrong: "policy", or a key's name; empty if nothing is
  std::string_view text;   ///< the value found there, as in the text
  char allowed[160] = {};  ///< what is allowed there, ends with 0; empty if nothing is wrong

  /// Whether the text was right.
  bool ok() const noexcept { return allowed[0] == 0; }
};

namespace detail {

struct eviction_key_info {
  const char* name;  // null = no key
  int32_t usual;
  int32_t least;
  int32_t most;
};
struct eviction_info {
  const char* name;
  any_eviction (*make)(const int32_t* value) noexcept;
  eviction_key_info key[2];
};

template <class E>
any_eviction make_plain(const int32_t*) noexcept {
  return any_eviction(E{});
}

inline constexpr eviction_info known_evictions[] = {
    {"lru", &make_plain<lru>, {}},
    {"lfu", &make_plain<lfu>, {}},
    {"fifo", &make_plain<fifo>, {}},
    {"slru", &make_plain<slru>, {}},
    {"ttl",
     [](const int32_t* v) noexcept { return any_eviction(ttl(static_cast<uint64_t>(v[0]) * 1'000'000'000)); },
     {{"seconds", 300, 0, INT32_MAX}}},
    {"priority", &make_plain<priority_levels>, {}},
    {"gdsf",
     [](const int32_t* v) noexcept { return any_eviction(gdsf(v[0])); },
     {{"even", 2048, 0, 1 << 28}}},
    {"s3_fifo",
     [](const int32_t* v) noexcept { return any_eviction(s3_fifo(v[0], v[1])); },
     {{"small", 10, 1, 99}, {"uses", 2, 1, 3}}},
    {"two_q",
     [](const int32_t* v) noexcept { return any_eviction(two_q(v[0], v[1])); },
     {{"in", 25, 1, 99}, {"out", 50, 1, 1000}}},
};
inline constexpr auto known_eviction_count = static_cast<int32_t>(std::size(known_evictions));

inline void list_keys(const eviction_info& e, text_out& t) noexcept {
  for (const eviction_key_info& k : e.key) {
    if (k.name != nullptr) t.add(t.size() > 0 ? ", " : "").add(k.name);
  }
  if (t.size() == 0) t.add("no keys");
}

inline void list_range(const eviction_key_info& k, text_out& t) noexcept {
  t.add("a whole number from ").add(k.least).add(" to ").add(k.most);
}

// Reads "key=value", or a bare value if it is the first item. `given` has a bit per key that was seen.
inline void read_item(std::string_view item, bool first, const eviction_info& e, uint32_t& given,
                      parsed_eviction& out) noexcept {
  std::string_view value = item;
  std::string_view key = cut(value, '=');
  if (item.find('=') == std::string_view::npos) {
    value = item;
    if (first && e.key[0].name != nullptr) key = e.key[0].name;
  }
  text_out wrong(out.allowed);
  uint32_t bit = 1;
  for (const eviction_key_info& k : e.key) {
    if (k.name != nullptr && key == k.name) {
      int32_t& to = out.value.value[&k - e.key];
      if ((given & bit) != 0) {
        wrong.add("once");
      } else if (!read_int(value, to) || to < k.least || to > k.most) {
        list_range(k, wrong);
      }
      given |= bit;
      if (!out.ok()) out.key = k.name;
      if (!out.ok()) out.text = value;
      return;
    }
    bit <<= 1;
  }
  out.key = key;
  out.text = value;
  list_keys(e, wrong);
}

}  // namespace detail

/// Name of the i-th policy; null past the last.
constexpr const char* eviction_name(int32_t i) noexcept {
  return i >= 0 && i < detail::known_eviction_count ? detail::known_evictions[i].name : nullptr;
}

/// Reads a policy. A key that is not given has its default. The result's views are into `text`, or static.
inline parsed_eviction parse_eviction(std::string_view text) noexcept {
  parsed_eviction out;
  std::string_view keys = text;
  const std::string_view name = detail::cut(keys, ':');
  int32_t i = 0;
  while (i < detail::known_eviction_count && name != eviction_name(i)) ++i;
  if (i == detail::known_eviction_count) {
    out.key = "policy";
    out.text = name;
    detail::text_out t(out.allowed);
    for (i = 0; i < detail::known_eviction_count; ++i) t.add(i > 0 ? ", " : "").add(eviction_name(i));
    return out;
  }
  const detail::eviction_info& e = detail::known_evictions[i];
  out.value.policy = i;
  uint32_t given = 0;
  for (int32_t k = 0; k < 2; ++k) out.value.value[k] = e.key[k].name != nullptr ? e.key[k].usual : 0;
  bool first = true;
  for (bool more = keys.data() != nullptr && name.size() < text.size(); more && out.ok(); first = false) {
    more = keys.find(',') != std::string_view::npos;
    detail::read_item(detail::cut(keys, ','), first, e, given, out);
  }
  return out;
}

/// Writes a choice with all its settings, so that reading the text gives the same again. Returns how many
/// characters that takes, the final 0 not counted; writes as many as fit, and a final 0. Requires: a choice
/// that was read.
inline int32_t to_text(const eviction_choice& from, std::span<char> out) noexcept {
  detail::text_out t(out);
  const detail::eviction_info& e = detail::known_evictions[from.policy];
  t.add(e.name);
  for (int32_t k = 0; k < 2; ++k) {
    if (e.key[k].name != nullptr) t.add(k == 0 ? ":" : ",").add(e.key[k].name).add("=").add(from.value[k]);
  }
  return static_cast<int32_t>(t.size());
}

/// A policy, new and empty. It holds nothing if memory was refused. Requires: a choice that was read, or the
/// default one.
inline any_eviction make_eviction(const eviction_choice& choice) noexcept {
  return detail::known_evictions[choice.policy].make(choice.value);
}

}  // namespace kvcache
