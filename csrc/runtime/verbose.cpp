// SPDX-License-Identifier: Apache-2.0
#include "runtime/verbose.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace torchq {

int verbosity() {
  static const int level = [] {
    const char* text = std::getenv("TORCHQ_VERBOSE");
    const std::string value = text == nullptr ? "" : text;
    if (value.empty() || value == "0") return 0;
    TORCH_CHECK_VALUE(value == "1" || value == "2",
                      "torchq: TORCHQ_VERBOSE must be 0, 1 or 2, got ", value,
                      ". 1 prints a line for every op, 2 also why faster kernels were not taken.");
    return value == "1" ? 1 : 2;
  }();
  return level;
}

bool logs_kernel_choice() { return verbosity() > 1; }

void Reasons::log() const {
  if (!logs_kernel_choice()) return;
  for (int i = 0; i < size_; ++i) {
    std::printf("torchq,dispatch,%s,%s\n", reasons_[i].kernel, reasons_[i].why);
  }
}

}  // namespace torchq
