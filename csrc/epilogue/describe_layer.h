// SPDX-License-Identifier: Apache-2.0
// The verbose log's text about a layer.
#pragma once

#include "epilogue/post_ops.h"

namespace torchq {

/// The text of a verbose line: src and the post-ops' sources, dst as it is before a table,
/// `geometry` if the op has one, what the table holds, and attributes as torchq.Attr writes them.
/// `benchmarks ops --line` reads it.
std::string describe_layer(const EpilogueBuilder::Args& args, const at::Tensor& src,
                           bool has_src_zero_point, const at::Tensor& dst,
                           c10::IntArrayRef geometry = {});

}  // namespace torchq
