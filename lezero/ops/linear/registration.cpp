// Makes the kernel linked beside this file known to torch, through torch's stable ABI: one build
// serves every torch from 2.11 on. Callers have checked types, shapes and contiguity, but for
// `linear_int`, which does it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <vector>

#include "problem.h"
#include "room.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr int64_t kProductsAThread = 1 << 18;
constexpr int64_t kTokensAThread = 32;  // at least
constexpr int64_t kCached = 1 << 20;     // bytes of a weight
constexpr int64_t kPanel = 16;           // its outputs; of layout.py
constexpr int64_t kMostInputs = 1 << 16;

int type(const Tensor& x) {
  const ScalarType found = x.scalar_type();
  return found == ScalarType::Float      ? LEZERO_FP32
         : found == ScalarType::BFloat16 ? LEZERO_BF16
                                         : LEZERO_FP16;
}

const float* floats(const std::optional<Tensor>& x) {
  return x ? static_cast<const float*>(x->data_ptr()) : nullptr;
}

// Of each thread, kept from call to call: tokens as products read them, and what a thread needs of
// its own beside them.
thread_local Room prepared, own_room;

// Each thread prepares its own tokens and multiplies them with the whole weight.
void run_by_tokens(const lezero_linear& l) {
  torch::stable::parallel_for(0, l.M, kTokensAThread, [&](int64_t begin, int64_t end) {
    const int64_t parts = (end - begin + LEZERO_TOKENS - 1) / LEZERO_TOKENS;
    const int64_t most = (end - begin + parts - 1) / parts;
    void* const scratch = prepared.take(lezero_linear_scratch(&l, most));
    void* const own = own_room.take(lezero_linear_own_scratch(&l, most));
    for (int64_t first = begin; first < end; first += most) {
      const int64_t count = std::min(end - first, most);
      const int64_t tiles = lezero_linear_tiles(&l, count), pairs = lezero_linear_pairs(&l);
      lezero_linear_prepare(&l, first, count, scratch, 0, tiles);
      lezero_linear_multiply(&l, first, count, scratch, own, 0, pairs);
    }
  });
}

// All threads prepare tokens, and then each multiplies them with its part of the weight.
void run_by_outputs(const lezero_linear& l) {
  const int64_t most = std::min<int64_t>(l.M, LEZERO_TOKENS);
  void* const scratch = prepared.take(lezero_linear_scratch(&l, most));
  for (int64_t first = 0; first < l.M; first += LEZERO_TOKENS) {
    const int64_t count = std::min<int64_t>(l.M - first, LEZERO_TOKENS);
    const int64_t tiles = lezero_linear_tiles(&l, count);
    const int64_t elements = l.K * (count / tiles);
    torch::stable::parallel_for(
        0, tiles, std::max<int64_t>(1, kProductsAThread / 16 / std::max<int64_t>(elements, 1)),
        [&](int64_t begin, int64_t end) {
          lezero_linear_prepare(&l, first, count, scratch, begin, end);
        });
    const int64_t products = std::max<int64_t>(1, 32 * l.K * ((count + 7) / 8));
    const size_t bytes = lezero_linear_own_scratch(&l, count);
    torch::stable::parallel_for(
        0, lezero_linear_pairs(&l), std::max<int64_t>(1, kProductsAThread / products),
        [&](int64_t begin, int64_t end) {
          void* const own = own_room.take(bytes);
          lezero_linear_multiply(&l, first, count, scratch, own, begin, end);
        });
  }
}

// With many tokens and a weight that every core's own cache holds, threads share nothing and so wait
// for nobody.
void run(const lezero_linear& l) {
  if (l.M == 0) return;
  if (l.M >= 2 * kTokensAThread && l.N * l.K * l.bits / 8 <= kCached) run_by_tokens(l);
  else run_by_outputs(l);
}

// (…, K) → (…, out_features) of x's type, not written yet.
Tensor empty_output(const Tensor& x, int64_t out_features) {
  const auto given = x.sizes();
  std::vector<int64_t> sizes(given.begin(), given.end());
  sizes.back() = out_features;
  Tensor out = torch::stable::new_empty(x, sizes);
  const size_t bytes = static_cast<size_t>(out.numel()) * (type(x) == LEZERO_FP32 ? 4 : 2);
  if (bytes) advise_fresh(out.data_ptr(), bytes);
  return out;
}

lezero_linear call(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                   const Tensor& out, int64_t out_features) {
  lezero_linear l{};
  l.K = x.size(x.dim() - 1), l.M = x.numel() / l.K, l.N = out_features;
  l.x = x.data_ptr(), l.out = out.data_ptr(), l.x_type = type(x);
  l.weight = weight.data_ptr(), l.bits = 16, l.x_bits = 16, l.bias = floats(bias);
  return l;
}

Tensor linear_bf16(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias,
                   int64_t out_features) {
  Tensor out = empty_output(x, out_features);
  run(call(x, weight, bias, out, out_features));
  return out;
}

bool is_float(const Tensor& x) {
  const ScalarType found = x.scalar_type();
  return found == ScalarType::Float || found == ScalarType::BFloat16 || found == ScalarType::Half;
}

bool has_shape(const Tensor& x, std::initializer_list<int64_t> shape) {
  const auto found = x.sizes();
  return x.is_contiguous() && std::equal(found.begin(), found.end(), shape.begin(), shape.end());
}

bool is_numbers(const std::optional<Tensor>& x, const Tensor& scale, int64_t panels, int64_t groups) {
  return !x || (has_shape(*x, {panels, groups, kPanel}) && is_float(*x) &&
                x->scalar_type() == scale.scalar_type());
}

bool is_fp32(const std::optional<Tensor>& x, int64_t count) {
  return !x || (x->scalar_type() == ScalarType::Float && x->is_contiguous() && x->numel() == count);
}

// Whether a kernel may read what it was given: the checks of op.py, which has the words for what does
// not fit but takes as long as a small layer.
bool fits(const Tensor& x, const Tensor& weight, const Tensor& scale,
          const std::optional<Tensor>& zero, const std::optional<Tensor>& bias,
          const std::optional<Tensor>& x_scale, int64_t N, int64_t bits, int64_t group,
          int64_t x_bits, int64_t x_block) {
  if (x.dim() < 1 || !x.is_contiguous() || !is_float(x) || weight.dim() != 4) return false;
  if ((bits != 4 && bits != 8) || group < 0 || group % 32) return false;
  const int64_t K = x.size(x.dim() - 1), panels = weight.size(0), inputs = weight.size(1);
  const int64_t padded = inputs * (bits == 8 ? 4 : 8);
  if (weight.scalar_type() != ScalarType::Byte || !has_shape(weight, {panels, inputs, kPanel, 4}))
    return false;
  if (padded % 64) return false;
  if (N <= (panels - 1) * kPanel || N > panels * kPanel) return false;
  if (K <= std::max<int64_t>(0, padded - 64) || K > std::min(padded, kMostInputs)) return false;
  const int64_t groups = group ? (K - 1) / group + 1 : 1;
  if (!is_numbers(scale, scale, panels, groups) || !is_numbers(zero, scale, panels, groups))
    return false;
  const bool block = x_block == 32 || x_block == 64 || x_block == 128;
  if (x_block && (!block || x_bits != 8 || group % x_block || x_scale)) return false;
  if (x_bits != 8 && (x_bits != 16 || x_scale)) return false;
  return is_fp32(bias, N) && (!bias || bias->dim() == 1) && is_fp32(x_scale, 1);
}

Tensor linear_int(const Tensor& x, const Tensor& weight, const Tensor& scale,
                  std::optional<Tensor> zero, std::optional<Tensor> bias,
                  std::optional<Tensor> x_scale, int64_t out_features, int64_t bits, int64_t group,
                  int64_t x_bits, int64_t x_block, bool rounded, bool may_round) {
  if (!fits(x, weight, scale, zero, bias, x_scale, out_features, bits, group, x_bits, x_block))
    throw std::runtime_error("linear_int: the arguments do not fit each other");
  Tensor out = empty_output(x, out_features);
  lezero_linear l = call(x, weight, bias, out, out_features);
  l.bits = static_cast<int>(bits), l.group = group, l.x_bits = static_cast<int>(x_bits);
  l.x_block = x_block, l.scale = scale.data_ptr(), l.scale_type = type(scale);
  l.zero = zero ? zero->data_ptr() : nullptr;
  l.x_scale = floats(x_scale);
  l.rounded = rounded || (may_round && lezero_linear_rounds(&l));
  run(l);
  return out;
}

// `out`: (ids, K), to be written; ids are rows that the weight has.
void embedding(const Tensor& ids, const Tensor& weight, const Tensor& scale,
               std::optional<Tensor> zero, const Tensor& out, int64_t bits, int64_t group) {
  lezero_linear l{};
  l.K = out.size(1), l.out = out.data_ptr(), l.x_type = type(out);
  l.weight = weight.data_ptr(), l.bits = static_cast<int>(bits), l.group = group;
  l.scale = scale.data_ptr(), l.scale_type = type(scale);
  l.zero = zero ? zero->data_ptr() : nullptr;
  const auto* rows = static_cast<const int64_t*>(ids.data_ptr());
  const int64_t grain = std::max<int64_t>(1, kProductsAThread / 16 / std::max<int64_t>(l.K, 1));
  torch::stable::parallel_for(0, ids.numel(), grain, [&](int64_t begin, int64_t end) {
    lezero_embedding(&l, rows, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def("linear_bf16(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor");
  m.def(
      "linear_int(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias, "
      "Tensor? x_scale, int out_features, int bits, int group, int x_bits, "
      "int x_block=0, bool rounded=False, bool may_round=False) -> Tensor");
  m.def(
      "embedding(Tensor ids, Tensor weight, Tensor scale, Tensor? zero, Tensor(a!) out, int bits, "
      "int group) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) {
  m.impl("linear_bf16", TORCH_BOX(&linear_bf16));
  m.impl("linear_int", TORCH_BOX(&linear_int));
  m.impl("embedding", TORCH_BOX(&embedding));
}
