// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target over files and folders once, where there is no libFuzzer.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int count, char** words) {
  int files = 0;
  for (int i = 1; i < count; ++i) {
    std::vector<std::filesystem::path> paths;
    if (std::filesystem::is_directory(words[i])) {
      for (const auto& entry : std::filesystem::directory_iterator(words[i])) paths.push_back(entry.path());
    } else {
      paths.emplace_back(words[i]);
    }
    for (const auto& path : paths) {
      std::ifstream in(path, std::ios::binary);
      const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
      LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
      ++files;
    }
  }
  std::printf("%d files\n", files);
  return files > 0 ? 0 : 1;
}
