// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of float32 queries or keys.
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "kernels/cpu_tuning.h"
#include "ops/rows/real.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/dispatch.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

using Strides = c10::SmallVector<int64_t, 5>;

void check_float(const char* arg, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, "torchq.rotary: ", arg, " must be float32, got ",
                   dtype_name(t.scalar_type()), ". Convert it with .float().");
  check_cpu("rotary", arg, t);
}

/// Rows of values side by side, at these strides along the dimensions in front of the last.
struct Rows {
  explicit Rows(const at::Tensor& t)
      : held(t.stride(-1) == 1 ? t : t.contiguous()),
        data(held.const_data_ptr<float>()),
        strides(held.strides().begin(), held.strides().end() - 1) {}

  /// Those of a factor, which broadcasts to these sizes. Expanding a tensor would cost 1 us.
  Rows(const at::Tensor& t, c10::IntArrayRef sizes)
      : Rows(t.dim() > 0 && t.size(-1) == sizes.back() ? t : t.expand(sizes)) {
    Strides aligned(sizes.size() - 1, 0);
    for (size_t d = aligned.size(), i = strides.size(); i > 0;) {
      --d, --i;
      if (held.size(static_cast<int64_t>(i)) == sizes[d]) aligned[d] = strides[i];
    }
    strides = aligned;
  }

  at::Tensor held;
  const float* data;
  Strides strides;
};

/// In the memory order of src, so that what turned heads and positions around for src turns them
/// back for what follows without a copy.
at::Tensor empty_like_rows(const at::Tensor& src) {
  if (src.is_contiguous()) return empty_dst(src.sizes(), at::kFloat);
  const at::Tensor dst = empty_dst_like(src, at::kFloat);
  return dst.stride(-1) == 1 ? dst : empty_dst(src.sizes(), at::kFloat);
}

/// The rows of dst in the order of its memory, one after the other, and where the others are.
class Walk {
 public:
  Walk(const at::Tensor& dst, std::array<const Rows*, 3> operands) : operands_(operands) {
    order_.resize(static_cast<size_t>(dst.dim()) - 1);
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int64_t a, int64_t b) { return dst.stride(a) > dst.stride(b); });
    for (const int64_t d : order_) sizes_.push_back(dst.size(d));
  }

  /// visit(row, offsets) for each row of a range; offsets are those of the operands.
  template <class Visit>
  void run(const Range& range, const Visit& visit) const {
    Strides at(order_.size(), 0);
    std::array<int64_t, 3> offsets{};
    int64_t left = range.begin;
    for (size_t i = order_.size(); i > 0;) {
      --i;
      at[i] = left % sizes_[i];
      left /= sizes_[i];
      move(offsets, i, at[i]);
    }
    for (int64_t row = range.begin; row < range.end; ++row) {
      visit(row, offsets);
      for (size_t i = order_.size(); i > 0;) {
        --i;
        if (++at[i] < sizes_[i]) {
          move(offsets, i, 1);
          break;
        }
        at[i] = 0;
        move(offsets, i, 1 - sizes_[i]);
      }
    }
  }

 private:
  void move(std::array<int64_t, 3>& offsets, size_t i, int64_t steps) const {
    const size_t d = static_cast<size_t>(order_[i]);
    for (size_t k = 0; k < 3; ++k) offsets[k] += steps * operands_[k]->strides[d];
  }

  std::array<const Rows*, 3> operands_;
  Strides order_, sizes_;  // dimensions in front of the last, that of the largest stride first
};

/// One row of 2 * half values. The products are rounded before the sum, as torch's are.
void rotate(const float* src, const float* cos, const float* sin, int64_t half,
            float* __restrict dst) {
  for (int64_t i = 0; i < half; ++i) {
    const float low = src[i], high = src[i + half];
    dst[i] = with_one_nan(low * cos[i] - high * sin[i]);
    dst[i + half] = with_one_nan(high * cos[i + half] + low * sin[i + half]);
  }
}

/// dst = src * cos + cat(-src[..., h:], src[..., :h]) * sin, where h is half the last size; the
/// bits are those of torch's operations one by one.
at::Tensor rotary(const at::Tensor& src, const at::Tensor& cos, const at::Tensor& sin) {
  OpTrace trace("rotary");
  trace.ran(kernels(), "rotary");
  check_float("src", src);
  TORCH_CHECK_VALUE(src.dim() >= 1 && src.size(-1) % 2 == 0,
                    "torchq.rotary: src must have rows of an even size, got ", src.sizes(),
                    ". Rotate the first part of each row, whose size is even, and leave the rest.");
  for (const auto& [arg, factor] : {std::pair("cos", &cos), std::pair("sin", &sin)}) {
    check_float(arg, *factor);
    TORCH_CHECK_VALUE(at::is_expandable_to(factor->sizes(), src.sizes()), "torchq.rotary: ", arg,
                      " must broadcast to src ", src.sizes(), ", got ", factor->sizes(),
                      ". Give one row for each position, and unsqueeze the dimension of heads.");
  }
  const at::Tensor dst = empty_like_rows(src);
  trace.describe([&] { return describe_call({src, cos, sin}, dst); });
  if (is_done(dst)) return dst;
  const int64_t n = src.size(-1);
  const Rows from(src), cosines(cos, src.sizes()), sines(sin, src.sizes());
  const Walk walk(dst, {&from, &cosines, &sines});
  float* values = dst.mutable_data_ptr<float>();
  parallel_ranges(src.numel() / n, threads_for(src.numel(), tuning::kConvertGrain),
                  [&](const Range& range) {
                    walk.run(range, [&](int64_t row, const std::array<int64_t, 3>& at) {
                      rotate(from.data + at[0], cosines.data + at[1], sines.data + at[2], n / 2,
                             values + row * n);
                    });
                  });
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { torchq::implement<&torchq::rotary>(m, "rotary"); }
