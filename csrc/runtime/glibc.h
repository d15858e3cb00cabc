// SPDX-License-Identifier: Apache-2.0
// Keeps a library loadable with glibc 2.28. One source of each library includes it.
//
// shared_ptr of GCC 11 and newer reads this variable, which glibc has since 2.32, to spare atomics
// while there is one thread. Defined here, hidden and 0, it always takes the atomics.
#pragma once

extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
