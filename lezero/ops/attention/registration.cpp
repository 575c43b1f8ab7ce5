// Makes the kernel linked beside this file known to torch, through torch's stable ABI: one build
// serves every torch from 2.11 on. The ops write into tensors that their callers allocate.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <new>

#include "problem.h"

using torch::stable::Tensor;

namespace {

lezero_heads heads(const Tensor& x) {
  return {static_cast<bf16*>(x.data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

lezero_attention problem(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                         const Tensor& lse, bool causal, double scale) {
  lezero_attention a{};
  a.B = q.size(0), a.H = q.size(1), a.G = k.size(1), a.M = q.size(2), a.N = k.size(2);
  a.E = q.size(3), a.causal = causal, a.scale = static_cast<float>(scale);
  a.q = heads(q), a.k = heads(k), a.v = heads(v), a.out = heads(out);
  a.lse = static_cast<float*>(lse.data_ptr());
  return a;
}

using Kernel = void (*)(const lezero_attention*, int64_t, int64_t, void*);

void over_heads(const lezero_attention& a, size_t bytes, Kernel kernel) {
  torch::stable::parallel_for(0, a.B * a.G, 1, [&](int64_t begin, int64_t end) {
    void* scratch = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!scratch) throw std::bad_alloc();
    kernel(&a, begin, end, scratch);
    std::free(scratch);
  });
}

void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
             const Tensor& lse, bool causal, double scale) {
  const lezero_attention a = problem(q, k, v, out, lse, causal, scale);
  over_heads(a, lezero_attention_forward_scratch(&a), lezero_attention_forward);
}

void backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& out, const Tensor& lse, const Tensor& grad_q, const Tensor& grad_k,
              const Tensor& grad_v, bool causal, double scale) {
  lezero_attention a = problem(q, k, v, out, lse, causal, scale);
  a.grad_out = heads(grad), a.grad_q = heads(grad_q);
  a.grad_k = heads(grad_k), a.grad_v = heads(grad_v);
  over_heads(a, lezero_attention_backward_scratch(&a), lezero_attention_backward);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, bool causal, "
      "float scale) -> ()");
  m.def(
      "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, bool causal, float scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}
