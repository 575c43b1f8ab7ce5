// Makes the kernel linked beside this file known to torch, through torch's stable ABI. Callers have
// checked types, shapes and lengths.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "problem.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr int64_t kProductsAThread = 1 << 18;

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// q, k, v: (N, heads · E) with numbers of a row side by side; begins: (texts + 1) rows.
void attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& begins,
            const Tensor& out, int64_t heads) {
  lezero_texts t{};
  t.texts = begins.numel() - 1, t.heads = heads, t.E = q.size(1) / heads;
  t.begin = static_cast<const int64_t*>(begins.data_ptr());
  for (int64_t i = 0; i < t.texts; i++) {
    t.longest = std::max(t.longest, t.begin[i + 1] - t.begin[i]);
  }
  t.q = q.data_ptr(), t.k = k.data_ptr(), t.v = v.data_ptr(), t.out = out.data_ptr();
  t.q_row = q.stride(0), t.k_row = k.stride(0), t.v_row = v.stride(0);
  const ScalarType type = q.scalar_type();
  t.type = type == ScalarType::Float      ? LEZERO_FP32
           : type == ScalarType::BFloat16 ? LEZERO_BF16
                                          : LEZERO_FP16;
  const size_t bytes = (lezero_texts_scratch(&t) + 63) / 64 * 64;
  torch::stable::parallel_for(
      0, lezero_texts_cost(&t), std::max<int64_t>(1, kProductsAThread / (2 * t.E)),
      [&](int64_t begin, int64_t end) {
        const std::unique_ptr<void, Free> scratch(std::aligned_alloc(64, bytes));
        if (!scratch) throw std::bad_alloc();
        lezero_texts_attend(&t, scratch.get(), begin, end);
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor begins, Tensor(a!) out, int heads) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) { m.impl("attend", TORCH_BOX(&attend)); }
