// SPDX-License-Identifier: Apache-2.0
#include "ops/conv/border.h"

#include <numeric>

namespace torchq {
namespace {

/// n / d, rounded up. Most windows have no dilation, and a division takes 10 to 20 cycles.
int64_t steps(int64_t n, int64_t d) { return d == 1 ? n : (n + d - 1) / d; }

/// The taps, of `count`, whose positions start, start + step, ... are in [0, size).
TapRange taps_inside(int64_t start, int64_t step, int64_t count, int64_t size) {
  const int64_t begin = start < 0 ? steps(-start, step) : 0;
  const int64_t end = start < size ? std::min(steps(size - start, step), count) : 0;
  return begin < end ? TapRange{begin, end} : TapRange{0, 0};
}

/// Appends `whole`, cut where a tap begins or ceases to meet [0, size).
void cut(const TapInterval& whole, int64_t size, TapIntervals& result) {
  const int64_t step = whole.tap_step, taps = whole.num_taps();
  for (int64_t i = 0; i < whole.count;) {
    const int64_t start = whole.src + i * whole.src_step;
    const TapRange valid = taps_inside(start, step, taps, size);
    const int64_t begin = whole.taps.begin + valid.begin, end = whole.taps.begin + valid.end;
    if (i == 0 || result.back().taps.begin != begin || result.back().taps.end != end) {
      result.push_back(whole);
      TapInterval& own = result.back();
      own.dst += i * whole.dst_step;
      own.src = begin < end ? start + valid.begin * step : 0;
      own.count = 0;
      own.taps = {begin, end};
    }
    int64_t next = i + 1;
    if (end - begin == taps) {  // on to the last window that is inside
      const int64_t last =
          taps == 0 ? whole.count - 1 : (size - 1 - (taps - 1) * step - whole.src) / whole.src_step;
      next = std::min(last + 1, whole.count);
    }
    result.back().count += next - i;
    i = next;
  }
}

}  // namespace

TapRange TapAxis::valid_taps(int64_t dst) const {
  return taps_inside(dst * stride - padding + in_front, dilation, kernel, src_size);
}

/// One interval per phase, whether its taps meet the source or not.
TapIntervals TapAxis::with_all_taps() const {
  if (!transposed) {
    return {{0, 1, dst_size, in_front - padding, stride, dilation, {0, kernel}}};
  }
  TapIntervals result;
  const auto order = transposed_taps(kernel, stride, dilation);
  const int64_t tap_step = dilation / std::gcd(stride, dilation);
  int64_t tap = 0;
  for (int64_t phase = 0; phase < stride; ++phase) {
    TapInterval all{0, stride, 0, in_front, 1, tap_step, {tap, tap}};
    while (tap < kernel && order[static_cast<size_t>(tap)] * dilation % stride == phase) ++tap;
    const int64_t first = padding > phase ? (padding - phase + stride - 1) / stride : 0;
    all.dst = phase + first * stride - padding;
    if (all.dst >= dst_size) continue;
    all.count = (dst_size - 1 - all.dst) / stride + 1;
    if (all.taps.begin < tap) {
      all.src += first - order[static_cast<size_t>(all.taps.begin)] * dilation / stride;
    }
    all.taps.end = tap;
    result.push_back(all);
  }
  return result;
}

TapIntervals TapAxis::intervals() const {
  TapIntervals result;
  for (const TapInterval& all : with_all_taps()) cut(all, src_size, result);
  return result;
}

TapAxis TapAxis::padded() const {
  int64_t before = padding, behind = pad_end;
  if (transposed) {
    before = behind = 0;
    for (const TapInterval& all : with_all_taps()) {
      if (all.num_taps() == 0) continue;
      const int64_t last = all.src + (all.num_taps() - 1) * all.tap_step + all.count - 1;
      before = std::max(before, -all.src);
      behind = std::max(behind, last - (src_size - 1));
    }
  }
  TapAxis result = *this;
  result.in_front = before;
  result.src_size += before + behind;
  return result;
}

c10::SmallVector<int64_t, 8> transposed_taps(int64_t kernel, int64_t stride, int64_t dilation) {
  c10::SmallVector<int64_t, 8> taps(static_cast<size_t>(kernel));
  std::iota(taps.rbegin(), taps.rend(), 0);
  std::stable_sort(taps.begin(), taps.end(), [&](int64_t a, int64_t b) {
    return a * dilation % stride < b * dilation % stride;
  });
  return taps;
}

int64_t taps_per_phase(int64_t kernel, int64_t stride, int64_t dilation) {
  const int64_t period = stride / std::gcd(stride, dilation);
  return (kernel + period - 1) / period;
}

}  // namespace torchq
