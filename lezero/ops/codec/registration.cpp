// Makes the kernel linked beside this file known to torch, through torch's stable ABI: one build
// serves every torch from 2.11 on. Callers have checked types, sizes and contiguity.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "codec.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr int64_t kElementsAThread = 1 << 15;

int type(const Tensor& x) { return x.scalar_type() == ScalarType::Float ? LEZERO_FP32 : LEZERO_BF16; }

lezero_codec call(const Tensor& values, const Tensor& payload, int64_t form, int64_t block) {
  lezero_codec c{};
  c.form = static_cast<int>(form), c.numel = values.numel(), c.block = block;
  c.values = values.data_ptr(), c.values_type = type(values);
  c.payload = static_cast<uint8_t*>(payload.data_ptr());
  return c;
}

void over_blocks(const lezero_codec& c, void (*run)(const lezero_codec*, int64_t, int64_t)) {
  const int64_t blocks = (c.numel + c.block - 1) / c.block;
  const int64_t grain = kElementsAThread / c.block > 0 ? kElementsAThread / c.block : 1;
  torch::stable::parallel_for(0, blocks, grain,
                              [&](int64_t begin, int64_t end) { run(&c, begin, end); });
}

void encode(const Tensor& values, const Tensor& payload, std::optional<Tensor> error, int64_t form,
            int64_t block) {
  lezero_codec c = call(values, payload, form, block);
  if (error) c.error = error->data_ptr(), c.error_type = type(*error);
  over_blocks(c, lezero_codec_encode);
}

void decode(const Tensor& payload, const Tensor& out, int64_t form, int64_t block, bool add) {
  lezero_codec c = call(out, payload, form, block);
  c.add = add;
  over_blocks(c, lezero_codec_decode);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def(
      "encode(Tensor values, Tensor(a!) payload, Tensor(b!)? error, int form, int block) -> ()");
  m.def("decode(Tensor payload, Tensor(a!) out, int form, int block, bool add) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) {
  m.impl("encode", TORCH_BOX(&encode));
  m.impl("decode", TORCH_BOX(&decode));
}
