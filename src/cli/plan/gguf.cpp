// SPDX-License-Identifier: Apache-2.0
// The header of a GGUF file: magic, version, counts | keys | tensor table. Nothing in it is trusted: every
// count and length is compared with the bytes that are left before it is used. Of the keys only numbers,
// short texts and arrays of a number per layer are kept; a vocabulary is stepped over.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <map>
#include <memory>

#include "error.hpp"
#include "plan/source.hpp"

namespace kvcache::cli {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the reader copies little-endian values as they are");

enum value_type : std::uint32_t {
  type_u8,
  type_i8,
  type_u16,
  type_i16,
  type_u32,
  type_i32,
  type_f32,
  type_bool,
  type_string,
  type_array,
  type_u64,
  type_i64,
  type_f64,
  type_end
};

// Bytes of a scalar; 0 for strings, arrays and what is unknown.
constexpr std::uint64_t scalar_bytes(std::uint32_t type) {
  constexpr std::uint8_t bytes[type_end] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return type < type_end ? bytes[type] : 0;
}

constexpr std::uint64_t longest_name = 1 << 16;
constexpr std::uint64_t longest_text = 256;  ///< kept of a text
constexpr std::uint64_t most_kept = 4096;    ///< elements kept of an array: one per layer
constexpr std::uint64_t smallest_key = 8 + 1 + 4 + 1;
constexpr std::uint64_t smallest_tensor = 8 + 1 + 4 + 8 + 4 + 8;

// Elements and bytes of a block of each tensor type.
struct block_size {
  std::uint32_t type;
  std::uint16_t elements;
  std::uint16_t bytes;
};
constexpr block_size block_sizes[] = {
    {0, 1, 4},      {1, 1, 2},      {2, 32, 18},   {3, 32, 20},    {6, 32, 22},    {7, 32, 24},
    {8, 32, 34},    {9, 32, 36},    {10, 256, 84}, {11, 256, 110}, {12, 256, 144}, {13, 256, 176},
    {14, 256, 210}, {15, 256, 292}, {16, 256, 66}, {17, 256, 74},  {18, 256, 98},  {19, 256, 50},
    {20, 32, 18},   {21, 256, 110}, {22, 256, 82}, {23, 256, 136}, {24, 1, 1},     {25, 1, 2},
    {26, 1, 4},     {27, 1, 8},     {28, 1, 8},    {29, 256, 56},  {30, 1, 2},     {34, 256, 54},
    {35, 256, 66},  {39, 32, 17},
};

/// What is kept of a key's value.
struct kept {
  std::uint32_t type = 0;  ///< of the value, or of an array's elements
  bool array = false;
  std::uint64_t count = 1;            ///< elements
  std::vector<std::int64_t> numbers;  ///< integers and bools; empty for others and long arrays
  std::string text;
};

template <class T>
T load(const std::byte* from) {
  T out;
  std::memcpy(&out, from, sizeof(T));
  return out;
}

/// Walks the header once; each step names the field that it reads.
class header {
 public:
  header(std::span<const std::byte> bytes, const std::string& file) : bytes_(bytes), file_(file) {}

  void read() {
    preamble();
    for (std::uint64_t i = 0; i < key_count_; ++i) key(i);
    for (std::uint64_t i = 0; i < tensor_count_; ++i) tensor(i);
  }

  [[noreturn]] void fail(const char* code, std::string field, std::string value) const {
    throw error(failure::bad_input, code, std::move(field), std::move(value), file_);
  }

  const kept* find(const std::string& name) const {
    const auto at = keys_.find(name);
    return at == keys_.end() ? nullptr : &at->second;
  }

  std::int64_t parameters() const { return elements_; }
  std::int64_t expert_parameters() const { return expert_elements_; }
  /// 0 if a tensor has a type that is not known.
  std::int64_t weight_bytes() const { return unknown_type_ ? 0 : weight_bytes_; }
  bool unknown_type() const { return unknown_type_; }

 private:
  std::uint64_t left() const { return bytes_.size() - at_; }

  [[noreturn]] void truncated(const std::string& field) const {
    fail("truncated", field, "the file ends at byte " + std::to_string(bytes_.size()));
  }

  template <class T>
  T take(const std::string& field) {
    if (left() < sizeof(T)) truncated(field);
    const T out = load<T>(bytes_.data() + at_);
    at_ += sizeof(T);
    return out;
  }

  std::string_view take_text(const std::string& field, std::uint64_t limit) {
    const auto length = take<std::uint64_t>(field + ".length");
    if (length > left()) fail("truncated", field + ".length", std::to_string(length));
    if (length > limit) fail("bad_value", field + ".length", std::to_string(length));
    const std::string_view out(reinterpret_cast<const char*>(bytes_.data() + at_), length);
    at_ += length;
    return out;
  }

  std::string take_name(const std::string& field) {
    const std::string_view name = take_text(field, longest_name);
    if (name.empty()) fail("bad_value", field, "empty");
    return std::string(name);
  }

  void preamble() {
    if (left() < 4) truncated("magic");
    if (std::memcmp(bytes_.data(), "GGUF", 4) != 0) {
      fail("bad_magic", "magic", std::to_string(load<std::uint32_t>(bytes_.data())));
    }
    at_ = 4;
    const auto version = take<std::uint32_t>("version");
    if (version != 2 && version != 3) fail("unsupported", "version", std::to_string(version));
    tensor_count_ = take<std::uint64_t>("tensor_count");
    key_count_ = take<std::uint64_t>("key_count");
    if (tensor_count_ > left() / smallest_tensor)
      fail("bad_value", "tensor_count", std::to_string(tensor_count_));
    if (key_count_ > left() / smallest_key) fail("bad_value", "key_count", std::to_string(key_count_));
  }

  void key(std::uint64_t index) {
    const std::string name = take_name("key[" + std::to_string(index) + "].name");
    kept value;
    value.type = take<std::uint32_t>(name + ".type");
    if (value.type == type_array) {
      array(name, value);
    } else {
      scalars(name, value);
    }
    if (!keys_.emplace(name, std::move(value)).second) fail("duplicate", "key", name);
  }

  void array(const std::string& name, kept& value) {
    value.array = true;
    value.type = take<std::uint32_t>(name + ".element_type");
    value.count = take<std::uint64_t>(name + ".count");
    if (value.type != type_string) return scalars(name, value);
    if (value.count > left() / sizeof(std::uint64_t))
      fail("bad_value", name + ".count", std::to_string(value.count));
    for (std::uint64_t i = 0; i < value.count; ++i) {
      // The field's name is built only when it is needed: vocabularies have 10^5 entries.
      const bool fits = left() >= 8 && load<std::uint64_t>(bytes_.data() + at_) <= left() - 8;
      if (!fits) (void)take_text(name + "[" + std::to_string(i) + "]", left());
      at_ += 8 + load<std::uint64_t>(bytes_.data() + at_);
    }
  }

  // One value or all elements of an array.
  void scalars(const std::string& name, kept& value) {
    if (value.type == type_string) {
      value.text = take_text(name, std::numeric_limits<std::uint64_t>::max()).substr(0, longest_text);
      return;
    }
    const std::uint64_t size = scalar_bytes(value.type);
    if (size == 0)
      fail("bad_value", name + (value.array ? ".element_type" : ".type"), std::to_string(value.type));
    if (value.count > left() / size) {
      if (!value.array) truncated(name);
      fail("bad_value", name + ".count", std::to_string(value.count));
    }
    const std::byte* from = bytes_.data() + at_;
    at_ += value.count * size;
    if (value.count > most_kept) return;
    for (std::uint64_t i = 0; i < value.count; ++i) {
      std::int64_t number = 0;
      if (!integer(value.type, from + i * size, number)) break;
      value.numbers.push_back(number);
    }
  }

  // False for floats. Numbers above the signed range come out negative, so that they are refused.
  static bool integer(std::uint32_t type, const std::byte* from, std::int64_t& out) {
    switch (type) {
      case type_u8:
      case type_bool:
        return out = load<std::uint8_t>(from), true;
      case type_i8:
        return out = load<std::int8_t>(from), true;
      case type_u16:
        return out = load<std::uint16_t>(from), true;
      case type_i16:
        return out = load<std::int16_t>(from), true;
      case type_u32:
        return out = load<std::uint32_t>(from), true;
      case type_i32:
        return out = load<std::int32_t>(from), true;
      case type_u64:
      case type_i64:
        return out = load<std::int64_t>(from), true;
      default:
        return false;
    }
  }

  void tensor(std::uint64_t index) {
    const std::string name = take_name("tensor[" + std::to_string(index) + "].name");
    const auto rank = take<std::uint32_t>(name + ".n_dims");
    if (rank < 1 || rank > 4) fail("bad_value", name + ".n_dims", std::to_string(rank));
    std::uint64_t elements = 1, row = 1;
    for (std::uint32_t d = 0; d < rank; ++d) {
      const std::string field = name + ".dims[" + std::to_string(d) + "]";
      const auto length = take<std::uint64_t>(field);
      const bool fits = length != 0 && !__builtin_mul_overflow(elements, length, &elements);
      if (!fits || elements >> 48 != 0) fail("bad_value", field, std::to_string(length));
      if (d == 0) row = length;
    }
    const auto type = take<std::uint32_t>(name + ".type");
    (void)take<std::uint64_t>(name + ".offset");
    add_tensor(name, type, row, elements);
  }

  void add_tensor(const std::string& name, std::uint32_t type, std::uint64_t row, std::uint64_t elements) {
    const auto* size = std::find_if(std::begin(block_sizes), std::end(block_sizes),
                                    [&](const block_size& b) { return b.type == type; });
    if (size == std::end(block_sizes)) {
      unknown_type_ = true;
    } else if (row % size->elements != 0) {
      fail("bad_value", name + ".dims[0]", std::to_string(row));
    } else {
      weight_bytes_ += static_cast<std::int64_t>(elements / size->elements * size->bytes);
    }
    elements_ += static_cast<std::int64_t>(elements);
    if (name.find("_exps.") != std::string::npos) expert_elements_ += static_cast<std::int64_t>(elements);
    if (elements_ >> 52 != 0 || weight_bytes_ >> 55 != 0)
      fail("bad_value", name + ".dims", std::to_string(elements));
  }

  std::span<const std::byte> bytes_;
  const std::string& file_;
  std::uint64_t at_ = 0;
  std::uint64_t tensor_count_ = 0;
  std::uint64_t key_count_ = 0;
  std::map<std::string, kept> keys_;
  std::int64_t elements_ = 0;
  std::int64_t expert_elements_ = 0;
  std::int64_t weight_bytes_ = 0;
  bool unknown_type_ = false;
};

/// Of an architecture, what its files do not say: every n-th layer is full.
struct pattern {
  const char* name;
  std::int32_t full_every;
};
constexpr pattern patterns[] = {{"gemma2", 2},  {"gemma3", 6}, {"gemma3n", 5}, {"gpt-oss", 2},
                                {"cohere2", 4}, {"phi3", 0},   {"mistral", 0}, {"starcoder2", 0}};

/// Reads the keys of one architecture.
class keys {
 public:
  keys(const header& h) : header_(h) {
    const kept* name = h.find("general.architecture");
    if (name == nullptr) h.fail("missing_field", "general.architecture", {});
    if (name->array || name->type != type_string)
      h.fail("bad_value", "general.architecture.type", std::to_string(name->type));
    architecture_ = name->text;
  }

  const std::string& architecture() const { return architecture_; }
  const kept* find(const char* name) const { return header_.find(architecture_ + "." + name); }
  [[noreturn]] void fail(const char* code, const char* name, std::string value) const {
    header_.fail(code, architecture_ + "." + name, std::move(value));
  }

  /// The number; `absent` where there is none, missing_field if that is negative.
  std::int32_t number(const char* name, std::int64_t absent, std::int64_t least, std::int64_t most) const {
    const kept* value = find(name);
    if (value == nullptr && absent < 0) fail("missing_field", name, {});
    if (value == nullptr) return static_cast<std::int32_t>(absent);
    if (value->array || value->numbers.size() != 1) fail("wrong_type", name, std::to_string(value->type));
    if (value->numbers[0] < least || value->numbers[0] > most) {
      fail("bad_value", name, std::to_string(value->numbers[0]));
    }
    return static_cast<std::int32_t>(value->numbers[0]);
  }

  /// A number per layer, from an array or one for all. `absent` as above.
  std::vector<std::int32_t> per_layer(const char* name, std::size_t layers, std::int64_t absent,
                                      std::int64_t least, std::int64_t most) const {
    const kept* value = find(name);
    if (value == nullptr || !value->array) {
      return std::vector<std::int32_t>(layers, number(name, absent, least, most));
    }
    if (value->count != layers) fail("bad_value", name, std::to_string(value->count) + " elements");
    if (value->numbers.size() != layers) fail("wrong_type", name, std::to_string(value->type));
    std::vector<std::int32_t> out;
    for (const std::int64_t n : value->numbers) {
      if (n < least || n > most) fail("bad_value", name, std::to_string(n));
      out.push_back(static_cast<std::int32_t>(n));
    }
    return out;
  }

 private:
  const header& header_;
  std::string architecture_;
};

constexpr std::int64_t most_heads = 1 << 16;

// The heads of every layer, all with the whole text.
void read_heads(const keys& k, model& m) {
  const auto layers = static_cast<std::size_t>(k.number("block_count", -1, 1, 4096));
  const auto q = k.per_layer("attention.head_count", layers, -1, 0, most_heads);
  const auto kv = k.find("attention.head_count_kv") == nullptr
                      ? q
                      : k.per_layer("attention.head_count_kv", layers, -1, 0, most_heads);
  m.q_heads = *std::max_element(q.begin(), q.end());
  std::int32_t dim = 0;
  if (k.find("attention.key_length") == nullptr) {
    const std::int32_t hidden = k.number("embedding_length", -1, 1, 1 << 20);
    if (m.q_heads == 0 || hidden % m.q_heads != 0)
      k.fail("bad_value", "embedding_length", std::to_string(hidden));
    dim = hidden / m.q_heads;
  }
  const std::int32_t key = k.number("attention.key_length", dim, 1, most_heads);
  const std::int32_t value = k.number("attention.value_length", key, 1, most_heads);
  for (std::size_t i = 0; i < layers; ++i) {
    m.layers.push_back(kv[i] == 0 ? layer{.kind = layer_kind::none}
                                  : layer{layer_kind::full, 0, kv[i], key, value});
  }
}

// Multi-head latent attention: the cache holds the latent and the rotated key.
bool read_latent(const keys& k, model& m) {
  if (k.find("attention.kv_lora_rank") == nullptr) return false;
  const std::int32_t rank = k.number("attention.kv_lora_rank", -1, 1, most_heads);
  const std::int32_t rope = k.number("rope.dimension_count", -1, 0, most_heads);
  const auto layers = static_cast<std::size_t>(k.number("block_count", -1, 1, 4096));
  m.layers.assign(layers, layer{layer_kind::latent, 0, 1, rank + rope, rank});
  m.q_heads = k.number("attention.head_count", 0, 0, most_heads);
  return true;
}

void set_window(layer& l, std::int32_t window) {
  if (l.kind != layer_kind::full) return;
  l.kind = layer_kind::window;
  l.window = window;
}

void read_windows(const keys& k, model& m) {
  const std::int32_t window = k.number("attention.sliding_window", 0, 0, 1 << 30);
  if (window == 0 || (m.context != 0 && window >= m.context)) return;
  const kept* listed = k.find("attention.sliding_window_pattern");
  if (listed != nullptr && listed->array) {
    const auto local = k.per_layer("attention.sliding_window_pattern", m.layers.size(), -1, 0, 1);
    for (std::size_t i = 0; i < m.layers.size(); ++i) {
      if (local[i] != 0) set_window(m.layers[i], window);
    }
    return;
  }
  const auto* known = std::find_if(std::begin(patterns), std::end(patterns),
                                   [&](const pattern& p) { return k.architecture() == p.name; });
  if (known == std::end(patterns) && listed == nullptr) {
    m.notes.push_back("the file has a window of " + std::to_string(window) +
                      " tokens but does not say which layers have it: all are counted in full");
    return;
  }
  const std::int32_t every = k.number("attention.sliding_window_pattern",
                                      known == std::end(patterns) ? 0 : known->full_every, 0, 4096);
  for (std::size_t i = 0; i < m.layers.size(); ++i) {
    if (every == 0 || (i + 1) % static_cast<std::size_t>(every) != 0) set_window(m.layers[i], window);
  }
}

// Layers at the end that read another's cache.
void read_borrowed(const keys& k, model& m) {
  const auto all = static_cast<std::int64_t>(m.layers.size());
  const std::int32_t shared = k.number("attention.shared_kv_layers", 0, 0, all);
  for (auto i = static_cast<std::size_t>(all - shared); i < m.layers.size(); ++i) {
    m.layers[i] = {.kind = layer_kind::none};
  }
}

void read_weights(const header& h, const keys& k, model& m) {
  const kept* parts = h.find("split.count");
  if (parts != nullptr && parts->numbers.size() == 1 && parts->numbers[0] > 1) {
    m.notes.push_back("the file is one of " + std::to_string(parts->numbers[0]) +
                      " parts, so the weights are not known; say them with --parameters");
    return;
  }
  m.parameters = h.parameters();
  m.parameters_by = "tensors";
  m.stored_bytes = h.weight_bytes();
  if (h.unknown_type())
    m.notes.emplace_back("a tensor has a type that is not known: weights are counted by --weights-bits");
  if (m.parameters == 0) m.parameters_by.clear();
  m.experts = k.number("expert_count", 0, 0, 1 << 20);
  m.experts_used = k.number("expert_used_count", 0, 0, std::max(m.experts, 1));
  if (m.experts == 0 || m.experts_used == 0) return;
  m.expert_parameters = h.expert_parameters();
}

struct mapping {
  void* address = MAP_FAILED;
  std::size_t size = 0;
  mapping() = default;
  mapping(const mapping&) = delete;
  mapping& operator=(const mapping&) = delete;
  ~mapping() {
    if (address != MAP_FAILED) ::munmap(address, size);
  }
};

}  // namespace

model model_of_gguf(std::span<const std::byte> bytes, const std::string& file) {
  header h(bytes, file);
  h.read();
  const keys k(h);
  model m;
  const kept* name = h.find("general.name");
  m.name = name != nullptr && !name->text.empty() ? name->text : k.architecture();
  m.source = "gguf";
  m.file = file;
  m.context = k.number("context_length", 0, 0, 1 << 30);
  if (!read_latent(k, m)) {
    read_heads(k, m);
    read_windows(k, m);
    read_borrowed(k, m);
  }
  if (std::any_of(m.layers.begin(), m.layers.end(),
                  [](const layer& l) { return l.kind == layer_kind::none; })) {
    m.notes.emplace_back(
        "layers without a cache of their own are recurrent or read another layer's; a state of "
        "fixed size is not counted");
  }
  read_weights(h, k, m);
  return m;
}

model read_gguf(const std::string& path) {
  const auto fail = [&](const char* code, std::string value) {
    return error(failure::bad_input, code, "gguf", std::move(value), path);
  };
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) throw fail("cannot_open", std::strerror(errno));
  struct stat info {};
  const bool regular = ::fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode);
  mapping mapped;
  if (regular && info.st_size > 0) {
    mapped.size = static_cast<std::size_t>(info.st_size);
    mapped.address = ::mmap(nullptr, mapped.size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  }
  const int reason = errno;
  ::close(descriptor);
  if (!regular) throw fail("cannot_open", "not a regular file");
  if (mapped.size == 0) throw fail("truncated", "empty file");
  if (mapped.address == MAP_FAILED) throw fail("cannot_open", std::strerror(reason));
  return model_of_gguf({static_cast<const std::byte*>(mapped.address), mapped.size}, path);
}

}  // namespace kvcache::cli
