// SPDX-License-Identifier: Apache-2.0
// What the formulas of recurrent cells run on: one cell's lanes, or those of two.
#pragma once

#include "rnn_cell.h"

namespace {

/// One cell's lanes, or those of two independent cells whose instructions alternate: a cell alone
/// is a chain of 200 cycles, longer than the reorder buffer hides.
template <class Isa>
struct OneCell : Isa {
  static constexpr int kCells = 1;
  template <class Body>
  static TORCHQ_INLINE auto each(const Body& body) {
    return body(0);
  }
  template <class Value, class Body>
  static TORCHQ_INLINE void for_each(const Value& v, const Body& body) {
    body(0, v);
  }
};

template <class Isa>
struct TwoCells {
  static constexpr int kCells = 2;
  struct Float {
    typename Isa::Float a, b;
  };
  struct Int {
    typename Isa::Int a, b;
  };

  template <class Body>
  static TORCHQ_INLINE Float each(const Body& body) {
    return {body(0), body(1)};
  }
  template <class Value, class Body>
  static TORCHQ_INLINE void for_each(const Value& v, const Body& body) {
    body(0, v.a);
    body(1, v.b);
  }
  static TORCHQ_INLINE Float set(float x) { return {Isa::set(x), Isa::set(x)}; }
  static TORCHQ_INLINE Int set_int(int32_t x) { return {Isa::set_int(x), Isa::set_int(x)}; }
  static TORCHQ_INLINE Float add(Float x, Float y) {
    return {Isa::add(x.a, y.a), Isa::add(x.b, y.b)};
  }
  static TORCHQ_INLINE Int add(Int x, Int y) { return {Isa::add(x.a, y.a), Isa::add(x.b, y.b)}; }
  static TORCHQ_INLINE Float sub(Float x, Float y) {
    return {Isa::sub(x.a, y.a), Isa::sub(x.b, y.b)};
  }
  static TORCHQ_INLINE Float mul(Float x, Float y) {
    return {Isa::mul(x.a, y.a), Isa::mul(x.b, y.b)};
  }
  static TORCHQ_INLINE Float div(Float x, Float y) {
    return {Isa::div(x.a, y.a), Isa::div(x.b, y.b)};
  }
  static TORCHQ_INLINE Float max(Float x, Float y) {
    return {Isa::max(x.a, y.a), Isa::max(x.b, y.b)};
  }
  static TORCHQ_INLINE Float min(Float x, Float y) {
    return {Isa::min(x.a, y.a), Isa::min(x.b, y.b)};
  }
  static TORCHQ_INLINE Float fma(Float x, Float y, Float z) {
    return {Isa::fma(x.a, y.a, z.a), Isa::fma(x.b, y.b, z.b)};
  }
  static TORCHQ_INLINE Float to_float(Int x) { return {Isa::to_float(x.a), Isa::to_float(x.b)}; }
  static TORCHQ_INLINE Int bits(Float x) { return {Isa::bits(x.a), Isa::bits(x.b)}; }
  static TORCHQ_INLINE Float from_bits(Int x) { return {Isa::from_bits(x.a), Isa::from_bits(x.b)}; }
  template <int kBits>
  static TORCHQ_INLINE Int shift_left(Int x) {
    return {Isa::template shift_left<kBits>(x.a), Isa::template shift_left<kBits>(x.b)};
  }
};

}  // namespace
