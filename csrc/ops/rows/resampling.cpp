// SPDX-License-Identifier: Apache-2.0
// Resampling of 8-bit tensors (Note [Real units] in real.h).
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cpu_tuning.h"
#include "ops/conv/geometry.h"
#include "ops/rows/real.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"

namespace torchq {
namespace {

/// Source indices and weights of one destination index along one dimension: (1 - w) src[left] + w
/// src[right].
struct Tap {
  int64_t index[2];
  double weight[2];
};

using Taps = std::array<std::vector<Tap>, 3>;

/// oneDNN's coordinates, in float32: s = (o + 0.5) * input / output - 0.5.
Tap tap_of(int64_t o, int64_t output, int64_t input, bool linear) {
  const float s =
      (static_cast<float>(o) + 0.5f) * static_cast<float>(input) / static_cast<float>(output) -
      0.5f;
  const float last = static_cast<float>(input - 1);
  if (!linear) {
    const int64_t nearest = static_cast<int64_t>(std::clamp(std::round(s), 0.0f, last));
    return {{nearest, nearest}, {1, 0}};
  }
  const float inside = std::clamp(s, 0.0f, last);
  const float left = std::floor(inside);
  const float weight = inside - left;
  const int64_t index = static_cast<int64_t>(left);
  return {{index, std::min(index + 1, input - 1)}, {1.0 - weight, weight}};
}

/// Returns true if reading and writing a byte gives the same byte: rne(fma(s d, 1 / s, z)) = d + z,
/// as long as s d does not overflow.
bool keeps_bytes(const Real& from, const Real& to) {
  return from.dtype == to.dtype && from.scale == to.scale && from.zero_point == to.zero_point &&
         from.scale < 1e30f;
}

void copy_nearest(const ChannelsLast& src, const Taps& taps, const int64_t (&output)[3],
                  uint8_t* dst) {
  const uint8_t* data = bytes_of(src.tensor);
  const int64_t c = src.channels, rows = src.batch * output[0] * output[1];
  const size_t bytes = static_cast<size_t>(c);
  parallel_ranges(rows, threads_for(rows * output[2] * c, tuning::kCopyGrain), [&](Range range) {
    for (int64_t r = range.begin; r < range.end; ++r) {
      const int64_t n = r / (output[0] * output[1]);
      const int64_t d = taps[0][static_cast<size_t>(r / output[1] % output[0])].index[0];
      const int64_t h = taps[1][static_cast<size_t>(r % output[1])].index[0];
      const uint8_t* row = data + ((n * src.size[0] + d) * src.size[1] + h) * src.size[2] * c;
      uint8_t* to = dst + r * output[2] * c;
      for (int64_t x = 0; x < output[2]; ++x)
        std::memcpy(to + x * c, row + taps[2][static_cast<size_t>(x)].index[0] * c, bytes);
    }
  });
}

/// A stretch of source lines as float(q - zero_point), each converted when it is first asked for
/// and kept while its neighbours are: what blends reads lines d and d + 1, h and h + 1.
class FloatLines {
 public:
  FloatLines(const Kernels& tier, const ChannelsLast& src, const Real& from, int64_t begin,
             int64_t pixels, float* memory)
      : tier_(tier),
        src_(src),
        unscaled_{from.dtype, 1, from.zero_point},
        begin_(begin),
        values_(pixels * src.channels),
        memory_(memory) {}

  const float* line(int64_t n, int64_t d, int64_t h) {
    const int64_t index = (n * src_.size[0] + d) * src_.size[1] + h;
    const int64_t slot = (d & 1) * 2 + (h & 1);
    float* line = memory_ + slot * values_;
    if (held_[slot] == index) return line;
    held_[slot] = index;
    const uint8_t* data = bytes_of(src_.tensor) + (index * src_.size[2] + begin_) * src_.channels;
    load_real(tier_, unscaled_, data, 1, values_, line);
    return line;
  }

 private:
  const Kernels& tier_;
  const ChannelsLast& src_;
  Real unscaled_;
  int64_t begin_, values_;
  float* memory_;
  int64_t held_[4] = {-1, -1, -1, -1};
};

/// Destination pixels [begin, end) of lines [range.begin, range.end).
struct Stretch {
  const ChannelsLast& src;
  const Taps& taps;
  const int64_t (&output)[3];
  int64_t begin, end;

  int64_t first_pixel() const { return taps[2][static_cast<size_t>(begin)].index[0]; }
  int64_t pixels() const {
    return taps[2][static_cast<size_t>(end - 1)].index[1] + 1 - first_pixel();
  }
};

void blend_stretch(const Stretch& s, const Range& range, const Kernels& tier, const Real& from,
                   const RealOutput& out) {
  const int64_t c = s.src.channels, pixels = s.end - s.begin;
  ScratchFrame frame;
  FloatLines lines(tier, s.src, from, s.first_pixel(), s.pixels(),
                   frame.take<float>(4, s.pixels(), c));
  int64_t* offset = frame.take<int64_t>(2, pixels);
  float* weights = frame.take<float>(8, pixels);
  const Tap* taps = s.taps[2].data() + s.begin;
  for (int64_t i = 0; i < 2 * pixels; ++i) {
    offset[i] = (taps[i / 2].index[i % 2] - s.first_pixel()) * c;
  }
  for (int64_t r = range.begin; r < range.end; ++r) {
    const Tap& h = s.taps[1][static_cast<size_t>(r % s.output[1])];
    const Tap& d = s.taps[0][static_cast<size_t>(r / s.output[1] % s.output[0])];
    const float* line[4];
    double line_weight[4];
    int num_lines = 0;
    for (int k = 0; k < 2; ++k) {
      for (int j = 0; j < 2; ++j) {
        const double weight = d.weight[k] * h.weight[j];
        if (weight == 0) continue;
        line_weight[num_lines] = weight;
        line[num_lines++] = lines.line(r / (s.output[0] * s.output[1]), d.index[k], h.index[j]);
      }
    }
    for (int l = 0; l < num_lines; ++l) {
      float* weight = weights + 2 * l;
      for (int64_t p = 0; p < pixels; ++p, weight += 2 * num_lines) {
        weight[0] = static_cast<float>(line_weight[l] * taps[p].weight[0]);
        weight[1] = static_cast<float>(line_weight[l] * taps[p].weight[1]);
      }
    }
    const int64_t base = r * s.output[2] + s.begin;  // of the pixels
    store_range(out, {base, base + pixels}, c, [&](const Range& part, const RealRow& to) {
      const int64_t p = part.begin - base;
      tier.blend({line, num_lines, offset + 2 * p, weights + 2 * num_lines * p, from.scale, c,
                  part.end - part.begin, to});
    });
  }
}

/// Stretches that read at most kFloats of a line, so that four lines stay in L2, and have at most
/// kPixels pixels, whose weights do.
std::vector<Stretch> stretches_of(const ChannelsLast& src, const Taps& taps,
                                  const int64_t (&output)[3]) {
  constexpr int64_t kFloats = 16384, kPixels = 4096;
  std::vector<Stretch> stretches;
  for (Stretch s{src, taps, output, 0, 1}; s.begin < output[2]; s.begin = s.end++) {
    while (s.end < output[2] && s.end - s.begin < kPixels) {
      ++s.end;
      if (s.pixels() * src.channels <= kFloats) continue;
      --s.end;
      break;
    }
    stretches.push_back(s);
  }
  return stretches;
}

/// Threads share the lines of each stretch; an image of few lines has many stretches if it is
/// large.
void blend_lines(const ChannelsLast& src, const Taps& taps, const int64_t (&output)[3],
                 const Kernels& tier, const Real& from, const RealOutput& out) {
  const std::vector<Stretch> stretches = stretches_of(src, taps, output);
  const int64_t lines = src.batch * output[0] * output[1];
  const int64_t units = static_cast<int64_t>(stretches.size()) * lines;
  const int threads = threads_for(lines * output[2] * src.channels, tuning::kRealGrain);
  parallel_ranges(units, threads, [&](Range range) {
    for (int64_t unit = range.begin; unit < range.end;) {
      const int64_t stretch = unit / lines, base = stretch * lines;
      const int64_t end = std::min(range.end, base + lines);
      blend_stretch(stretches[static_cast<size_t>(stretch)], {unit - base, end - base}, tier, from,
                    out);
      unit = end;
    }
  });
}

at::Tensor resampling(const at::Tensor& src_arg, c10::string_view alg, c10::IntArrayRef size,
                      const at::Tensor& scales, const at::Tensor& zero_points, int64_t dst_dtype,
                      c10::string_view post_ops, std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("resampling");
  const Kernels& tier = kernels();
  trace.ran(tier, "resampling");
  check_src("resampling", "src", src_arg);
  TORCH_CHECK_VALUE(alg == "nearest" || alg == "linear",
                    "torchq.resampling: alg must be nearest or linear, got '", alg, "'.");
  const auto params = read_params("resampling", scales, zero_points, {src_arg},
                                  dst_dtype_of("resampling", dst_dtype));
  const ChannelsLast src = to_channels_last("resampling", src_arg);
  const int64_t dims = src.spatial_dims;
  int64_t output[3] = {1, 1, 1}, pixels = 1;
  TORCH_CHECK_VALUE(static_cast<int64_t>(size.size()) == dims, "torchq.resampling: size must have ",
                    dims, " values for src ", src_arg.sizes(), ", got ", size, ".");
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t wanted = size[static_cast<size_t>(d)];
    TORCH_CHECK_VALUE(wanted >= 1 && wanted <= (1 << 24) && src_arg.size(d + 2) >= 1 &&
                          src_arg.size(d + 2) <= (1 << 24),
                      "torchq.resampling: sizes must lie in [1, 2^24], got src ", src_arg.sizes(),
                      " and size ", size, ".");
    output[d + 3 - dims] = wanted;
    pixels *= wanted;
    TORCH_CHECK_VALUE(pixels < (int64_t{1} << 31),
                      "torchq.resampling: dst must have fewer than 2^31 positions, got size ", size,
                      ".");
  }
  const at::Tensor dst =
      empty_channels_last(src.batch, src.channels, size, scalar_type(params[1].dtype));
  const RealOutput out({"resampling", tier, params[1], post_ops, post_op_srcs}, dst);
  trace.describe([&] { return describe_call({src_arg}, dst, c10::str("alg:", alg), post_ops); });
  if (is_done(dst)) return dst;
  Taps taps;
  for (int d = 0; d < 3; ++d) {
    for (int64_t o = 0; o < output[d]; ++o)
      taps[static_cast<size_t>(d)].push_back(
          tap_of(o, output[d], src.size[d], alg == "linear" && src.size[d] != output[d]));
  }
  if (alg == "nearest" && post_ops.empty() && keeps_bytes(params[0], params[1])) {
    copy_nearest(src, taps, output, static_cast<uint8_t*>(dst.mutable_data_ptr()));
    return dst;
  }
  blend_lines(src, taps, output, tier, params[0], out);
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { torchq::implement<&torchq::resampling>(m, "resampling"); }
