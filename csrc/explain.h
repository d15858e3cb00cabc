// SPDX-License-Identifier: Apache-2.0
// What the verbose log says about a layer, and under TORCHQ_VERBOSE=2 why a faster kernel was not
// taken.
#pragma once

#include "post_ops.h"

namespace torchq {

/// Whether anybody reads what `rejects` says.
bool explains();

/// Prints "torchq,dispatch,<kernel>,<why>" where it `explains`; not for null, which is no reason.
/// The line of the op that runs comes behind those of its kernels.
void rejects(const char* kernel, const char* why);

/// The text of a verbose line: src and the post-ops' sources, dst as it is before a table,
/// `geometry` if the op has one, what the table holds, and attributes as torchq.Attr writes them.
/// `benchmarks ops --line` reads it.
std::string describe_layer(const EpilogueBuilder::Args& args, const at::Tensor& src,
                           bool has_src_zero_point, const at::Tensor& dst,
                           c10::IntArrayRef geometry = {});

}  // namespace torchq
