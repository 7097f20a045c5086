// SPDX-License-Identifier: Apache-2.0
#include "plan/source.hpp"

#include <algorithm>
#include <iterator>

#include "error.hpp"
#include "plan/catalogue.hpp"
#include "units.hpp"

namespace kvcache::cli {
namespace {

struct shape_key {
  const char* name;
  std::int32_t architecture::*member;
  std::int64_t most;
};

constexpr shape_key shape_keys[] = {
    {"layers", &architecture::layers, 4096},         {"kv_heads", &architecture::kv_heads, 1 << 16},
    {"q_heads", &architecture::q_heads, 1 << 16},    {"head_dim", &architecture::head_dim, 1 << 16},
    {"head_dim_v", &architecture::v_dim, 1 << 16},   {"window", &architecture::window, 1 << 30},
    {"full_every", &architecture::full_every, 4096}, {"latent", &architecture::latent, 1 << 16},
    {"rope", &architecture::rope_dim, 1 << 16}};

constexpr const char* shape_wanted =
    "key=number,...: layers, kv_heads, q_heads, head_dim, head_dim_v, window, full_every, latent, rope";

void read_item(std::string_view option, std::string_view item, architecture& a) {
  const std::size_t equals = item.find('=');
  const std::string_view name = item.substr(0, equals);
  const auto* key = std::find_if(std::begin(shape_keys), std::end(shape_keys),
                                 [&](const shape_key& k) { return name == k.name; });
  if (equals == std::string_view::npos || key == std::end(shape_keys)) {
    throw error(failure::usage, "unknown_key", std::string(option), std::string(item)).wanting(shape_wanted);
  }
  const std::string field = std::string(option) + " " + key->name;
  if (a.*key->member != 0) throw error(failure::usage, "given_twice", field, std::string(item));
  a.*key->member = static_cast<std::int32_t>(parse_count(field, item.substr(equals + 1), 1, key->most));
}

void need(std::string_view option, const char* key, std::int32_t value) {
  if (value == 0) {
    throw error(failure::usage, "missing_field", std::string(option) + " " + key, {}).wanting(shape_wanted);
  }
}

void exclude(std::string_view option, const char* key, std::int32_t value, const char* with) {
  if (value != 0) {
    throw error(failure::usage, "conflict", std::string(option) + " " + key, std::to_string(value))
        .wanting(std::string("not together with ") + with);
  }
}

std::string joined(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

}  // namespace

model model_of_shape(std::string_view option, std::string_view text) {
  architecture a;
  for (const std::string& item : split_list(option, text)) read_item(option, item, a);
  need(option, "layers", a.layers);
  if (a.latent != 0) {
    exclude(option, "kv_heads", a.kv_heads, "latent");
    exclude(option, "head_dim", a.head_dim, "latent");
    exclude(option, "head_dim_v", a.v_dim, "latent");
    exclude(option, "window", a.window, "latent");
  } else {
    need(option, "kv_heads", a.kv_heads);
    need(option, "head_dim", a.head_dim);
    exclude(option, "rope", a.rope_dim, "kv_heads");
  }
  if (a.window == 0) exclude(option, "full_every", a.full_every, "no window");
  if (a.kv_heads != 0 && a.q_heads % a.kv_heads != 0) {
    throw error(failure::usage, "bad_value", std::string(option) + " q_heads", std::to_string(a.q_heads))
        .wanting("a multiple of kv_heads");
  }
  model m;
  m.name = std::string(text);
  m.source = "shape";
  m.layers = layers_of(a);
  if (a.v_dim != 0) {
    for (layer& l : m.layers) l.head_dim_v = a.v_dim;
  }
  m.q_heads = a.q_heads;
  return m;
}

model model_of_name(std::string_view option, const std::string& name) {
  if (const architecture* known = find_model(name)) return model_of(*known);
  const std::vector<std::string> near = near_names(name);
  throw error(failure::usage, "unknown_model", std::string(option), name.empty() ? "empty" : name)
      .wanting(near.empty() ? "a name of `kvcache plan --list`, or --config, --gguf, --shape"
                            : joined(near) + ", or another of `kvcache plan --list`");
}

}  // namespace kvcache::cli
