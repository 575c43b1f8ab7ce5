// Makes the kernel linked beside this file known to torch, through torch's stable ABI. Callers have
// checked types, shapes and contiguity.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "draw.h"

using torch::stable::Tensor;

namespace {

constexpr int64_t kScoresAThread = 1 << 14;

struct Desk : lezero_desk {
  Desk() : lezero_desk{} {}
  ~Desk() { std::free(top); }
};

lezero_desk* desk() {
  thread_local Desk mine;
  return &mine;
}

lezero_desk* marks() {
  thread_local Desk mine;
  return &mine;
}

template <class F>
void by_rows(const Tensor& scores, F run) {
  const int64_t V = scores.size(1);
  const int64_t grain = std::max<int64_t>(1, kScoresAThread / V);
  std::atomic<int> failed{0};
  torch::stable::parallel_for(0, scores.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      if (const int how = run(static_cast<const float*>(scores.data_ptr()) + r * V, V, r)) failed = how;
  });
  STD_TORCH_CHECK(failed != -1, "no memory to draw a token");
  STD_TORCH_CHECK(!failed, "a text holds a token that is none of ", V);
}

int draw_here(const float* scores, int64_t V, const lezero_asked* asked, int64_t* token,
              float* highest) {
  return lezero_draw(scores, V, asked, desk(), token, highest);
}

int64_t drawer() {
  lezero_drawer* const here = draw_here;
  return reinterpret_cast<int64_t>(here);
}

void draw(const Tensor& scores, const Tensor& asked, const Tensor& token, const Tensor& highest) {
  const lezero_asked* const a = static_cast<const lezero_asked*>(asked.data_ptr());
  int64_t* const to = static_cast<int64_t*>(token.data_ptr());
  float* const most = static_cast<float*>(highest.data_ptr());
  by_rows(scores, [&](const float* x, int64_t V, int64_t r) {
    return draw_here(x, V, a + r, to + r, most + r);
  });
}

void name(const Tensor& scores, const Tensor& token, const Tensor& own, const Tensor& likeliest,
          const Tensor& logprobs) {
  const int64_t most = likeliest.size(1);
  const int64_t* const tokens = static_cast<const int64_t*>(token.data_ptr());
  float* const mine = static_cast<float*>(own.data_ptr());
  int64_t* const best = static_cast<int64_t*>(likeliest.data_ptr());
  float* const theirs = static_cast<float*>(logprobs.data_ptr());
  for (int64_t r = 0; r < scores.size(0); r++)
    STD_TORCH_CHECK(tokens[r] >= 0 && tokens[r] < scores.size(1), "name_tokens: token ", tokens[r],
                    " is none of ", scores.size(1));
  by_rows(scores, [&](const float* x, int64_t V, int64_t r) {
    return lezero_name(x, V, tokens[r], most, desk(), mine + r, best + r * most, theirs + r * most);
  });
}

void penalize(const Tensor& scores, const Tensor& tokens, const Tensor& spans, const Tensor& penalties,
              const Tensor& out) {
  const int64_t* const text = static_cast<const int64_t*>(tokens.data_ptr());
  const int64_t* const span = static_cast<const int64_t*>(spans.data_ptr());
  const lezero_penalties* const p = static_cast<const lezero_penalties*>(penalties.data_ptr());
  float* const to = static_cast<float*>(out.data_ptr());
  by_rows(scores, [&](const float* x, int64_t V, int64_t r) {
    const int64_t* const s = span + 3 * r;
    return lezero_penalize(x, V, text + s[0], s[1] - s[0], s[2] - s[0], p + r, marks(), to + r * V);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def("drawer() -> int");
  m.def("draw_tokens(Tensor scores, Tensor asked, Tensor(a!) token, Tensor(b!) highest) -> ()");
  m.def(
      "name_tokens(Tensor scores, Tensor token, Tensor(a!) own, Tensor(b!) likeliest, Tensor(c!) logprobs) "
      "-> ()");
  m.def("penalize(Tensor scores, Tensor tokens, Tensor spans, Tensor penalties, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CompositeExplicitAutograd, m) {
  m.impl("drawer", TORCH_BOX(&drawer));
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) {
  m.impl("draw_tokens", TORCH_BOX(&draw));
  m.impl("name_tokens", TORCH_BOX(&name));
  m.impl("penalize", TORCH_BOX(&penalize));
}
