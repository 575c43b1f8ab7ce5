// Makes the kernel linked beside this file known to torch, through torch's stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "sum.h"

using torch::stable::Tensor;

namespace {

lezero_vector vector(const Tensor& x) {
  return {x.data_ptr(), x.scalar_type() == torch::headeronly::ScalarType::BFloat16};
}

void ordered_sum(std::vector<Tensor> parts, const Tensor& out) {
  std::vector<lezero_vector> from;
  for (const Tensor& part : parts) from.push_back(vector(part));
  const lezero_vector to = vector(out);
  torch::stable::parallel_for(0, out.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
    lezero_ordered_sum(from.data(), static_cast<int64_t>(from.size()), to, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def("ordered_sum(Tensor[] parts, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) { m.impl("ordered_sum", TORCH_BOX(&ordered_sum)); }
