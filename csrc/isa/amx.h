// SPDX-License-Identifier: Apache-2.0
// The vectors beside the tile registers of AMX.
#pragma once

#include "isa/avx512_vnni.h"

namespace {

using Amx = Avx512Vnni;

}  // namespace
