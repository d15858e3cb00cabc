// SPDX-License-Identifier: Apache-2.0
#include "epilogue/describe_layer.h"

#include "runtime/checks.h"

namespace torchq {

std::string describe_layer(const EpilogueBuilder::Args& args, const at::Tensor& src,
                           bool has_src_zero_point, const at::Tensor& dst,
                           c10::IntArrayRef geometry) {
  std::vector<at::Tensor> srcs = {src};
  srcs.insert(srcs.end(), args.post_op_srcs.begin(), args.post_op_srcs.end());
  const char* weights = args.groups > 1 ? "weights:3" : "weights:1";  // their mask
  const bool has_weight_zero_point = args.weight_zero_point != nullptr;
  std::string text = geometry.empty() ? "" : c10::str(" geometry:", geometry);
  if (args.table != nullptr) {
    text += c10::str(" table:", dtype_name(args.table->scalar_type()));
  }
  if (args.multiplier.numel() > 0) {
    const char* to = dst.scalar_type() == at::kFloat ? "" : "+dst:0";
    text += c10::str(" scales:src:0+", weights, to);
  }
  if (has_src_zero_point || has_weight_zero_point) {
    text += c10::str(" zero_points:", has_src_zero_point ? "src:0" : "",
                     has_src_zero_point && has_weight_zero_point ? "+" : "",
                     has_weight_zero_point ? weights : "");
  }
  return describe_call(srcs, dst, text.empty() ? text : text.substr(1), args.post_ops);
}

}  // namespace torchq
