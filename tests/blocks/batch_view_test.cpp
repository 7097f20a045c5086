// SPDX-License-Identifier: Apache-2.0
#include "kvcache/blocks/batch_view.hpp"

#include <catch2/catch.hpp>
#include <string>
#include <vector>

using namespace kvcache;

namespace {

const std::vector<block_id> table{block_id{7}, no_block, block_id{3}};

void refused(const status& s, const char* field, int64_t value) {
  CHECK(s.code == errc::bad_argument);
  CHECK(std::string(s.field) == field);
  CHECK(s.value == value);
}

}  // namespace

TEST_CASE("a padded row holds the ids and the fill where there is no block") {
  std::vector<int32_t> row(5, 77);
  CHECK(write_row(table, -1, row));
  CHECK(row == std::vector<int32_t>{7, -1, 3, -1, -1});
  CHECK(write_row(table, 0, row));
  CHECK(row == std::vector<int32_t>{7, 0, 3, 0, 0});
  CHECK(write_row({}, 9, row));
  CHECK(row == std::vector<int32_t>(5, 9));
  CHECK(write_row(table, -1, std::span(row).first(3)));
}

TEST_CASE("a row shorter than the table is refused and unchanged") {
  std::vector<int32_t> row(2, 77);
  refused(write_row(table, -1, row), "row", 2);
  CHECK(row == std::vector<int32_t>(2, 77));
}

TEST_CASE("pages and the length of the last page follow from the tokens") {
  for (int32_t tokens = 1; tokens < 100; ++tokens) {
    const page_lengths p = pages_of(tokens, 16);
    CHECK((p.pages - 1) * 16 + p.last_page_len == tokens);
    CHECK(p.last_page_len >= 1);
    CHECK(p.last_page_len <= 16);
  }
  CHECK(pages_of(0, 16).pages == 0);
  CHECK(pages_of(0, 16).last_page_len == 0);
}

TEST_CASE("sequences are appended to a CSR table one after the other") {
  const std::vector<block_id> a{block_id{4}, block_id{9}}, b{}, c{block_id{1}, block_id{2}, block_id{8}};
  std::vector<int32_t> indptr(4, 0), indices(6, -7), last(3, -7);
  CHECK(write_csr(a, 20, 16, 0, indptr, indices, last));
  CHECK(write_csr(b, 0, 16, 1, indptr, indices, last));
  CHECK(write_csr(c, 32, 16, 2, indptr, indices, last));  // the third block is reserved but empty
  CHECK(indptr == std::vector<int32_t>{0, 2, 2, 4});
  CHECK(indices == std::vector<int32_t>{4, 9, 1, 2, -7, -7});
  CHECK(last == std::vector<int32_t>{4, 0, 16});
}

TEST_CASE("what does not fit a CSR table is refused and leaves it unchanged") {
  const std::vector<block_id> a{block_id{4}, block_id{9}};
  std::vector<int32_t> indptr{0, -5}, indices(1, -5), last(1, -5);
  const auto unchanged = [&] {
    CHECK(indptr[1] == -5);
    CHECK(indices == std::vector<int32_t>(indices.size(), -5));
    CHECK(last == std::vector<int32_t>(last.size(), -5));
  };
  refused(write_csr(a, 32, 16, 0, indptr, indices, last), "indices", 1);
  unchanged();
  refused(write_csr(a, 33, 16, 0, indptr, indices, last), "tokens", 33);
  unchanged();
  refused(write_csr(a, -1, 16, 0, indptr, indices, last), "tokens", -1);
  unchanged();
  refused(write_csr(a, 16, 16, 1, indptr, indices, last), "indptr", 2);
  unchanged();
  refused(write_csr(a, 16, 16, 0, indptr, indices, {}), "last_page_len", 0);
  unchanged();
  indptr[0] = -1;
  refused(write_csr(a, 16, 16, 0, indptr, indices, last), "indptr", -1);
  unchanged();
  indptr[0] = INT32_MAX;
  refused(write_csr(a, 16, 16, 0, indptr, indices, last), "indices", 1);
  unchanged();
}

TEST_CASE("slots name every token's place, and a token without a block has none") {
  std::vector<int64_t> out(6);
  CHECK(write_slots(table, 4, 2, out));
  CHECK(out == std::vector<int64_t>{30, 31, -1, -1, -1, -1});
  CHECK(write_slots(table, 4, 6, out));
  CHECK(out == std::vector<int64_t>{-1, -1, 12, 13, 14, 15});
  CHECK(write_slots(table, 4, 12, {}));
}

TEST_CASE("tokens outside the table are refused and the slots unchanged") {
  std::vector<int64_t> out(6, -9);
  refused(write_slots(table, 4, 7, out), "first", 7);
  refused(write_slots(table, 4, -1, out), "first", -1);
  refused(write_slots(table, 4, INT32_MAX, out), "first", INT32_MAX);
  CHECK(out == std::vector<int64_t>(6, -9));
}

TEST_CASE("slots and addresses of the largest ids do not overflow 32 bits (C11)") {
  const std::vector<block_id> far{block_id{INT32_MAX}};
  std::vector<int64_t> slot(1);
  CHECK(write_slots(far, 1 << 16, 65535, slot));
  CHECK(slot[0] == int64_t{INT32_MAX} * 65536 + 65535);
  std::vector<std::byte*> address(1);
  CHECK(write_pointers(far, nullptr, int64_t{1} << 20, address));
  CHECK(reinterpret_cast<uintptr_t>(address[0]) == uintptr_t{INT32_MAX} << 20);
}

TEST_CASE("addresses are base plus id times stride, null where there is no block") {
  std::vector<std::byte> memory(8 * 100);
  std::vector<std::byte*> out(4, memory.data() + 1);
  CHECK(write_pointers(table, memory.data(), 100, out));
  CHECK(out[0] == memory.data() + 700);
  CHECK(out[1] == nullptr);
  CHECK(out[2] == memory.data() + 300);
  CHECK(out[3] == memory.data() + 1);
  std::vector<std::byte*> few(2, memory.data() + 1);
  refused(write_pointers(table, memory.data(), 100, few), "out", 2);
  CHECK(few == std::vector<std::byte*>(2, memory.data() + 1));
}
