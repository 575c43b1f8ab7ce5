// Makes the kernel linked beside this file known to torch, through torch's stable ABI. Callers have
// checked types, shapes and contiguity.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "../draw/draw.h"
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
  s.V = V;
  if (!rows) return;
  const auto* held = static_cast<const int64_t*>(ending.data_ptr());
  s.rows = rows, s.head = reinterpret_cast<const lezero_weight*>(held);
  s.norm = reinterpret_cast<const float*>(held[sizeof(lezero_weight) / sizeof(int64_t)]);
}

int64_t scratch(int64_t T, int64_t rows, const Tensor& layers, const Tensor& ending, int64_t D,
                int64_t H, int64_t K, int64_t E, int64_t F, int64_t V, bool rounded) {
  lezero_step s = step_of(T, layers, D, H, K, E, F);
  s.rounded = rounded;
  want(s, ending, rows, V);
  return static_cast<int64_t>(lezero_decoder_scratch(&s));
}

// `rows`: of which logits are wanted, `logits`: theirs, of width 0 where x is what comes out. `best`:
// of each row its largest logit's place, or empty.
lezero_step filled(const Tensor& x, const Tensor& layers, const Tensor& cos, const Tensor& sin,
                   const Tensor& chunks, const Tensor& table, const Tensor& keys,
                   const Tensor& values, const Tensor& room, const Tensor& ending,
                   const Tensor& rows, const Tensor& logits, const Tensor& best, int64_t H,
                   int64_t E, int64_t F, double eps, int64_t window, int64_t cache_bits,
                   int64_t panels, bool rounded) {
  using torch::headeronly::ScalarType;
  const int64_t K = keys.size(2);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && logits.scalar_type() == ScalarType::Float,
                  "the residual stream and the logits are of fp32");
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
  s.rounded = rounded, s.panels = panels;
  s.scratch = room.data_ptr(), s.eps = static_cast<float>(eps), s.window = window;
  return s;
}

void take(const lezero_step& s) {
  lezero_decoder_begin(&s);
  torch::stable::parallel_for(0, s.crew, 1, [&](int64_t begin, int64_t end) {
    lezero_decoder_run(&s, begin, end);
  });
}

void run(const Tensor& x, const Tensor& layers, const Tensor& cos, const Tensor& sin,
         const Tensor& chunks, const Tensor& table, const Tensor& keys, const Tensor& values,
         const Tensor& room, const Tensor& ending, const Tensor& rows, const Tensor& logits,
         const Tensor& best, int64_t H, int64_t E, int64_t F, double eps, int64_t window,
         int64_t cache_bits, int64_t panels, bool rounded) {
  take(filled(x, layers, cos, sin, chunks, table, keys, values, room, ending, rows, logits, best, H,
              E, F, eps, window, cache_bits, panels, rounded));
}

// Rows of x from the embedding, whose numbers are rounded to `l.x_type`, fp32 or bf16.
void embed(const lezero_linear& l, const int64_t* tokens, const lezero_step& s) {
  lezero_embedding(&l, tokens, 0, s.T);
  if (l.x_type == LEZERO_FP32) return;
  const auto* half = static_cast<const uint16_t*>(l.out);
  for (int64_t i = 0; i < s.T * s.D; i++) {
    const uint32_t bits = static_cast<uint32_t>(half[i]) << 16;
    std::memcpy(s.x + i, &bits, sizeof bits);
  }
}

// A token of each row by what it asks for; -1 where its largest logit is no finite number.
void draw(const lezero_step& s, lezero_drawer* drawer, const lezero_asked* asked, int64_t* token) {
  constexpr int64_t kScoresAThread = 1 << 14;
  std::atomic<bool> failed{false};
  const int64_t grain = std::max<int64_t>(1, kScoresAThread / s.V);
  torch::stable::parallel_for(0, s.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      float highest = 0;
      if (drawer(s.logits + r * s.V, s.V, asked + r, token + r, &highest)) failed = true;
      if (!std::isfinite(highest)) token[r] = -1;
    }
  });
  STD_TORCH_CHECK(!failed, "no memory to draw a token");
}

// As `run`, but for tokens, one for each chunk, of which `beginning` holds the embedding as a
// `lezero_weight`, and over again with the tokens that are found: those of each step go to `best`,
// (steps, T). Returns how many steps were taken; the last one has a -1 where it is not the last of
// all. `room` begins with place for (T, D) of 16 bits. `asked`: of each step and row a `lezero_asked`,
// by which the `lezero_drawer` at `drawer` finds tokens; or empty, where the likeliest are taken.
int64_t follow(const Tensor& tokens, const Tensor& beginning, const Tensor& x, const Tensor& layers,
               const Tensor& cos, const Tensor& sin, const Tensor& chunks, const Tensor& table,
               const Tensor& keys, const Tensor& values, const Tensor& room, const Tensor& ending,
               const Tensor& rows, const Tensor& logits, const Tensor& best, const Tensor& asked,
               int64_t drawer, int64_t H, int64_t E, int64_t F, double eps, int64_t window,
               int64_t cache_bits, int64_t panels, bool rounds) {
  lezero_step s = filled(x, layers, cos, sin, chunks, table, keys, values, room, ending, rows,
                         logits, best, H, E, F, eps, window, cache_bits, panels, false);
  const int64_t bytes = (s.T * s.D * 2 + 63) / 64 * 64;
  const auto* held = static_cast<const lezero_weight*>(beginning.data_ptr());
  lezero_linear l{};
  l.K = s.D, l.weight = held->weight, l.bits = static_cast<int>(held->bits), l.group = held->group;
  l.scale = held->scale, l.zero = held->zero, l.scale_type = static_cast<int>(held->scale_type);
  l.x_type = rounds ? LEZERO_BF16 : LEZERO_FP32;
  l.out = rounds ? s.scratch : s.x;
  s.scratch = static_cast<char*>(s.scratch) + bytes;
  std::vector<lezero_chunk> chunk(s.chunk, s.chunk + s.chunks);
  s.chunk = chunk.data();
  const auto* fed = static_cast<const int64_t*>(tokens.data_ptr());
  const int64_t steps = best.size(0);
  const auto* wanted = asked.numel() ? static_cast<const lezero_asked*>(asked.data_ptr()) : nullptr;
  int64_t* found = s.best;
  for (int64_t i = 0; i < steps; i++, found += s.T) {
    s.best = wanted ? nullptr : found;
    embed(l, fed, s);
    take(s);
    if (wanted) draw(s, reinterpret_cast<lezero_drawer*>(drawer), wanted + i * s.T, found);
    fed = found;
    for (int64_t row = 0; row < s.T; row++)
      if (fed[row] < 0) return i + 1;
    for (auto& c : chunk) c.position++;
  }
  return steps;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def(
      "scratch(int T, int rows, Tensor layers, Tensor ending, int D, int H, int K, int E, int F, "
      "int V, bool rounded) -> int");
  m.def(
      "run(Tensor(a!) x, Tensor layers, Tensor cos, Tensor sin, Tensor chunks, Tensor table, "
      "Tensor(b!) keys, Tensor(c!) values, Tensor(d!) room, Tensor ending, Tensor rows, "
      "Tensor(e!) logits, Tensor(f!) best, int H, int E, int F, float eps, int window, "
      "int cache_bits, int panels, bool rounded) -> ()");
  m.def(
      "follow(Tensor tokens, Tensor beginning, Tensor(a!) x, Tensor layers, Tensor cos, Tensor sin, "
      "Tensor chunks, Tensor table, Tensor(b!) keys, Tensor(c!) values, Tensor(d!) room, "
      "Tensor ending, Tensor rows, Tensor(e!) logits, Tensor(f!) best, Tensor asked, int drawer, "
      "int H, int E, int F, float eps, int window, int cache_bits, int panels, bool rounds) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CompositeExplicitAutograd, m) {
  m.impl("scratch", TORCH_BOX(&scratch));
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) {
  m.impl("run", TORCH_BOX(&run));
  m.impl("follow", TORCH_BOX(&follow));
}
