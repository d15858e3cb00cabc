// SPDX-License-Identifier: Apache-2.0
// Compares the kernels of one tier with the reference's: the same random operands, the same bits.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/table.h"

namespace torchq {

// Random numbers, the same on every machine.

uint64_t random_bits();
/// Any of low, ..., high.
int64_t between(int64_t low, int64_t high);
inline bool chance(int percent) { return between(1, 100) <= percent; }
/// Uniform in [-bound, bound].
float within(float bound);
/// Uniform in [-bound, bound], or, one time in eight, NaN, infinite, denormal, a zero or a limit of
/// int32.
float any_float(float bound);
template <class T>
T pick(std::initializer_list<T> values) {
  return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
}

/// Values that end where a page without access begins: a kernel that reads or writes behind them
/// crashes. Their start is not aligned.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size = 0) : size_(size) {
    const int64_t page = sysconf(_SC_PAGESIZE), bytes = size * static_cast<int64_t>(sizeof(T));
    const int64_t usable = (bytes + page - 1) / page * page;
    mapped_ = static_cast<size_t>(usable + page);
    start_ = static_cast<char*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(start_ + usable, static_cast<size_t>(page), PROT_NONE);
    data_ = reinterpret_cast<T*>(start_ + usable - bytes);
  }
  ~Buffer() { munmap(start_, mapped_); }
  Buffer(const Buffer& other) : Buffer(other.size_) { *this = other; }
  Buffer& operator=(const Buffer& other) {
    if (size_ != other.size_) {
      Buffer copy(other.size_);
      std::swap(start_, copy.start_), std::swap(mapped_, copy.mapped_);
      std::swap(data_, copy.data_), std::swap(size_, copy.size_);
    }
    if (size_ > 0) std::memcpy(data_, other.data_, static_cast<size_t>(bytes()));
    return *this;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(T)); }

 private:
  char* start_;
  size_t mapped_;
  T* data_;
  int64_t size_;
};

/// `size` values of make().
template <class T, class Make>
Buffer<T> filled(int64_t size, const Make& make) {
  Buffer<T> values(size);
  for (int64_t i = 0; i < size; ++i) values[i] = static_cast<T>(make());
  return values;
}
inline Buffer<uint8_t> random_bytes(int64_t size) { return filled<uint8_t>(size, random_bits); }
inline Buffer<int8_t> random_weights(int64_t size) { return filled<int8_t>(size, random_bits); }
inline Buffer<int32_t> random_ints(int64_t size, int32_t bound) {
  return filled<int32_t>(size, [&] { return between(-int64_t{bound}, bound); });
}
inline Buffer<float> random_floats(int64_t size, float bound) {
  return filled<float>(size, [&] { return within(bound); });
}
inline Buffer<float> any_floats(int64_t size, float bound) {
  return filled<float>(size, [&] { return any_float(bound); });
}

inline int size_of(DType dtype) { return dtype == DType::u8 || dtype == DType::s8 ? 1 : 4; }
/// Values of a dtype, of its full range.
Buffer<uint8_t> random_values(int64_t size, DType dtype);

/// "rows=3 flip=1" of text("rows", 3, "flip", true).
template <class... Values>
std::string text(const Values&... values) {
  std::ostringstream out;
  bool is_name = true;
  const auto add = [&](const auto& value) {
    out << value << (is_name ? "=" : " ");
    is_name = !is_name;
  };
  (add(values), ...);
  return out.str();
}
inline std::ostream& operator<<(std::ostream& out, DType dtype) {
  return out << (dtype == DType::u8    ? "u8"
                 : dtype == DType::s8  ? "s8"
                 : dtype == DType::s32 ? "s32"
                                       : "f32");
}

/// Counts a case of an entry of the table; its parameters are printed if it fails or crashes.
void begin_case(const char* entry, const std::string& parameters);
/// Reports the first difference, if there is one.
void expect_same(const char* what, const void* reference, const void* tested, int64_t bytes);
template <class T>
void expect_same(const char* what, const Buffer<T>& reference, const Buffer<T>& tested) {
  expect_same(what, reference.data(), tested.data(), reference.bytes());
}

/// Packed weights as `gemm`, or with k.rnn_widening, reads them.
Buffer<int8_t> widened(const Kernels& k, int widening, const Buffer<int8_t>& packed);

inline const Kernels kReferenceKernels = make_kernels<Tier::reference>("reference");

// One file per family.

void check_gemm(const Kernels& k);
void check_conv(const Kernels& k);
void check_pointwise(const Kernels& k);
void check_rnn(const Kernels& k);
void check_rows(const Kernels& k);
void check_attention(const Kernels& k);
void check_embedding(const Kernels& k);

}  // namespace torchq
