// SPDX-License-Identifier: Apache-2.0
// The meaning of every kernel in plain loops: the `reference` tier, and the fallback on other
// architectures.
#include <limits.h>
#include <math.h>

#include "eltwise.h"

namespace {

float load_value(const void* base, DType dtype, int64_t index, int32_t zero_point) {
  const void* p = element(base, dtype, index);
  switch (dtype) {
    case DType::u8:
      return static_cast<float>(*static_cast<const uint8_t*>(p) - zero_point);
    case DType::s8:
      return static_cast<float>(*static_cast<const int8_t*>(p) - zero_point);
    case DType::s32: {
      int32_t q;
      memcpy(&q, p, sizeof q);
      return static_cast<float>(int64_t{q} - zero_point);
    }
    default: {
      float x;
      memcpy(&x, p, sizeof x);
      return x;
    }
  }
}

float max_float(float a, float b) { return a > b ? a : b; }
float min_float(float a, float b) { return a < b ? a : b; }

/// Integers: rne, saturated, NaN becomes zero_point. f32: as it is, every NaN the same.
void store_value(void* base, DType dtype, int64_t index, float y, float zero_point) {
  void* p = element(base, dtype, index);
  if (dtype == DType::f32) {
    if (y != y) y = Math<Scalar>::kNan;
    memcpy(p, &y, sizeof y);
    return;
  }
  if (y != y) y = zero_point;
  if (dtype == DType::s32) {
    const int32_t q = y >= 2147483648.0f   ? INT_MAX
                      : y < -2147483648.0f ? INT_MIN
                                           : static_cast<int32_t>(nearbyintf(y));
    memcpy(p, &q, sizeof q);
  } else if (dtype == DType::s8) {
    *static_cast<int8_t*>(p) = static_cast<int8_t>(nearbyintf(min_float(max_float(y, -128), 127)));
  } else {
    *static_cast<uint8_t*>(p) = static_cast<uint8_t>(nearbyintf(min_float(max_float(y, 0), 255)));
  }
}

/// Note [One operation sequence] in math.h: what an eltwise algorithm computes is stated there.
float apply_chain_op(const Epilogue& e, const ChainOp& op, float x, int channel, int64_t index) {
  const auto source = [&](int i) {
    return load_value(e.sums[i].data, e.sums[i].dtype, index, e.sums[i].zero_point);
  };
  float y = x;
  if (op.kind == ChainOp::kEltwise) {
    with_eltwise<Scalar>(op.eltwise, [&](auto f) { y = f(x); });
    return y;
  }
  if (op.kind == ChainOp::kSum) return fmaf(e.sums[op.src].chain_scale, source(op.src), x);
  const float v = op.values != nullptr ? op.values[channel] : source(op.src);
  if (op.binary == Binary::select) return source(op.condition) != 0 ? x : v;
  with_binary<Scalar>(op.binary, [&](auto f) { y = f(x, v); });
  return y;
}

void finish_chain(const Epilogue& e, float x, int channel, int64_t index) {
  for (int i = 0; i < e.num_ops; ++i) x = apply_chain_op(e, e.ops[i], x, channel, index);
  const float y = e.dst_dtype == DType::f32 ? x : fmaf(x, e.inv_scale[channel], e.zero_point);
  store_value(e.dst, e.dst_dtype, index, y, e.zero_point);
}

void finish(const Epilogue& e, int32_t acc, int channel, int64_t index) {
  if (e.row_terms != nullptr) {
    const int groups = e.channels / e.group_channels;
    const int32_t term = e.row_terms[index / e.channels * groups + channel / e.group_channels];
    const uint32_t product =
        static_cast<uint32_t>(term) * static_cast<uint32_t>(e.channel_terms[channel]);
    acc = static_cast<int32_t>(static_cast<uint32_t>(acc) - product);
  }
  if (e.mode == Epilogue::kRaw) {
    memcpy(element(e.dst, DType::s32, index), &acc, sizeof acc);
    return;
  }
  float y = fmaf(static_cast<float>(acc), e.multiplier[channel], e.offset[channel]);
  if (e.mode == Epilogue::kFolded) {
    if (e.row_scale != nullptr) y = y * e.row_scale[index / e.channels];
    if (e.row_bias != nullptr) y = y + e.row_bias[channel];
    for (int s = 0; s < e.num_sums; ++s) {
      y = fmaf(load_value(e.sums[s].data, e.sums[s].dtype, index, 0), e.sums[s].scale[channel], y);
    }
    if (e.lo != nullptr) {
      y = min_float(e.hi[channel], max_float(e.lo[channel], y));
    } else if (e.clamp) {
      y = min_float(e.hi_scalar, max_float(e.lo_scalar, y));
    }
  } else {
    return finish_chain(e, y, channel, index);
  }
  store_value(e.dst, e.dst_dtype, index, y, e.zero_point);
}

void finish_row(float* x, int64_t size, const Epilogue& e) {
  for (int64_t i = 0; i < size; ++i) finish_chain(e, x[i], static_cast<int>(i), i);
}

int32_t unsigned_src(uint8_t byte, bool flip) { return flip ? byte ^ 0x80 : byte; }

void gemm(const GemmTile& t, const Epilogue& e) {
  for (int r = 0; r < t.rows; ++r) {
    for (int n = 0; n < t.channels; ++n) {
      const int8_t* panel = t.weight + n / kPanel * t.panel_stride;
      uint32_t acc = static_cast<uint32_t>(t.acc_init[n]);
      for (int i = 0; i < t.num_runs; ++i) {
        const uint8_t* src = t.src + t.row_offset[r] + t.runs[i].src_offset;
        const int8_t* weight = panel + t.runs[i].weight_offset + n % kPanel * kQuad;
        for (int64_t k = 0; k < t.runs[i].quads * kQuad; ++k) {
          const int32_t w = weight[k / kQuad * kPanel * kQuad + k % kQuad];
          acc += static_cast<uint32_t>(unsigned_src(src[k], t.flip) * w);
        }
      }
      finish(e, static_cast<int32_t>(acc), t.channel + n, t.dst_offset[r] + t.channel + n);
    }
  }
}

void small_groups(const GemmTile& t, const Epilogue& e) {
  const int group = t.group_quads * kQuad;
  for (int r = 0; r < t.rows; ++r) {
    for (int n = 0; n < t.channels; ++n) {
      const int panel = n / kPanel;
      const int first = min_int(panel * kPanel, t.channels - kPanel);
      const int output = (n - first) % group, input = n - output - first;
      uint32_t acc = static_cast<uint32_t>(t.acc_init[n]);
      for (int i = 0; i < t.num_runs; ++i) {
        const uint8_t* src = t.src + first + t.row_offset[r] + t.runs[i].src_offset;
        const int8_t* vectors = t.weight + panel * t.panel_stride + t.runs[i].weight_offset;
        const int8_t* weight = vectors + (output / kQuad * kPanel + output % kQuad * kQuad) * kQuad;
        for (int k = input; k < input + group; ++k) {
          acc += static_cast<uint32_t>(unsigned_src(src[k], t.flip) * weight[k]);
        }
      }
      finish(e, static_cast<int32_t>(acc), t.channel + n, t.dst_offset[r] + t.channel + n);
    }
  }
}

void compensate(const int32_t* compensation, int64_t stride, const int32_t* taps, int num_taps,
                const int32_t* bias, int32_t zero_point, int64_t n, int32_t* acc_init) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t sum = 0;
    for (int t = 0; t < num_taps; ++t) {
      sum += static_cast<uint32_t>(compensation[taps[t] * stride + i]);
    }
    const uint32_t init = bias == nullptr ? 0 : static_cast<uint32_t>(bias[i]);
    acc_init[i] = static_cast<int32_t>(init - sum * static_cast<uint32_t>(zero_point));
  }
}

void pack_panel(const PanelSource& s, int8_t* dst, int32_t* sums) {
  memset(dst, 0, static_cast<size_t>((s.k + kQuad - 1) / kQuad * kPanel * kQuad));
  memset(sums, 0, kPanel * sizeof(int32_t));
  for (int n = 0; n < s.channels; ++n) {
    for (int64_t k = 0; k < s.k; ++k) {
      const uint8_t q = s.data[k * s.k_stride + n * s.channel_stride];
      const int8_t w = static_cast<int8_t>(s.flip ? q ^ 0x80 : q);
      dst[(k / kQuad * kPanel + n) * kQuad + k % kQuad] = w;
      sums[n] += w;
    }
  }
}

int32_t sum_bytes(const uint8_t* src, int64_t size, bool flip) {
  int32_t sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += unsigned_src(src[i], flip);
  return sum;
}

int64_t depthwise_bytes(const DepthwiseLayer&) { return 0; }

void depthwise(const DepthwiseLayer& d, const DepthwiseRows& rows, const Epilogue& e, void*) {
  const auto tap_row = [&](const uint8_t* const* src, int tap, int64_t x) {
    const int64_t pixel = x * d.stride + tap % d.width * d.dilation - d.pad_begin;
    const bool inside = pixel >= 0 && pixel < d.src_pixels;
    return inside ? src[tap / d.width] + pixel * d.channels : d.padding;
  };
  for (int64_t i = 0; i < rows.count * d.dst_pixels; ++i) {
    const int64_t row = i / d.dst_pixels, x = i % d.dst_pixels;
    for (int c = 0; c < d.channels; ++c) {
      const int8_t* weight =
          d.packed + (int64_t{c / kPanel} * d.quads * kPanel + c % kPanel) * kQuad;
      uint32_t acc = static_cast<uint32_t>(d.acc_init[c]);
      for (int t = 0; t < d.quads * kQuad; ++t) {
        if (d.taps[t] < 0) continue;
        const uint8_t q = tap_row(rows.src + row * d.kernel_rows, d.taps[t], x)[c];
        const int32_t w = weight[t / kQuad * kPanel * kQuad + t % kQuad];
        acc += static_cast<uint32_t>(unsigned_src(q, d.flip) * w);
      }
      finish(e, static_cast<int32_t>(acc), c, rows.dst_offset[row] + x * d.channels + c);
    }
  }
}

void max_pool(const PoolRow& p) {
  for (int64_t i = 0; i < p.windows * p.channels; ++i) {
    const int64_t at = i / p.channels * p.step + i % p.channels;
    uint8_t best = p.taps[0][at];
    for (int t = 1; t < p.num_taps; ++t) {
      const uint8_t q = p.taps[t][at];
      const bool greater =
          p.is_signed ? static_cast<int8_t>(q) > static_cast<int8_t>(best) : q > best;
      if (greater) best = q;
    }
    static_cast<uint8_t*>(p.dst)[i] = best;
  }
}

void avg_pool(const PoolRow& p) {
  for (int64_t i = 0; i < p.windows * p.channels; ++i) {
    const int64_t at = i / p.channels * p.step + i % p.channels;
    int32_t sum = p.bias;
    for (int t = 0; t < p.num_taps; ++t) {
      sum += p.is_signed ? static_cast<int8_t>(p.taps[t][at]) : p.taps[t][at];
    }
    store_value(p.dst, p.dst_dtype, i, static_cast<float>(sum) / p.divisor, 0);
  }
}

void convert(const ConvertRow& c) {
  for (int64_t i = 0; i < c.size; ++i) {
    const float x = load_value(c.src, c.src_dtype, i, c.src_zero_point[i * c.src_zero_point_step]);
    const float zero_point = static_cast<float>(c.dst_zero_point[i * c.dst_zero_point_step]);
    const float factor = c.factor[i * c.factor_step];
    const float y = c.dst_dtype == DType::f32 ? x * factor : fmaf(x, factor, zero_point);
    store_value(c.dst, c.dst_dtype, i, y, zero_point);
  }
}

int32_t load_operand(const void* src, DType dtype, int64_t index) {
  return dtype == DType::u8 ? static_cast<const uint8_t*>(src)[index]
                            : static_cast<const int8_t*>(src)[index];
}

template <class Value>
void binary_rows(const BinaryRows& b, Value value) {
  for (int64_t i = 0; i < b.size * b.rows; ++i) {
    const float y = value(load_operand(b.src0, b.dtype0, i * b.step0),
                          load_operand(b.src1, b.dtype1, i % b.size * b.step1));
    store_value(b.dst, b.dst_dtype, i, max_float(b.lo, y), b.lo);
  }
}

void add(const BinaryRows& b) {
  binary_rows(b, [&](int32_t q0, int32_t q1) {
    return fmaf(static_cast<float>(q0), b.m0, fmaf(static_cast<float>(q1), b.m1, b.c));
  });
}

void mul(const BinaryRows& b) {
  binary_rows(b, [&](int32_t q0, int32_t q1) {
    return fmaf(static_cast<float>((q0 - b.z0) * (q1 - b.z1)), b.m0, b.c);
  });
}

void lookup(const uint8_t* src, const uint8_t* table, uint8_t* dst, int64_t size) {
  for (int64_t i = 0; i < size; ++i) dst[i] = table[src[i]];
}

}  // namespace

#include "reference_attention.h"
#include "reference_rnn.h"

namespace torchq {
constinit const Kernels kReferenceKernels = {
    .isa = "reference",
    .widening = 1,
    .rnn_widening = 1,
    .matrix = nullptr,
    .gemm = &gemm,
    .gemm_narrow = nullptr,
    .gemm_split = nullptr,
    .gemm_groups = nullptr,
    .small_groups = &small_groups,
    .small_groups_narrow = nullptr,
    .widen = nullptr,
    .clip = nullptr,
    .widen_src = nullptr,
    .compensate = &compensate,
    .pack_panel = &pack_panel,
    .sum_bytes = &sum_bytes,
    .depthwise_bytes = &depthwise_bytes,
    .depthwise = &depthwise,
    .max_pool = &max_pool,
    .avg_pool = &avg_pool,
    .convert = &convert,
    .add = &add,
    .mul = &mul,
    .lookup = &lookup,
    .rnn_input = &rnn_input,
    .rnn_step = &rnn_step,
    .rnn_pieces = nullptr,
    .quantize_row = &quantize_row,
    .finish_row = &finish_row,
    .row_range = &row_range,
    .softmax = &softmax,
    .moments = &moments,
    .row_moments = &row_moments,
    .affine = &affine,
    .blend = &blend,
    .reduce = &reduce,
    .quantize_symmetric = &quantize_symmetric,
    .attention_weights = &attention_weights,
    .attention_means = &attention_means,
};
}  // namespace torchq
