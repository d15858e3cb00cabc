// SPDX-License-Identifier: Apache-2.0
// Lanes that the formulas of recurrent cells run on: those of one cell, or of two or three.
#pragma once

#include "kernels/rnn/rnn_cell.h"

namespace {

/// The lanes of N independent cells whose instructions alternate: a cell alone is a chain of 200
/// cycles, longer than what the CPU looks ahead.
template <class Isa, int N>
struct Cells {
  struct Float {
    typename Isa::Float lanes[N];
  };
  struct Int {
    typename Isa::Int lanes[N];
  };

  /// body(i) of each cell
  template <class Body>
  static TORCHQ_INLINE Float each(const Body& body) {
    Float v;
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) v.lanes[i] = body(i);
    return v;
  }
  template <class Body>
  static TORCHQ_INLINE Int each_int(const Body& body) {
    Int v;
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) v.lanes[i] = body(i);
    return v;
  }
  template <class Body>
  static TORCHQ_INLINE void for_each(Float v, const Body& body) {
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) body(i, v.lanes[i]);
  }
  static TORCHQ_INLINE Float set(float x) {
    return each([&](int) { return Isa::set(x); });
  }
  static TORCHQ_INLINE Float add(Float x, Float y) {
    return each([&](int i) { return Isa::add(x.lanes[i], y.lanes[i]); });
  }
  static TORCHQ_INLINE Float sub(Float x, Float y) {
    return each([&](int i) { return Isa::sub(x.lanes[i], y.lanes[i]); });
  }
  static TORCHQ_INLINE Float mul(Float x, Float y) {
    return each([&](int i) { return Isa::mul(x.lanes[i], y.lanes[i]); });
  }
  static TORCHQ_INLINE Float div(Float x, Float y) {
    return each([&](int i) { return Isa::div(x.lanes[i], y.lanes[i]); });
  }
  static TORCHQ_INLINE Float max(Float x, Float y) {
    return each([&](int i) { return Isa::max(x.lanes[i], y.lanes[i]); });
  }
  static TORCHQ_INLINE Float min(Float x, Float y) {
    return each([&](int i) { return Isa::min(x.lanes[i], y.lanes[i]); });
  }
  static TORCHQ_INLINE Float fma(Float x, Float y, Float z) {
    return each([&](int i) { return Isa::fma(x.lanes[i], y.lanes[i], z.lanes[i]); });
  }
  static TORCHQ_INLINE Float fnma(Float x, Float y, Float z) {
    return each([&](int i) { return Isa::fnma(x.lanes[i], y.lanes[i], z.lanes[i]); });
  }
  static TORCHQ_INLINE Int bits(Float x) {
    return each_int([&](int i) { return Isa::bits(x.lanes[i]); });
  }
  static TORCHQ_INLINE Float from_bits(Int x) {
    return each([&](int i) { return Isa::from_bits(x.lanes[i]); });
  }
  static TORCHQ_INLINE Int add(Int x, Int y) {
    return each_int([&](int i) { return Isa::add(x.lanes[i], y.lanes[i]); });
  }
  template <int kBits>
  static TORCHQ_INLINE Int shift_left(Int x) {
    return each_int([&](int i) { return Isa::template shift_left<kBits>(x.lanes[i]); });
  }
};

}  // namespace
