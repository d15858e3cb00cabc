// SPDX-License-Identifier: Apache-2.0
// From int32 accumulators to the destination, shared by gemm and depthwise (contract: Epilogue in
// contract.h).
//
// Three forms. `register_epilogue` (register_epilogue.h) works on accumulators in registers and
// serves nearly every layer: folded chains to 8 bits, with masks for partial panels, and to float32
// in full tiles. The other two work on a tile in L1: `memory_byte_epilogue` where channels do not
// fill their panels and masks cost too much, and `memory_epilogue` for everything else, the float
// chain interpreter included (cost of the detour: 4 % at K = 64, 1 % at K = 512).
#pragma once

#include "kernels/epilogue/eltwise.h"

namespace {

/// float(q - zero_point) of the exact difference; f32 data take zero_point 0.
template <class Isa>
TORCHQ_INLINE typename Isa::Float load_as_float(const void* base, DType dtype, int64_t index,
                                                typename Isa::Int zero_point,
                                                typename Isa::Mask mask) {
  const void* p = element(base, dtype, index);
  if (dtype == DType::f32) return Isa::load(static_cast<const float*>(p), mask);
  if (dtype == DType::s32) {
    return Isa::difference(Isa::load_int(static_cast<const int32_t*>(p), mask), zero_point);
  }
  const auto q = dtype == DType::u8 ? Isa::load_u8(p, mask) : Isa::load_s8(p, mask);
  return Isa::to_float(Isa::sub(q, zero_point));
}

/// y in destination units (integers: rounded, saturated, NaN becomes zero_point) or real units
/// (f32: NaN becomes the one of Note [One operation sequence]).
template <class Isa, DType kDtype>
TORCHQ_INLINE void store_as(void* base, int64_t index, typename Isa::Float y,
                            typename Isa::Float zero_point, typename Isa::Mask mask) {
  void* dst = element(base, kDtype, index);
  if constexpr (kDtype == DType::f32) {
    y = Isa::replace_nan(y, Isa::set(Math<Isa>::kNan));
    return Isa::store(static_cast<float*>(dst), y, mask);
  }
  y = Isa::replace_nan(y, zero_point);
  if constexpr (kDtype == DType::s32) {
    return Isa::store_int(static_cast<int32_t*>(dst), Isa::to_int_saturated(y), mask);
  }
  constexpr bool kSigned = kDtype == DType::s8;
  y = Isa::max(y, Isa::set(kSigned ? -128.0f : 0.0f));
  y = Isa::min(y, Isa::set(kSigned ? 127.0f : 255.0f));
  if constexpr (kSigned) {
    Isa::store_s8(dst, Isa::to_int(y), mask);
  } else {
    Isa::store_u8(dst, Isa::to_int(y), mask);
  }
}

/// The same of Isa::kStoredPanels adjacent panels. To 8 bits it clamps and looks for NaN only where
/// a value is beyond int32, since packing saturates.
template <class Isa, DType kDtype>
TORCHQ_INLINE void store_panels_as(void* base, int64_t index,
                                   const typename Isa::Float (&y)[Isa::kStoredPanels],
                                   typename Isa::Float zero_point) {
  if constexpr (kDtype == DType::u8 || kDtype == DType::s8) {
    typename Isa::Int q[Isa::kStoredPanels];
    TORCHQ_UNROLL for (int v = 0; v < Isa::kStoredPanels; ++v) q[v] = Isa::to_int(y[v]);
    if (__builtin_expect(!Isa::any_invalid(q), 1)) {
      return Isa::store_row(static_cast<uint8_t*>(base) + index, q, kDtype == DType::s8);
    }
  }
  TORCHQ_UNROLL for (int v = 0; v < Isa::kStoredPanels; ++v) {
    store_as<Isa, kDtype>(base, index + v * kPanel, y[v], zero_point, Isa::mask(kPanel));
  }
}

/// use(tag), whose `value` is dtype: asked once, in front of a loop.
template <DType kDtype>
struct DTypeTag {
  static constexpr DType value = kDtype;
};
template <class Use>
TORCHQ_INLINE void with_dtype(DType dtype, Use use) {
  switch (dtype) {
    case DType::u8:
      return use(DTypeTag<DType::u8>{});
    case DType::s8:
      return use(DTypeTag<DType::s8>{});
    case DType::s32:
      return use(DTypeTag<DType::s32>{});
    case DType::f32:
      return use(DTypeTag<DType::f32>{});
  }
}

template <class Isa>
TORCHQ_INLINE void store_float(void* base, DType dtype, int64_t index, typename Isa::Float y,
                               typename Isa::Float zero_point, typename Isa::Mask mask) {
  with_dtype(dtype, [&](auto tag) {
    store_as<Isa, decltype(tag)::value>(base, index, y, zero_point, mask);
  });
}

/// body(i, lanes that are valid) for each panel of a row; the mask of whole panels is a constant.
template <class Isa, class Body>
TORCHQ_INLINE void for_each_row_panel(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + kPanel <= size; i += kPanel) body(i, Isa::mask(kPanel));
  if (i < size) body(i, Isa::mask(static_cast<int>(size - i)));
}

/// Stores value(row * size + i, shared(i, lanes), lanes that are valid) for each panel i of rows
/// side by side; what the rows share is asked for once.
template <class Isa, DType kDtype, class Shared, class Value>
TORCHQ_INLINE void store_rows_as(void* base, int64_t size, int64_t rows,
                                 typename Isa::Float zero_point, Shared shared, Value value) {
  constexpr int kVectors = Isa::kStoredPanels;
  const auto all = Isa::mask(kPanel);
  int64_t i = 0;
  for (; i + kVectors * kPanel <= size; i += kVectors * kPanel) {
    decltype(shared(i, all)) s[kVectors];
    TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) s[v] = shared(i + v * kPanel, all);
    for (int64_t at = i; at < rows * size; at += size) {
      typename Isa::Float y[kVectors];
      TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) y[v] = value(at + v * kPanel, s[v], all);
      store_panels_as<Isa, kDtype>(base, at, y, zero_point);
    }
  }
  for (; i < size; i += kPanel) {
    const auto m = Isa::mask(min_int(size - i, kPanel));
    const auto s = shared(i, m);
    for (int64_t at = i; at < rows * size; at += size)
      store_as<Isa, kDtype>(base, at, value(at, s, m), zero_point, m);
  }
}

/// Stores value(i, lanes that are valid) for each panel i of a row.
template <class Isa, DType kDtype, class Value>
TORCHQ_INLINE void store_row_as(void* base, int64_t size, typename Isa::Float zero_point,
                                Value value) {
  struct Nothing {};
  store_rows_as<Isa, kDtype>(
      base, size, 1, zero_point, [](int64_t, auto) { return Nothing{}; },
      [&](int64_t i, Nothing, auto m) { return value(i, m); });
}

/// Returns true for a folded chain to 8 bits that the conversion alone saturates: nearly every
/// layer.
TORCHQ_INLINE bool is_byte_epilogue(const Epilogue& e) {
  return e.mode == Epilogue::kFolded && element_size(e.dst_dtype) == 1 && !e.guard;
}

/// Rows x panels of accumulators in memory; row r starts at tile + r * panels * 16. Overwritten
/// with floats.
struct EpilogueTile {
  int32_t* tile;
  int rows, panels;
  const int64_t* dst_offset;
  int channel, channels;
};

/// Calls body(row, channel within the tile's panels, tile values, valid lanes) for every panel of
/// every row.
template <class Isa, class Body>
TORCHQ_INLINE void for_each_panel(const EpilogueTile& t, Body body) {
  for (int r = 0; r < t.rows; ++r) {
    for (int p = 0; p < t.panels; ++p) {
      const int n = p * kPanel;
      if (n >= t.channels) break;
      body(r, n, t.tile + (r * t.panels + p) * kPanel, Isa::mask(t.channels - n));
    }
  }
}

/// y * row_scale + row_bias: see Epilogue. `bias` is that of y's channels.
template <class Isa>
TORCHQ_INLINE typename Isa::Float scale_row(const Epilogue& e, typename Isa::Float y,
                                            int64_t dst_offset, typename Isa::Float bias) {
  y = Isa::mul(y, Isa::set(e.row_scale[dst_offset / e.channels]));
  return e.row_bias != nullptr ? Isa::add(y, bias) : y;
}

template <class Isa>
TORCHQ_NOINLINE void run_chain_op(const EpilogueTile& t, const Epilogue& e, const ChainOp& op) {
  using Float = typename Isa::Float;
  using Mask = typename Isa::Mask;
  const auto apply = [&](auto f) {
    for_each_panel<Isa>(t, [&](int r, int n, int32_t* tile, Mask m) {
      float* x = reinterpret_cast<float*>(tile);
      Isa::store(x, f(Isa::load(x), r, n, m));
    });
  };
  const auto source = [&](const SumSrc& src, int r, int n, Mask m) {
    const int64_t index = t.dst_offset[r] + t.channel + n;
    return load_as_float<Isa>(src.data, src.dtype, index, Isa::set_int(src.zero_point), m);
  };
  if (op.kind == ChainOp::kEltwise) {
    return with_eltwise<Isa>(op.eltwise,
                             [&](auto f) { apply([&](Float x, int, int, Mask) { return f(x); }); });
  }
  if (op.kind == ChainOp::kSum) {
    const SumSrc& sum = e.sums[op.src];
    const Float factor = Isa::set(sum.chain_scale);
    return apply(
        [&](Float x, int r, int n, Mask m) { return Isa::fma(factor, source(sum, r, n, m), x); });
  }
  const auto operand = [&](int r, int n, Mask m) {
    return op.values != nullptr ? Isa::load(op.values + t.channel + n, m)
                                : source(e.sums[op.src], r, n, m);
  };
  if (op.binary == Binary::select) {
    return apply([&](Float x, int r, int n, Mask m) {
      const auto is_false = Isa::equal(source(e.sums[op.condition], r, n, m), Isa::set(0.0f));
      return Isa::select(is_false, operand(r, n, m), x);
    });
  }
  with_binary<Isa>(op.binary, [&](auto f) {
    apply([&](Float x, int r, int n, Mask m) { return f(x, operand(r, n, m)); });
  });
}

/// acc -= row_terms[row][group of n] * channel_terms[n], modulo 2^32.
template <class Isa>
TORCHQ_NOINLINE void subtract_row_terms(const EpilogueTile& t, const Epilogue& e) {
  const int groups = e.channels / e.group_channels;
  for (int r = 0; r < t.rows; ++r) {
    const int32_t* terms = e.row_terms + t.dst_offset[r] / e.channels * groups;
    for (int n = 0; n < t.channels; n += kPanel) {
      const int channel = t.channel + n, count = min_int(t.channels - n, kPanel);
      const auto m = Isa::mask(count);
      const int first = channel / e.group_channels;
      auto term = Isa::set_int(terms[first]);
      if (e.group_channels == 1) {
        term = Isa::load_int(terms + channel, m);
      } else if ((channel + count - 1) / e.group_channels != first) {
        int32_t lanes[kPanel] = {};
        for (int i = 0; i < count; ++i) lanes[i] = terms[(channel + i) / e.group_channels];
        term = Isa::load_int(lanes);
      }
      int32_t* tile = t.tile + r * t.panels * kPanel + n;
      const auto factor = Isa::load_int(e.channel_terms + channel, m);
      Isa::store_int(tile, Isa::sub(Isa::load_int(tile), Isa::mul(term, factor)));
    }
  }
}

/// The 8-bit form (is_byte_epilogue) of channels that do not fill their panels. Against the general
/// form: 1x1 of 96 to 24 channels 1.1x faster, of 72 to 24 with a sum 1.2x.
template <class Isa>
TORCHQ_NOINLINE void memory_byte_epilogue(const EpilogueTile& t, const Epilogue& e) {
  using Float = typename Isa::Float;
  const bool is_signed = e.dst_dtype == DType::s8;
  for (int p = 0; p * kPanel < t.channels; ++p) {
    const int n = t.channel + p * kPanel;
    const auto m = Isa::mask(t.channels - p * kPanel);
    const Float multiplier = Isa::load(e.multiplier + n, m), offset = Isa::load(e.offset + n, m);
    const bool per_channel = e.lo != nullptr, clamp = per_channel || e.clamp;
    const Float lo = per_channel ? Isa::load(e.lo + n, m) : Isa::set(e.lo_scalar);
    const Float hi = per_channel ? Isa::load(e.hi + n, m) : Isa::set(e.hi_scalar);
    for (int r = 0; r < t.rows; ++r) {
      const int32_t* tile = t.tile + (r * t.panels + p) * kPanel;
      const int64_t index = t.dst_offset[r] + n;
      Float y = scaled<Isa>(Isa::load_int(tile), multiplier, offset);
      for (int s = 0; s < e.num_sums; ++s) {
        const SumSrc& sum = e.sums[s];
        const uint8_t* data = static_cast<const uint8_t*>(sum.data) + index;
        const auto old = sum.dtype == DType::u8 ? Isa::load_u8(data, m) : Isa::load_s8(data, m);
        y = Isa::fma(Isa::to_float(old), Isa::load(sum.scale + n, m), y);
      }
      if (clamp) y = Isa::min(Isa::max(y, lo), hi);
      uint8_t* dst = static_cast<uint8_t*>(e.dst) + index;
      if (is_signed) {
        Isa::store_s8(dst, Isa::to_int(y), m);
      } else {
        Isa::store_u8(dst, Isa::to_int(y), m);
      }
    }
  }
}

template <class Isa>
TORCHQ_NOINLINE void memory_epilogue(const EpilogueTile& t, const Epilogue& e) {
  using Float = typename Isa::Float;
  using Mask = typename Isa::Mask;
  if (is_byte_epilogue(e)) return memory_byte_epilogue<Isa>(t, e);
  if (e.row_terms != nullptr) subtract_row_terms<Isa>(t, e);
  if (e.mode == Epilogue::kRaw) {
    for_each_panel<Isa>(t, [&](int r, int n, int32_t* tile, Mask m) {
      int32_t* dst = static_cast<int32_t*>(e.dst) + t.dst_offset[r] + t.channel + n;
      Isa::store_int(dst, Isa::load_int(tile), m);
    });
    return;
  }
  const auto begin = [&](int r, int n, const int32_t* tile, Mask m) {
    const Float y = scaled<Isa>(Isa::load_int(tile), Isa::load(e.multiplier + t.channel + n, m),
                                Isa::load(e.offset + t.channel + n, m));
    if (e.row_scale == nullptr) return y;
    const bool has_bias = e.row_bias != nullptr;
    return scale_row<Isa>(e, y, t.dst_offset[r],
                          has_bias ? Isa::load(e.row_bias + t.channel + n, m) : y);
  };
  if (e.mode == Epilogue::kFolded) {
    for_each_panel<Isa>(t, [&](int r, int n, int32_t* tile, Mask m) {
      const int64_t index = t.dst_offset[r] + t.channel + n;
      Float y = begin(r, n, tile, m);
      for (int s = 0; s < e.num_sums; ++s) {
        const Float old =
            load_as_float<Isa>(e.sums[s].data, e.sums[s].dtype, index, Isa::zero(), m);
        y = Isa::fma(old, Isa::load(e.sums[s].scale + t.channel + n, m), y);
      }
      if (e.lo != nullptr) {
        y = Isa::max(Isa::load(e.lo + t.channel + n, m), y);
        y = Isa::min(Isa::load(e.hi + t.channel + n, m), y);
      } else if (e.clamp) {
        y = Isa::min(Isa::set(e.hi_scalar), Isa::max(Isa::set(e.lo_scalar), y));
      }
      store_float<Isa>(e.dst, e.dst_dtype, index, y, Isa::set(e.zero_point), m);
    });
    return;
  }
  for_each_panel<Isa>(t, [&](int r, int n, int32_t* tile, Mask m) {
    Isa::store(reinterpret_cast<float*>(tile), begin(r, n, tile, m));
  });
  for (int i = 0; i < e.num_ops; ++i) run_chain_op<Isa>(t, e, e.ops[i]);
  const Float zero_point = Isa::set(e.zero_point);
  for_each_panel<Isa>(t, [&](int r, int n, int32_t* tile, Mask m) {
    Float y = Isa::load(reinterpret_cast<const float*>(tile));
    if (e.dst_dtype != DType::f32) {
      y = Isa::fma(y, Isa::load(e.inv_scale + t.channel + n, m), zero_point);
    }
    store_float<Isa>(e.dst, e.dst_dtype, t.dst_offset[r] + t.channel + n, y, zero_point, m);
  });
}

template <class Isa>
void epilogue_row(float* x, int64_t size, const Epilogue& e) {
  const int64_t start = 0;
  const int panels = static_cast<int>((size + kPanel - 1) / kPanel);
  const EpilogueTile t{reinterpret_cast<int32_t*>(x), 1, panels, &start, 0, static_cast<int>(size)};
  for (int i = 0; i < e.num_ops; ++i) run_chain_op<Isa>(t, e, e.ops[i]);
  const auto zero_point = Isa::set(e.zero_point);
  with_dtype(e.dst_dtype, [&](auto tag) {
    constexpr DType kDtype = decltype(tag)::value;
    store_row_as<Isa, kDtype>(e.dst, size, zero_point, [&](int64_t i, auto m) {
      const auto y = Isa::load(x + i);
      if constexpr (kDtype == DType::f32) return y;
      return Isa::fma(y, Isa::load(e.inv_scale + i, m), zero_point);
    });
  });
}

}  // namespace
