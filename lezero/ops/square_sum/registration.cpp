// Makes the kernel linked beside this file known to torch, through torch's stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "sum.h"

using torch::stable::Tensor;

namespace {

struct Block {
  const char* at;
  int64_t elements;
  bool is_bf16;
};

void square_sums(std::vector<Tensor> tensors, const Tensor& out) {
  std::vector<Block> blocks;
  for (const Tensor& x : tensors) {
    const bool is_bf16 = x.scalar_type() == torch::headeronly::ScalarType::BFloat16;
    for (int64_t at = 0; at < x.numel(); at += LEZERO_SQUARE_SUM_BLOCK) {
      const int64_t n = std::min<int64_t>(LEZERO_SQUARE_SUM_BLOCK, x.numel() - at);
      blocks.push_back({static_cast<const char*>(x.data_ptr()) + at * (is_bf16 ? 2 : 4), n, is_bf16});
    }
  }
  std::vector<double> found(blocks.size());
  const auto count = static_cast<int64_t>(blocks.size());
  torch::stable::parallel_for(0, count, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      found[i] = lezero_square_sum(blocks[i].at, blocks[i].is_bf16, blocks[i].elements);
  });
  auto* to = static_cast<double*>(out.data_ptr());
  size_t next = 0;
  for (const Tensor& x : tensors) {
    double sum = 0;
    for (int64_t at = 0; at < x.numel(); at += LEZERO_SQUARE_SUM_BLOCK) sum += found[next++];
    *to++ = sum;
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def("square_sums(Tensor[] tensors, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) { m.impl("square_sums", TORCH_BOX(&square_sums)); }
