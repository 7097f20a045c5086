// SPDX-License-Identifier: Apache-2.0
#include "gguf.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>

#include "numeric.hpp"

namespace engine {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the reader copies little-endian values as they are");

// Value types of the format.
enum value_type : std::uint32_t {
  type_u8 = 0,
  type_i8 = 1,
  type_u16 = 2,
  type_i16 = 3,
  type_u32 = 4,
  type_i32 = 5,
  type_f32 = 6,
  type_bool = 7,
  type_string = 8,
  type_array = 9,
  type_u64 = 10,
  type_i64 = 11,
  type_f64 = 12,
};

// Bytes of a scalar value, 0 for strings, arrays and unknown types.
std::uint64_t scalar_bytes(std::uint32_t type) {
  switch (type) {
    case type_u8:
    case type_i8:
    case type_bool:
      return 1;
    case type_u16:
    case type_i16:
      return 2;
    case type_u32:
    case type_i32:
    case type_f32:
      return 4;
    case type_u64:
    case type_i64:
    case type_f64:
      return 8;
    default:
      return 0;
  }
}

struct block_layout {
  std::uint64_t elements;
  std::uint64_t bytes;
};

// {0, 0} for a type that is not supported.
block_layout layout_of(std::uint32_t type) {
  switch (type) {
    case static_cast<std::uint32_t>(tensor_type::f32):
      return {1, 4};
    case static_cast<std::uint32_t>(tensor_type::f16):
      return {1, 2};
    case static_cast<std::uint32_t>(tensor_type::q4_1):
      return {32, 20};
    case static_cast<std::uint32_t>(tensor_type::q8_0):
      return {32, 34};
    default:
      return {0, 0};
  }
}

std::string type_text(std::uint32_t type) {
  static constexpr const char* names[] = {"F32",  "F16",  "Q4_0", "Q4_1", "type", "type", "Q5_0", "Q5_1",
                                          "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"};
  const char* name = type < std::size(names) ? names[type] : "type";
  return std::string(name) + " (" + std::to_string(type) + ")";
}

template <class T>
T load(const std::byte* from) {
  T out;
  std::memcpy(&out, from, sizeof(T));
  return out;
}

constexpr std::uint32_t any_type = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint64_t default_alignment = 32;
constexpr std::uint64_t largest_alignment = 1u << 20;
constexpr std::uint64_t longest_name = 1u << 16;
// The least a key (name length, one name byte, type, one payload byte) or a tensor entry can take.
constexpr std::uint64_t smallest_key = 8 + 1 + 4 + 1;
constexpr std::uint64_t smallest_tensor = 8 + 1 + 4 + 8 + 4 + 8;

}  // namespace

struct gguf_file::mapping {
  void* address = nullptr;
  std::size_t size = 0;
  mapping() = default;
  mapping(const mapping&) = delete;
  mapping& operator=(const mapping&) = delete;
  ~mapping() {
    if (address != nullptr) ::munmap(address, size);
  }
};

gguf_file::gguf_file() = default;
gguf_file::gguf_file(gguf_file&&) noexcept = default;
gguf_file& gguf_file::operator=(gguf_file&&) noexcept = default;
gguf_file::~gguf_file() = default;

// Walks the header once. Each step states the field it reads, so the first thing that does not fit is named.
class gguf_file::parser {
 public:
  explicit parser(gguf_file& file) : file_(file), bytes_(file.bytes_) {}

  status run() {
    if (status s = preamble(); !s) return s;
    for (std::uint64_t i = 0; i < key_count_; ++i) {
      if (status s = key(i); !s) return s;
    }
    if (status s = alignment(); !s) return s;
    file_.tensors_.reserve(tensor_count_);
    for (std::uint64_t i = 0; i < tensor_count_; ++i) {
      if (status s = tensor(i); !s) return s;
    }
    file_.header_bytes_ = at_;
    return place_tensors();
  }

 private:
  std::uint64_t left() const { return bytes_.size() - at_; }

  error truncated(const std::string& field) const {
    return bad_input("truncated", field, "file ends at byte " + std::to_string(bytes_.size()));
  }

  template <class T>
  status take(const std::string& field, T& out) {
    if (left() < sizeof(T)) return truncated(field);
    out = load<T>(bytes_.data() + at_);
    at_ += sizeof(T);
    return {};
  }

  status take_string(const std::string& field, std::uint64_t limit, std::string_view& out) {
    std::uint64_t length = 0;
    if (status s = take(field + ".length", length); !s) return s;
    if (length > limit || length > left())
      return bad_input(length > left() ? "truncated" : "bad_value", field + ".length",
                       std::to_string(length));
    out = {reinterpret_cast<const char*>(bytes_.data() + at_), static_cast<std::size_t>(length)};
    at_ += length;
    return {};
  }

  status preamble() {
    if (left() < 4) return truncated("magic");
    if (std::memcmp(bytes_.data(), "GGUF", 4) != 0) {
      const auto found = load<std::uint32_t>(bytes_.data());
      return bad_input("bad_magic", "magic", std::to_string(found));
    }
    at_ = 4;
    std::uint32_t version = 0;
    if (status s = take("version", version); !s) return s;
    if (version != 2 && version != 3) return cannot_run("unsupported", "version", std::to_string(version));
    if (status s = take("tensor_count", tensor_count_); !s) return s;
    if (status s = take("key_count", key_count_); !s) return s;
    if (tensor_count_ > left() / smallest_tensor)
      return bad_input("bad_value", "tensor_count", std::to_string(tensor_count_));
    if (key_count_ > left() / smallest_key)
      return bad_input("bad_value", "key_count", std::to_string(key_count_));
    return {};
  }

  status key(std::uint64_t index) {
    const std::string field = "key[" + std::to_string(index) + "]";
    std::string_view name;
    if (status s = take_string(field + ".name", longest_name, name); !s) return s;
    if (name.empty()) return bad_input("bad_value", field + ".name", "empty");
    value v;
    if (status s = take(std::string(name) + ".type", v.type); !s) return s;
    if (status s = payload(std::string(name), v); !s) return s;
    if (!file_.keys_.emplace(std::string(name), v).second)
      return bad_input("duplicate", field + ".name", std::string(name));
    return {};
  }

  status payload(const std::string& name, value& v) {
    if (v.type == type_array) return array(name, v);
    v.offset = at_;
    if (v.type == type_string) {
      std::string_view text;
      return take_string(name, std::numeric_limits<std::uint64_t>::max(), text);
    }
    const std::uint64_t size = scalar_bytes(v.type);
    if (size == 0) return bad_input("bad_value", name + ".type", std::to_string(v.type));
    if (left() < size) return truncated(name);
    at_ += size;
    return {};
  }

  status array(const std::string& name, value& v) {
    if (status s = take(name + ".element_type", v.element_type); !s) return s;
    if (status s = take(name + ".count", v.count); !s) return s;
    v.offset = at_;
    if (v.element_type == type_string) {
      if (v.count > left() / sizeof(std::uint64_t))
        return bad_input("bad_value", name + ".count", std::to_string(v.count));
      for (std::uint64_t i = 0; i < v.count; ++i) {
        std::string_view text;
        // The field's text is only built when it is needed: vocabularies have 10^5 entries.
        if (left() < 8 || load<std::uint64_t>(bytes_.data() + at_) > left() - 8)
          return take_string(name + "[" + std::to_string(i) + "]", left(), text);
        at_ += 8 + load<std::uint64_t>(bytes_.data() + at_);
      }
      return {};
    }
    const std::uint64_t size = scalar_bytes(v.element_type);
    if (size == 0) return bad_input("bad_value", name + ".element_type", std::to_string(v.element_type));
    if (v.count > left() / size) return bad_input("bad_value", name + ".count", std::to_string(v.count));
    at_ += v.count * size;
    return {};
  }

  status alignment() {
    if (!file_.has("general.alignment")) return {};
    const auto found = file_.unsigned_value("general.alignment");
    if (!found) return found.error();
    if (!std::has_single_bit(*found) || *found > largest_alignment)
      return bad_input("bad_value", "general.alignment", std::to_string(*found));
    alignment_ = *found;
    return {};
  }

  status tensor(std::uint64_t index) {
    gguf_tensor t;
    std::string_view name;
    if (status s = take_string("tensor[" + std::to_string(index) + "].name", longest_name, name); !s)
      return s;
    if (name.empty()) return bad_input("bad_value", "tensor[" + std::to_string(index) + "].name", "empty");
    t.name = std::string(name);
    std::uint32_t rank = 0;
    if (status s = take(t.name + ".n_dims", rank); !s) return s;
    if (rank < 1 || rank > 4) return bad_input("bad_value", t.name + ".n_dims", std::to_string(rank));
    t.rank = static_cast<int>(rank);
    for (std::uint32_t d = 0; d < rank; ++d) {
      if (status s = take(t.name + ".dims[" + std::to_string(d) + "]", t.dims[d]); !s) return s;
    }
    std::uint32_t type = 0;
    std::uint64_t offset = 0;
    if (status s = take(t.name + ".type", type); !s) return s;
    if (status s = take(t.name + ".offset", offset); !s) return s;
    std::uint64_t size = 0;
    if (status s = tensor_bytes(t, type, size); !s) return s;
    if (offset % alignment_ != 0) return bad_input("bad_value", t.name + ".offset", std::to_string(offset));
    if (!file_.tensor_index_.emplace(t.name, file_.tensors_.size()).second)
      return bad_input("duplicate", "tensor[" + std::to_string(index) + "].name", t.name);
    offsets_.push_back({offset, size, file_.tensors_.size()});
    file_.tensors_.push_back(std::move(t));
    return {};
  }

  // The size a tensor claims; refused when it exceeds the file, which also rules out overflow.
  status tensor_bytes(gguf_tensor& t, std::uint32_t type, std::uint64_t& size) {
    const block_layout block = layout_of(type);
    if (block.elements == 0) return cannot_run("unsupported_tensor_type", t.name + ".type", type_text(type));
    t.type = static_cast<tensor_type>(type);
    if (t.dims[0] == 0 || t.dims[0] % block.elements != 0)
      return bad_input("bad_value", t.name + ".dims[0]", std::to_string(t.dims[0]));
    if (t.dims[0] / block.elements > bytes_.size() / block.bytes)
      return bad_input("bad_value", t.name + ".dims[0]", std::to_string(t.dims[0]));
    size = t.dims[0] / block.elements * block.bytes;
    for (int d = 1; d < t.rank; ++d) {
      if (t.dims[d] == 0 || t.dims[d] > bytes_.size() / size)
        return bad_input("bad_value", t.name + ".dims[" + std::to_string(d) + "]", std::to_string(t.dims[d]));
      size *= t.dims[d];
    }
    return {};
  }

  status place_tensors() {
    const std::uint64_t padding = (alignment_ - at_ % alignment_) % alignment_;
    if (tensor_count_ > 0 && left() < padding) return truncated("data");
    const std::uint64_t data = at_ + std::min(padding, left());
    const std::uint64_t available = bytes_.size() - data;
    std::sort(offsets_.begin(), offsets_.end());
    std::uint64_t end = 0;
    for (const extent& e : offsets_) {
      gguf_tensor& t = file_.tensors_[e.index];
      if (e.offset > available || e.size > available - e.offset)
        return bad_input("truncated", t.name + ".offset", std::to_string(e.offset));
      if (e.offset < end) return bad_input("overlap", t.name + ".offset", std::to_string(e.offset));
      end = e.offset + e.size;
      t.bytes = bytes_.subspan(data + e.offset, e.size);
    }
    return {};
  }

  struct extent {
    std::uint64_t offset;
    std::uint64_t size;
    std::size_t index;
    bool operator<(const extent& other) const {
      return offset != other.offset ? offset < other.offset : index < other.index;
    }
  };

  gguf_file& file_;
  std::span<const std::byte> bytes_;
  std::uint64_t at_ = 0;
  std::uint64_t tensor_count_ = 0;
  std::uint64_t key_count_ = 0;
  std::uint64_t alignment_ = default_alignment;
  std::vector<extent> offsets_;
};

result<gguf_file> gguf_file::from_bytes(std::span<const std::byte> bytes) {
  gguf_file file;
  file.bytes_ = bytes;
  if (status s = parser(file).run(); !s) return s.error();
  return file;
}

result<gguf_file> gguf_file::open(const std::string& path) {
  const auto fail = [&](const char* code, std::string value) {
    error e = bad_input(code, "model", std::move(value));
    e.file = path;
    return e;
  };
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return fail("cannot_open", std::strerror(errno));
  struct stat info {};
  if (::fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(descriptor);
    return fail("cannot_open", "not a regular file");
  }
  if (info.st_size == 0) {
    ::close(descriptor);
    return fail("truncated", "empty file");
  }
  auto mapped = std::make_unique<mapping>();
  mapped->size = static_cast<std::size_t>(info.st_size);
  void* address = ::mmap(nullptr, mapped->size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  ::close(descriptor);
  if (address == MAP_FAILED) return fail("cannot_open", std::strerror(errno));
  mapped->address = address;
  result<gguf_file> file = from_bytes({static_cast<const std::byte*>(address), mapped->size});
  if (!file) {
    error e = file.error();
    e.file = path;
    return e;
  }
  file->mapping_ = std::move(mapped);
  file->path_ = path;
  return file;
}

bool gguf_file::has(std::string_view key) const {
  return keys_.count(std::string(key)) != 0;
}

// `type` is the value type asked for; any_type leaves the check to the caller.
result<gguf_file::value> gguf_file::lookup(std::string_view key, std::uint32_t type) const {
  const auto found = keys_.find(std::string(key));
  if (found == keys_.end()) return bad_input("missing_key", std::string(key), "absent");
  if (type != any_type && found->second.type != type)
    return bad_input("wrong_type", std::string(key) + ".type", std::to_string(found->second.type));
  return found->second;
}

namespace {

// Integer payload of any width; false for other types and for negative values read as unsigned.
bool load_integer(std::uint32_t type, const std::byte* from, std::int64_t& out) {
  switch (type) {
    case type_u8:
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
    case type_i64:
      return out = load<std::int64_t>(from), true;
    case type_u64: {
      const auto wide = load<std::uint64_t>(from);
      out = static_cast<std::int64_t>(wide);
      return wide <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    }
    default:
      return false;
  }
}

}  // namespace

result<std::uint64_t> gguf_file::unsigned_value(std::string_view key) const {
  const auto v = lookup(key, any_type);
  if (!v) return v.error();
  std::int64_t out = 0;
  if (!load_integer(v->type, bytes_.data() + v->offset, out))
    return bad_input("wrong_type", std::string(key) + ".type", std::to_string(v->type));
  if (out < 0) return bad_input("bad_value", std::string(key), std::to_string(out));
  return static_cast<std::uint64_t>(out);
}

result<double> gguf_file::float_value(std::string_view key) const {
  const auto v = lookup(key, any_type);
  if (!v) return v.error();
  const std::byte* from = bytes_.data() + v->offset;
  if (v->type == type_f32) return static_cast<double>(load<float>(from));
  if (v->type == type_f64) return load<double>(from);
  return bad_input("wrong_type", std::string(key) + ".type", std::to_string(v->type));
}

result<bool> gguf_file::bool_value(std::string_view key) const {
  const auto v = lookup(key, type_bool);
  if (!v) return v.error();
  return bytes_[v->offset] != std::byte{0};
}

result<std::string_view> gguf_file::string_value(std::string_view key) const {
  const auto v = lookup(key, type_string);
  if (!v) return v.error();
  const auto length = load<std::uint64_t>(bytes_.data() + v->offset);
  return std::string_view(reinterpret_cast<const char*>(bytes_.data() + v->offset + 8), length);
}

result<std::vector<std::string_view>> gguf_file::string_array(std::string_view key) const {
  const auto v = lookup(key, type_array);
  if (!v) return v.error();
  if (v->element_type != type_string)
    return bad_input("wrong_type", std::string(key) + ".element_type", std::to_string(v->element_type));
  std::vector<std::string_view> out;
  out.reserve(v->count);
  std::uint64_t at = v->offset;
  for (std::uint64_t i = 0; i < v->count; ++i) {
    const auto length = load<std::uint64_t>(bytes_.data() + at);
    out.emplace_back(reinterpret_cast<const char*>(bytes_.data() + at + 8), length);
    at += 8 + length;
  }
  return out;
}

result<std::vector<std::int64_t>> gguf_file::integer_array(std::string_view key) const {
  const auto v = lookup(key, type_array);
  if (!v) return v.error();
  const std::uint64_t size = scalar_bytes(v->element_type);
  std::vector<std::int64_t> out;
  out.reserve(size == 0 ? 0 : v->count);
  for (std::uint64_t i = 0; i < v->count; ++i) {
    std::int64_t element = 0;
    if (size == 0 || !load_integer(v->element_type, bytes_.data() + v->offset + i * size, element))
      return bad_input("wrong_type", std::string(key) + ".element_type", std::to_string(v->element_type));
    out.push_back(element);
  }
  return out;
}

const gguf_tensor* gguf_file::find(std::string_view name) const {
  const auto found = tensor_index_.find(std::string(name));
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

namespace {

void dequantise_q4_1(const std::byte* block, float* out) {
  const float scale = half_to_float(load<std::uint16_t>(block));
  const float base = half_to_float(load<std::uint16_t>(block + 2));
  for (int j = 0; j < 16; ++j) {
    const auto pair = static_cast<std::uint8_t>(block[4 + j]);
    out[j] = scale * static_cast<float>(pair & 15) + base;
    out[j + 16] = scale * static_cast<float>(pair >> 4) + base;
  }
}

void dequantise_q8_0(const std::byte* block, float* out) {
  const float scale = half_to_float(load<std::uint16_t>(block));
  for (int j = 0; j < 32; ++j) out[j] = scale * static_cast<float>(static_cast<std::int8_t>(block[2 + j]));
}

}  // namespace

void dequantise_row(const gguf_tensor& tensor, std::uint64_t row, float* out) {
  const block_layout block = layout_of(static_cast<std::uint32_t>(tensor.type));
  const std::uint64_t blocks = tensor.row_length() / block.elements;
  const std::byte* from = tensor.bytes.data() + row * blocks * block.bytes;
  if (tensor.type == tensor_type::f32) {
    std::memcpy(out, from, blocks * sizeof(float));
    return;
  }
  for (std::uint64_t b = 0; b < blocks; ++b) {
    const std::byte* at = from + b * block.bytes;
    if (tensor.type == tensor_type::f16) out[b] = half_to_float(load<std::uint16_t>(at));
    if (tensor.type == tensor_type::q4_1) dequantise_q4_1(at, out + b * 32);
    if (tensor.type == tensor_type::q8_0) dequantise_q8_0(at, out + b * 32);
  }
}

}  // namespace engine
