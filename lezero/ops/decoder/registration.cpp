// Makes the kernel linked beside this file known to torch, through torch's stable ABI. Callers have
// checked types, shapes and contiguity.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "problem.h"

using torch::stable::Tensor;

namespace {

lezero_step step_of(int64_t T, const Tensor& layers, int64_t D, int64_t H, int64_t K, int64_t E,
                    int64_t F) {
  lezero_step s{};
  s.T = T, s.D = D, s.H = H, s.K = K, s.E = E, s.F = F, s.layers = layers.size(0);
  s.layer = static_cast<const lezero_layer*>(layers.data_ptr());
  s.crew = torch::stable::get_num_threads();
  return s;
}

// `ending`: addresses of the head's weight, as a `lezero_weight`, and of the norm before it.
void want(lezero_step& s, const Tensor& ending, int64_t rows, int64_t V) {
  if (!rows) return;
  const auto* held = static_cast<const int64_t*>(ending.data_ptr());
  s.rows = rows, s.V = V, s.head = reinterpret_cast<const lezero_weight*>(held);
  s.norm = reinterpret_cast<const float*>(held[sizeof(lezero_weight) / sizeof(int64_t)]);
}

int64_t scratch(int64_t T, int64_t rows, const Tensor& layers, const Tensor& ending, int64_t D,
                int64_t H, int64_t K, int64_t E, int64_t F, int64_t V) {
  lezero_step s = step_of(T, layers, D, H, K, E, F);
  want(s, ending, rows, V);
  return static_cast<int64_t>(lezero_decoder_scratch(&s));
}

// `rows`: of which logits are wanted, `logits`: theirs; both empty where x is what comes out. `best`:
// of each row its largest logit's place, or empty.
void run(const Tensor& x, const Tensor& layers, const Tensor& cos, const Tensor& sin,
         const Tensor& chunks, const Tensor& table, const Tensor& keys, const Tensor& values,
         const Tensor& room, const Tensor& ending, const Tensor& rows, const Tensor& logits,
         const Tensor& best,
         int64_t H, int64_t E, int64_t F, double eps, int64_t window, int64_t cache_bits) {
  const int64_t K = keys.size(2);
  lezero_step s = step_of(x.size(0), layers, x.size(1), H, K, E, F);
  s.x = static_cast<float*>(x.data_ptr());
  s.cos = static_cast<const float*>(cos.data_ptr());
  s.sin = static_cast<const float*>(sin.data_ptr());
  s.chunks = chunks.size(0);
  s.chunk = static_cast<const lezero_chunk*>(chunks.data_ptr());
  s.table = static_cast<const int32_t*>(table.data_ptr()), s.width = table.size(1);
  s.keys = static_cast<char*>(keys.data_ptr()), s.blocks = keys.size(1);
  s.values = static_cast<char*>(values.data_ptr()), s.cache_bits = cache_bits;
  want(s, ending, rows.size(0), logits.size(1));
  s.row = static_cast<const int32_t*>(rows.data_ptr());
  s.logits = static_cast<float*>(logits.data_ptr());
  s.best = best.numel() ? static_cast<int64_t*>(best.data_ptr()) : nullptr;
  s.scratch = room.data_ptr(), s.eps = static_cast<float>(eps), s.window = window;
  lezero_decoder_begin(&s);
  torch::stable::parallel_for(0, s.crew, 1, [&](int64_t begin, int64_t end) {
    lezero_decoder_run(&s, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def(
      "scratch(int T, int rows, Tensor layers, Tensor ending, int D, int H, int K, int E, int F, "
      "int V) -> int");
  m.def(
      "run(Tensor(a!) x, Tensor layers, Tensor cos, Tensor sin, Tensor chunks, Tensor table, "
      "Tensor(b!) keys, Tensor(c!) values, Tensor(d!) room, Tensor ending, Tensor rows, "
      "Tensor(e!) logits, Tensor(f!) best, int H, int E, int F, float eps, int window, int cache_bits) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CompositeExplicitAutograd, m) {
  m.impl("scratch", TORCH_BOX(&scratch));
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) { m.impl("run", TORCH_BOX(&run)); }
