// SPDX-License-Identifier: Apache-2.0
#include "ops/pointwise/byte_table.h"

#include "runtime/checks.h"

namespace torchq {

ByteTable::ByteTable(const char* op, const std::optional<at::Tensor>& table, DType src)
    : is_given_(table.has_value()),
      src_type_(scalar_type(src)),
      dst_type_(is_given_ ? table->scalar_type() : src_type_) {
  if (!is_given_) return;
  TORCH_CHECK_VALUE(is_int8(src), "torchq.", op,
                    ": dst_dtype must be 0 (uint8) or 1 (int8) with a table of 256 values, got ",
                    dtype_name(src_type_), ". Leave the table out.");
  check_src(op, "table", *table);
  TORCH_CHECK_VALUE(table->dim() == 1 && table->numel() == 256 && table->is_contiguous(), "torchq.",
                    op,
                    ": table must be 256 contiguous values, one per source value in ascending "
                    "order, got ",
                    table->sizes(), " with strides ", table->strides(),
                    ". Make them with torchq.functional.lookup_table, or call .contiguous().");
  // An int8 source's values -128..127 are the bytes 128..255, 0..127.
  const uint8_t* values = bytes_of(*table);
  const int flip = src == DType::s8 ? 0x80 : 0;
  for (int byte = 0; byte < 256; ++byte) bytes_[byte] = values[byte ^ flip];
}

at::Tensor ByteTable::before(const at::Tensor& dst) const {
  return src_type_ == dst_type_ ? dst : dst.view(src_type_);
}

}  // namespace torchq
