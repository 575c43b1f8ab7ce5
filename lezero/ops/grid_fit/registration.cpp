// Makes the kernel linked beside this file known to torch, through torch's stable ABI. Callers have
// checked types, shapes and contiguity.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "fit.h"

using torch::stable::Tensor;

namespace {

constexpr int64_t kElementsAThread = 1 << 13;

lezero_groups groups(const Tensor& weight, double low, double high, int64_t kept) {
  lezero_groups g{};
  g.weight = static_cast<const float*>(weight.data_ptr()), g.elements = weight.size(1);
  g.low = static_cast<float>(low), g.high = static_cast<float>(high);
  g.kept = static_cast<int>(kept);
  return g;
}

template <class F>
void by_groups(const Tensor& weight, F run) {
  const int64_t grain = std::max<int64_t>(1, kElementsAThread / std::max<int64_t>(1, weight.size(1)));
  torch::stable::parallel_for(0, weight.size(0), grain, run);
}

void least_error(const Tensor& weight, const Tensor& scale, std::optional<Tensor> zero, double low,
                 double high, int64_t kept, int64_t steps) {
  const lezero_groups g = groups(weight, low, high, kept);
  float* const found = static_cast<float*>(scale.data_ptr());
  const float* const zeros = zero ? static_cast<const float*>(zero->data_ptr()) : nullptr;
  by_groups(weight, [&](int64_t begin, int64_t end) {
    lezero_least_error(&g, found, zeros, steps, begin, end);
  });
}

void half_quadratic(const Tensor& weight, const Tensor& scale, const Tensor& zero,
                    const Tensor& codes, double low, double high, int64_t kept, int64_t rounds) {
  const lezero_groups g = groups(weight, low, high, kept);
  const float* const scales = static_cast<const float*>(scale.data_ptr());
  float* const zeros = static_cast<float*>(zero.data_ptr());
  uint8_t* const to = static_cast<uint8_t*>(codes.data_ptr());
  by_groups(weight, [&](int64_t begin, int64_t end) {
    lezero_half_quadratic(&g, scales, zeros, to, rounds, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def(
      "least_error(Tensor weight, Tensor(a!) scale, Tensor? zero, float low, float high, int kept, "
      "int steps) -> ()");
  m.def(
      "half_quadratic(Tensor weight, Tensor scale, Tensor(a!) zero, Tensor(b!) codes, float low, "
      "float high, int kept, int rounds) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) {
  m.impl("least_error", TORCH_BOX(&least_error));
  m.impl("half_quadratic", TORCH_BOX(&half_quadratic));
}
