// SPDX-License-Identifier: Apache-2.0
// Epilogue of nearly every layer, on accumulators in registers: a folded chain to 8 bits or to
// float32. The other forms are in epilogue.h.
#pragma once

#include "kernels/epilogue/epilogue.h"
#include "kernels/gemm/contract.h"

namespace {

/// Returns true if register_epilogue takes these accumulators.
TORCHQ_INLINE bool fits_register_epilogue(const Epilogue& e, int channels, int panels) {
  return is_byte_epilogue(e) && channels == panels * kPanel;
}

/// Returns true without sums and without bounds but those of the type. Tested before the epilogue
/// of a tile, it frees the registers that these would keep.
TORCHQ_INLINE bool is_plain(const Epilogue& e) {
  return e.num_sums == 0 && e.lo == nullptr && !e.clamp;
}

template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

/// One panel of all rows: its parameters are loaded once (with 24 accumulators live, loading them
/// again for every row was the bottleneck at K = 64). kTail: the lanes of `mask` only.
template <class Isa, int MR, int NP, bool kTail, bool kPlain = false>
TORCHQ_INLINE void panel_epilogue(const Epilogue& e, typename Isa::Int (&acc)[MR][NP], int p,
                                  const int64_t* dst_offset, int channel, typename Isa::Mask mask) {
  using Float = typename Isa::Float;
  const int n = channel + p * kPanel;
  const auto load = [&](const float* values) {
    if constexpr (kTail) return Isa::load(values + n, mask);
    return Isa::load(values + n);
  };
  const auto load_old = [&](const uint8_t* old, auto is_signed) {
    if constexpr (decltype(is_signed)::value) {
      if constexpr (kTail) return Isa::to_float(Isa::load_s8(old, mask));
      return Isa::to_float(Isa::load_s8(old));
    } else {
      if constexpr (kTail) return Isa::to_float(Isa::load_u8(old, mask));
      return Isa::to_float(Isa::load_u8(old));
    }
  };
  const Float multiplier = load(e.multiplier), offset = load(e.offset);
  Float y[MR];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) { y[r] = scaled<Isa>(acc[r][p], multiplier, offset); }
  if constexpr (!kPlain) {
    for (int s = 0; s < e.num_sums; ++s) {
      const Float factor = load(e.sums[s].scale);
      const uint8_t* old = static_cast<const uint8_t*>(e.sums[s].data) + n;
      // Sums of other types never get here: they need the guard.
      if (e.sums[s].dtype == DType::u8) {
        TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
          y[r] = Isa::fma(load_old(old + dst_offset[r], Flag<false>{}), factor, y[r]);
        }
      } else {
        TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
          y[r] = Isa::fma(load_old(old + dst_offset[r], Flag<true>{}), factor, y[r]);
        }
      }
    }
    if (e.lo != nullptr || e.clamp) {
      const Float lo = e.lo != nullptr ? load(e.lo) : Isa::set(e.lo_scalar);
      const Float hi = e.lo != nullptr ? load(e.hi) : Isa::set(e.hi_scalar);
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) y[r] = Isa::min(Isa::max(y[r], lo), hi);
    }
  }
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) acc[r][p] = Isa::to_int(y[r]);
}

/// Overwrites the accumulators. `channel` is the first of full panels.
template <class Isa, int MR, int NP, bool kPlain = false>
TORCHQ_INLINE void register_epilogue(const Epilogue& e, typename Isa::Int (&acc)[MR][NP],
                                     const int64_t* dst_offset, int channel) {
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    panel_epilogue<Isa, MR, NP, false, kPlain>(e, acc, p, dst_offset, channel, {});
  }
  uint8_t* dst = static_cast<uint8_t*>(e.dst) + channel;
  const bool is_signed = e.dst_dtype == DType::s8;
  if constexpr (NP == Isa::kMaxPanels && NP > 1) {
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      Isa::store_row(dst + dst_offset[r], acc[r], is_signed);
    }
    return;
  }
  constexpr int kGroup = Isa::kStoredPanels, kGrouped = MR * NP / kGroup * kGroup;
  const auto place = [&](int i) { return dst + dst_offset[i / NP] + i % NP * kPanel; };
  TORCHQ_UNROLL for (int first = 0; first < kGrouped; first += kGroup) {
    typename Isa::Int panels[kGroup];
    uint8_t* places[kGroup];
    TORCHQ_UNROLL for (int i = 0; i < kGroup; ++i) {
      panels[i] = acc[(first + i) / NP][(first + i) % NP];
      places[i] = place(first + i);
    }
    Isa::store_panels(places, panels, is_signed);
  }
  TORCHQ_UNROLL for (int i = kGrouped; i < MR * NP; ++i) {
    Isa::store_panel(place(i), acc[i / NP][i % NP], is_signed);
  }
}

/// Returns true for a folded chain to float32 whose sums are float32, too.
TORCHQ_INLINE bool is_float_epilogue(const Epilogue& e) {
  bool has_others = false;
  for (int s = 0; s < e.num_sums; ++s) has_others |= e.sums[s].dtype != DType::f32;
  const bool one_term = e.row_terms == nullptr || e.group_channels == e.channels;
  return e.mode == Epilogue::kFolded && e.dst_dtype == DType::f32 && one_term && !has_others;
}

/// `channel` is the first of full panels. Measured on Zen 5, beside a tile in L1, 128 rows: 64 to
/// 256 channels take 0.66 of the time, 768 to 768 0.93, with a sum 0.89.
template <class Isa, int MR, int NP>
TORCHQ_INLINE void float_epilogue(const Epilogue& e, typename Isa::Int (&acc)[MR][NP],
                                  const int64_t* dst_offset, int channel) {
  using Float = typename Isa::Float;
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    const int n = channel + p * kPanel;
    if (e.row_terms != nullptr) {
      const auto factor = Isa::load_int(e.channel_terms + n);
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        const auto term = Isa::set_int(e.row_terms[dst_offset[r] / e.channels]);
        acc[r][p] = Isa::sub(acc[r][p], Isa::mul(term, factor));
      }
    }
    const Float nan = Isa::set(Math<Isa>::kNan), multiplier = Isa::load(e.multiplier + n);
    // Without sums and scales of rows, whose NaNs are replaced below, it is NaN where y is.
    const Float offset = Isa::replace_nan(Isa::load(e.offset + n), nan);
    Float y[MR];
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      y[r] = scaled<Isa>(acc[r][p], multiplier, offset);
    }
    if (e.row_scale != nullptr) {
      const Float bias = e.row_bias != nullptr ? Isa::load(e.row_bias + n) : offset;
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        y[r] = Isa::replace_nan(scale_row<Isa>(e, y[r], dst_offset[r], bias), nan);
      }
    }
    for (int s = 0; s < e.num_sums; ++s) {
      const Float factor = Isa::load(e.sums[s].scale + n);
      const float* old = static_cast<const float*>(e.sums[s].data) + n;
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        y[r] = Isa::replace_nan(Isa::fma(Isa::load(old + dst_offset[r]), factor, y[r]), nan);
      }
    }
    if (e.lo != nullptr || e.clamp) {
      const Float lo = e.lo != nullptr ? Isa::load(e.lo + n) : Isa::set(e.lo_scalar);
      const Float hi = e.lo != nullptr ? Isa::load(e.hi + n) : Isa::set(e.hi_scalar);
      // In this order NaN stays NaN.
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) y[r] = Isa::min(hi, Isa::max(lo, y[r]));
    }
    float* dst = static_cast<float*>(e.dst) + n;
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) Isa::store(dst + dst_offset[r], y[r]);
  }
}

/// register_epilogue where the last panel is not full, on tiers with Isa::kMasksTails.
/// Measured on Emerald Rapids, beside a tile in L1: 1x1 of 96 to 24 and 120 to 40 channels take
/// 0.88 and 0.86 of the time, of 144 to 24 with a sum 0.85.
template <class Isa, int MR, int NP>
TORCHQ_INLINE void register_tail_epilogue(const Epilogue& e, typename Isa::Int (&acc)[MR][NP],
                                          const int64_t* dst_offset, int channel, int channels) {
  TORCHQ_UNROLL for (int p = 0; p < NP - 1; ++p) {
    panel_epilogue<Isa, MR, NP, false>(e, acc, p, dst_offset, channel, {});
  }
  panel_epilogue<Isa, MR, NP, true>(e, acc, NP - 1, dst_offset, channel,
                                    Isa::mask(channels - (NP - 1) * kPanel));
  uint8_t* dst = static_cast<uint8_t*>(e.dst) + channel;
  const bool is_signed = e.dst_dtype == DType::s8;
  // Rows in a vector of bytes: four of one panel, two of two, else one.
  constexpr int kRows = NP > 2 ? 1 : 4 / NP, kWhole = MR / kRows * kRows;
  TORCHQ_UNROLL for (int first = 0; first < kWhole; first += kRows) {
    typename Isa::Int panels[4];
    TORCHQ_UNROLL for (int i = 0; i < 4; ++i) {
      panels[i] = NP > 2 ? acc[first][i % NP] : acc[first + i / NP][i % NP];
    }
    Isa::store_rows(dst, dst_offset + first, kRows, Isa::pack_row(panels, is_signed), channels);
  }
  TORCHQ_UNROLL for (int r = kWhole; r < MR; ++r) {
    const typename Isa::Int panels[4] = {acc[r][0], acc[r][NP - 1], acc[r][0], acc[r][NP - 1]};
    Isa::store_rows(dst, dst_offset + r, 1, Isa::pack_row(panels, is_signed), channels);
  }
}

/// Epilogue of a tile of MR rows from `first` on and NP panels from `panel` on.
template <class Isa, int MR, int NP>
TORCHQ_INLINE void tile_epilogue(const GemmTile& t, const Epilogue& e,
                                 typename Isa::Int (&acc)[MR][NP], int first, int panel) {
  const int channel = panel * kPanel, channels = min_int(t.channels - channel, NP * kPanel);
  const int64_t* const dst_offset = t.dst_offset + first;
  if (fits_register_epilogue(e, channels, NP)) {
    if (NP < Isa::kMaxPanels && is_plain(e)) {
      register_epilogue<Isa, MR, NP, true>(e, acc, dst_offset, t.channel + channel);
    } else {
      register_epilogue<Isa, MR, NP>(e, acc, dst_offset, t.channel + channel);
    }
    return;
  }
  if (channels == NP * kPanel && is_float_epilogue(e)) {
    pin_sums<Isa>(acc);
    float_epilogue<Isa, MR, NP>(e, acc, dst_offset, t.channel + channel);
    return;
  }
  if constexpr (Isa::kMasksTails && NP < Isa::kMaxPanels) {
    if (is_byte_epilogue(e)) {
      register_tail_epilogue<Isa, MR, NP>(e, acc, dst_offset, t.channel + channel, channels);
      return;
    }
  }
  alignas(64) int32_t tile[MR * NP * kPanel];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
      Isa::store_int(tile + (r * NP + p) * kPanel, acc[r][p]);
    }
  }
  memory_epilogue<Isa>({tile, MR, NP, dst_offset, t.channel + channel, channels}, e);
}

}  // namespace
