// SPDX-License-Identifier: Apache-2.0
#include "random_epilogue.h"

namespace torchq {
namespace {

const DType kDTypes[] = {DType::u8, DType::s8, DType::s32, DType::f32};
/// Sums of products are up to 2^24: most results are in the range of bytes, some beyond.
constexpr float kMultiplier = 0x1p-15f;

DType any_dtype() { return kDTypes[between(0, 3)]; }

}  // namespace

RandomEpilogue::RandomEpilogue(int channels, int64_t size, Forms forms)
    : channels_(channels), size_(size) {
  e_.mode = forms == kChains || chance(35) ? Epilogue::kChain
            : chance(10)                   ? Epilogue::kRaw
                                           : Epilogue::kFolded;
  e_.dst_dtype = e_.mode == Epilogue::kRaw ? DType::s32 : chance(50) ? DType::u8 : any_dtype();
  e_.guard = e_.mode == Epilogue::kFolded && chance(25);
  const bool any = e_.guard || e_.mode == Epilogue::kChain || e_.dst_dtype == DType::f32;
  e_.multiplier = floats(channels, any && chance(30) ? 1e3f : kMultiplier);
  e_.offset = any && chance(50) ? floats_.emplace_back(any_floats(channels, 1e3f)).data()
                                : floats(channels, 300.0f);
  e_.zero_point = e_.dst_dtype == DType::f32  ? 0.0f
                  : e_.dst_dtype == DType::u8 ? static_cast<float>(between(0, 255))
                                              : static_cast<float>(between(-128, 127));
  e_.channels = channels;
  e_.inv_scale = floats(channels, 3.0f);
  if (e_.mode == Epilogue::kFolded) fold();
  if (e_.mode == Epilogue::kChain) {
    for (int64_t i = between(1, 4); i > 0; --i) add_chain_op();
  }
  e_.num_ops = static_cast<int>(ops_.size());
  e_.num_sums = static_cast<int>(sums_.size());
  dst_ = random_bytes(size * size_of(e_.dst_dtype));
}

const float* RandomEpilogue::floats(int64_t size, float bound, float least) {
  const auto value = [&] { return least + within(bound); };
  return floats_.emplace_back(filled<float>(size, value)).data();
}

void RandomEpilogue::add_source(DType dtype) {
  SumSrc source{};
  source.data = sources_.emplace_back(random_values(size_, dtype)).data();
  source.dtype = dtype;
  source.scale = floats(channels_, 1.5f);
  source.chain_scale = within(2.0f);
  source.zero_point = static_cast<int32_t>(dtype == DType::f32 ? 0 : between(-128, 255));
  sums_.push_back(source);
}

void RandomEpilogue::fold() {
  const bool exact = element_bytes() == 1 && !e_.guard;  // then the conversion alone saturates
  for (int64_t i = chance(40) ? between(1, 2) : 0; i > 0; --i) {
    add_source(exact ? pick({DType::u8, DType::s8}) : any_dtype());
  }
  if (chance(20)) {
    e_.lo = floats(channels_, 50.0f);
    e_.hi = floats(channels_, 50.0f, 100.0f);
  }
  e_.clamp = chance(40);
  e_.lo_scalar = chance(50) ? 0.0f : -100.0f;
  e_.hi_scalar = chance(50) ? 6.5f : std::numeric_limits<float>::infinity();
}

void RandomEpilogue::add_chain_op() {
  ChainOp op{};
  op.kind = pick({ChainOp::kSum, ChainOp::kEltwise, ChainOp::kEltwise, ChainOp::kBinary});
  op.eltwise.alg = static_cast<Eltwise::Alg>(between(Eltwise::kRelu, Eltwise::kTanh));
  op.eltwise.alpha = chance(30) ? 0.0f : within(3.0f);
  if (op.eltwise.alg == Eltwise::kSoftRelu) op.eltwise.alpha = 0.5f;
  op.eltwise.beta = op.eltwise.alg == Eltwise::kPow
                        ? pick({0.0f, 1.0f, 2.0f, -1.0f, 0.5f, 3.0f, -2.0f, 0.37f})
                        : within(3.0f);
  op.eltwise.scale = chance(50) ? 1.0f : within(4.0f);
  op.binary = static_cast<Binary>(between(0, static_cast<int64_t>(Binary::prelu)));
  if (op.kind == ChainOp::kBinary && op.binary != Binary::select && chance(40)) {
    op.values = floats_.emplace_back(any_floats(channels_, 20.0f)).data();
  } else if (op.kind != ChainOp::kEltwise) {
    op.src = static_cast<int>(sums_.size());
    add_source(any_dtype());
    if (op.binary == Binary::select) {
      op.condition = static_cast<int>(sums_.size());
      add_source(any_dtype());
    }
  }
  ops_.push_back(op);
}

void RandomEpilogue::add_row_terms(int64_t rows) {
  if (e_.mode == Epilogue::kFolded && e_.dst_dtype != DType::f32 && !e_.guard) return;
  const bool scalable = e_.mode == Epilogue::kFolded && e_.dst_dtype == DType::f32;
  if (scalable && chance(70)) e_.row_scale = floats(rows, 2.0f);
  if (e_.row_scale != nullptr && chance(50)) e_.row_bias = floats(channels_, 10.0f);
  if (e_.row_scale != nullptr && chance(30)) return;
  e_.group_channels = channels_ % 2 == 0 && chance(50) ? channels_ / 2 : channels_;
  if (chance(20)) e_.group_channels = 1;
  const int64_t groups = channels_ / e_.group_channels;
  e_.row_terms = ints_.emplace_back(random_ints(rows * groups, 1 << 20)).data();
  e_.channel_terms = ints_.emplace_back(random_ints(channels_, 1 << 15)).data();
}

int RandomEpilogue::element_bytes() const { return size_of(e_.dst_dtype); }

Epilogue RandomEpilogue::with(void* dst) const {
  Epilogue e = e_;
  e.dst = dst;
  e.sums = sums_.data();
  e.ops = ops_.data();
  return e;
}

std::string RandomEpilogue::text() const {
  std::string ops;
  for (const ChainOp& op : ops_) {
    ops += " " + std::to_string(op.kind) + "/" +
           std::to_string(op.kind == ChainOp::kEltwise ? static_cast<int>(op.eltwise.alg)
                                                       : static_cast<int>(op.binary));
  }
  return torchq::text("mode", e_.mode, "dst", e_.dst_dtype, "guard", e_.guard, "sums", e_.num_sums,
                      "clamp", e_.clamp, "bounds", e_.lo != nullptr, "row_terms",
                      e_.row_terms != nullptr, "row_scale", e_.row_scale != nullptr, "ops", ops);
}

}  // namespace torchq
