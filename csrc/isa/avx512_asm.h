// SPDX-License-Identifier: Apache-2.0
// Instructions as inline assembly: what GCC 12 makes of their intrinsics is slower where the traits
// use these. Macros, since it allocates other registers around functions. Tests of AVX-512 in
// software (tests/emulated) have functions in their place.
#pragma once

#ifndef TORCHQ_EMULATED

/// Keeps a vector in its register.
#define TORCHQ_ASM_PIN(v) asm("" : "+v"(v))

// v = v op c, where c comes from memory each time: there is no register to spare.
#define TORCHQ_ASM_MAX(v, c) asm("vpmaxsd %1, %0, %0" : "+v"(v) : "m"(c))
#define TORCHQ_ASM_XOR(v, c) asm("vpxord %1, %0, %0" : "+v"(v) : "m"(c))
#define TORCHQ_ASM_AND(v, c) asm("vpandd %1, %0, %0" : "+v"(v) : "m"(c))
#define TORCHQ_ASM_SHUFFLE(v, c) asm("vpshufb %1, %0, %0" : "+v"(v) : "m"(c))

// Sums, of one panel, or of several as one statement.
#define TORCHQ_ASM_DOT(acc, src, w) asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(src), "v"(w))
#define TORCHQ_ASM_DOT_THREE(a, b, c, src, w)                             \
  asm("vpdpbusd %4, %3, %0\n\tvpdpbusd %5, %3, %1\n\tvpdpbusd %6, %3, %2" \
      : "+&v"(a), "+&v"(b), "+&v"(c)                                      \
      : "v"(src), "v"(w[0]), "v"(w[1]), "v"(w[2]))
#define TORCHQ_ASM_DOT_FOUR(a, b, c, d, src, w)        \
  asm("vpdpbusd %5, %4, %0\n\tvpdpbusd %6, %4, %1\n\t" \
      "vpdpbusd %7, %4, %2\n\tvpdpbusd %8, %4, %3"     \
      : "+&v"(a), "+&v"(b), "+&v"(c), "+&v"(d)         \
      : "v"(src), "v"(w[0]), "v"(w[1]), "v"(w[2]), "v"(w[3]))

#endif
