// Makes the kernel linked beside this file known to torch, through torch's stable ABI: one build
// serves every torch from 2.11 on. Tensors are contiguous and of fitting shapes: op.py sees to it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "problem.h"

using torch::stable::Tensor;

namespace {

enum { GRAIN = 1 << 15, BLOCK = 256 };  // elements that are worth a thread, elements of a block

lezero_adamw_coefficients narrow(double decay, double lerp, double beta2, double square,
                                 double step, double root, double eps) {
  return {(float)decay, (float)lerp, (float)beta2, (float)square,
          (float)step,  (float)root, (float)eps};
}

lezero_adamw_code code(const Tensor& tables, int which) {  // (2, 5, 8)
  const float* at = static_cast<const float*>(tables.data_ptr()) + which * 40;
  return {at, at + 8, at + 16, at + 24, at + 32};
}

void adamw(const Tensor& param, const Tensor& extra, const Tensor& grad, const Tensor& exp_avg,
           const Tensor& exp_avg_sq, int64_t weight, double decay, double lerp, double beta2,
           double square, double step, double root, double eps) {
  const lezero_adamw a{param.data_ptr(),
                       extra.data_ptr(),
                       grad.data_ptr(),
                       static_cast<float*>(exp_avg.data_ptr()),
                       static_cast<float*>(exp_avg_sq.data_ptr()),
                       static_cast<int>(weight),
                       grad.element_size() == 4,
                       narrow(decay, lerp, beta2, square, step, root, eps)};
  torch::stable::parallel_for(0, param.numel(), GRAIN, [&](int64_t begin, int64_t end) {
    lezero_adamw_run(&a, begin, end);
  });
}

void adamw8bit(const Tensor& param, const Tensor& extra, const Tensor& grad, const Tensor& exp_avg,
               const Tensor& exp_avg_scale, const Tensor& exp_avg_sq,
               const Tensor& exp_avg_sq_scale, const Tensor& tables, int64_t weight, double decay,
               double lerp, double beta2, double square, double step, double root, double eps) {
  const int64_t blocks = exp_avg_scale.numel();
  if (!blocks) return;
  const lezero_adamw8bit a{param.data_ptr(),
                           extra.data_ptr(),
                           grad.data_ptr(),
                           static_cast<uint8_t*>(exp_avg.data_ptr()),
                           static_cast<uint8_t*>(exp_avg_sq.data_ptr()),
                           static_cast<float*>(exp_avg_scale.data_ptr()),
                           static_cast<float*>(exp_avg_sq_scale.data_ptr()),
                           param.numel() / param.size(0),
                           static_cast<int>(weight),
                           grad.element_size() == 4,
                           narrow(decay, lerp, beta2, square, step, root, eps),
                           code(tables, 0),
                           code(tables, 1)};
  torch::stable::parallel_for(0, blocks, GRAIN / BLOCK, [&](int64_t begin, int64_t end) {
    lezero_adamw8bit_run(&a, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def(
      "adamw(Tensor(a!) param, Tensor(b!) extra, Tensor grad, Tensor(c!) exp_avg, "
      "Tensor(d!) exp_avg_sq, int weight, float decay, float lerp, float beta2, float square, "
      "float step, float root, float eps) -> ()");
  m.def(
      "adamw8bit(Tensor(a!) param, Tensor(b!) extra, Tensor grad, Tensor(c!) exp_avg, "
      "Tensor(d!) exp_avg_scale, Tensor(e!) exp_avg_sq, Tensor(f!) exp_avg_sq_scale, "
      "Tensor tables, int weight, float decay, float lerp, float beta2, float square, float step, "
      "float root, float eps) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) {
  m.impl("adamw", TORCH_BOX(&adamw));
  m.impl("adamw8bit", TORCH_BOX(&adamw8bit));
}
