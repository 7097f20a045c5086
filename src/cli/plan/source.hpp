// SPDX-License-Identifier: Apache-2.0
#pragma once

// Models from what a person has at hand: a configuration file, a model file's metadata, or numbers.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "plan/architecture.hpp"

namespace kvcache::cli {

/// A model from the text of a Hugging Face `config.json`. `file` is named in errors. Known kinds get their
/// parameters computed; an unknown kind that states what a cache depends on is accepted with a note. Fails:
/// bad_input naming field and value.
model model_of_config(std::string_view text, const std::string& file);

/// The same from a file.
model read_config(const std::string& path);

/// A model from the metadata of a GGUF file (version 2 and 3, little-endian): keys and tensor table; the
/// tensors' bytes are not looked at and need not be there. Memory: a small multiple of the header. Fails:
/// bad_input naming field and value.
model model_of_gguf(std::span<const std::byte> bytes, const std::string& file);

/// The same from a file, which is mapped.
model read_gguf(const std::string& path);

/// A model from "layers=80,kv_heads=8,q_heads=64,head_dim=128"; further keys: head_dim_v, window, full_every,
/// and latent, rope in place of kv_heads and head_dim. Fails: usage naming key and value.
model model_of_shape(std::string_view option, std::string_view text);

/// The model of that name. Fails: usage with names that are near.
model model_of_name(std::string_view option, const std::string& name);

}  // namespace kvcache::cli
