// Makes the kernel linked beside this file known to torch, through torch's stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "codes.h"

using torch::stable::Tensor;

namespace {

constexpr int64_t kBlock = 1 << 14;

// Samples lie one behind the other, each without gaps; codes lie alike.
void image_codes(const Tensor& x, const Tensor& codes, const Tensor& bad, double scale, double zero) {
  const int64_t samples = bad.numel();
  if (!x.numel()) return;
  const int64_t each = x.numel() / samples, blocks = (each + kBlock - 1) / kBlock;
  const bool is_bf16 = x.scalar_type() == torch::headeronly::ScalarType::BFloat16;
  const auto* from = static_cast<const char*>(x.data_ptr());
  auto* to = static_cast<uint8_t*>(codes.data_ptr());
  std::vector<char> finite(samples * blocks);
  torch::stable::parallel_for(0, samples * blocks, 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t within = i % blocks * kBlock, at = i / blocks * each + within;
      const int64_t n = std::min(kBlock, each - within);
      finite[i] = lezero_image_codes(from + at * (is_bf16 ? 2 : 4), is_bf16, n,
                                     static_cast<float>(scale), static_cast<float>(zero), to + at);
    }
  });
  auto* marks = static_cast<bool*>(bad.data_ptr());
  for (int64_t i = 0; i < samples; i++)
    marks[i] = !std::all_of(&finite[i * blocks], &finite[i * blocks] + blocks, [](char x) { return x; });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def("image_codes(Tensor x, Tensor(a!) codes, Tensor(b!) bad, float scale, float zero) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) { m.impl("image_codes", TORCH_BOX(&image_codes)); }
