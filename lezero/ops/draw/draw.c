/* Vectors as the compiler makes them; one source, built once for each instruction set.
 *
 * [Note: candidates] Sorting a vocabulary takes longer than a small model's step, and few tokens nearly
 * always decide: those that score within some temperatures of the best. They are collected and sorted,
 * and where they do not suffice, twice as far down. A pass over the row finds the largest score of each
 * BLOCK first, so that collecting reads only blocks that hold a candidate. */
#include "draw.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum { LANES = 8, SUMS = 4, BLOCK = 128, DIGIT = 11, DIGITS = 1 << DIGIT };
#define FIRST_REACH 4.0   /* temperatures below the best score */
#define LAST_REACH 4096.0 /* beyond it all tokens are taken */
typedef double doubles __attribute__((vector_size(8 * LANES)));
typedef int64_t longs __attribute__((vector_size(8 * LANES)));
typedef uint64_t counts __attribute__((vector_size(8 * LANES)));
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float scores16 __attribute__((vector_size(64)));
typedef int32_t bits16 __attribute__((vector_size(64)));

INLINE doubles all(double x) { return x + (doubles){0}; }

/* e^x for x <= 0, to a few units of the last place; 0 below -708. */
INLINE doubles power(doubles x) {
  const longs alive = x >= all(-708.0);
  x = (doubles)((longs)x & alive);
  const double magic = 6755399441055744.0; /* 1.5 * 2^52: what is added becomes a whole number */
  const doubles shifted = x * 1.4426950408889634 + magic, n = shifted - magic;
  const doubles r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  doubles y = all(1.0 / 479001600);
  static const double terms[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                 1.0 / 5040,     1.0 / 720,     1.0 / 120,    1.0 / 24,
                                 1.0 / 6,        0.5,           1.0,          1.0};
  for (int i = 0; i < 12; i++) y = y * r + terms[i];
  const counts scale = ((counts)shifted << 52) + (counts)all(1.0);
  return (doubles)((longs)(y * (doubles)scale) & alive);
}

INLINE doubles widened(const float *from) {
  floats x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, doubles);
}

/* Weights of `count` scores: 1 for the highest. */
static void weigh(const float *scores, int64_t count, double highest, double inverse, double *to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const doubles w = power((widened(scores + i) - highest) * inverse);
    memcpy(to + i, &w, sizeof w);
  }
  if (i < count) {
    float rest[LANES] = {0};
    memcpy(rest, scores + i, (size_t)(count - i) * sizeof *rest);
    const doubles w = power((widened(rest) - highest) * inverse);
    memcpy(to + i, &w, (size_t)(count - i) * sizeof *to);
  }
}

/* The sum of all weights, in one order whatever the vectors are. */
static double total(const float *scores, int64_t V, double highest, double inverse) {
  doubles sums[SUMS] = {{0}};
  int64_t i = 0;
  for (; i + LANES * SUMS <= V; i += LANES * SUMS)
    for (int s = 0; s < SUMS; s++)
      sums[s] += power((widened(scores + i + s * LANES) - highest) * inverse);
  doubles sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double found = 0, rest[LANES * SUMS];
  for (int lane = 0; lane < LANES; lane++) found += sum[lane];
  weigh(scores + i, V - i, highest, inverse, rest);
  for (int64_t j = 0; j < V - i; j++) found += rest[j];
  return found;
}

/* A row while it is worked on: the largest score of each block, and candidates, best first, of equals
 * the lower token first. */
typedef struct {
  const float *scores;
  int64_t V, blocks, count, room;
  float highest;
  float *most;      /* blocks */
  uint64_t *sorted; /* room; the lower half is the token */
  uint64_t *spare;
  float *scored; /* room */
  double *weight;
} row;

static int begin(row *r, const float *scores, int64_t V) {
  memset(r, 0, sizeof *r);
  r->scores = scores, r->V = V, r->blocks = (V + BLOCK - 1) / BLOCK, r->highest = -INFINITY;
  r->most = malloc((size_t)r->blocks * sizeof *r->most);
  if (!r->most) return -1;
  int bad = 0;
  for (int64_t b = 0; b < r->blocks; b++) {
    const float *from = scores + b * BLOCK;
    const int64_t n = b + 1 < r->blocks ? BLOCK : V - b * BLOCK;
    float most = from[0];
    int nan = 0;
    if (n == BLOCK) {
      scores16 x, best;
      bits16 odd;
      memcpy(&best, from, sizeof best);
      odd = best != best;
      for (int64_t i = 16; i < BLOCK; i += 16) {
        memcpy(&x, from + i, sizeof x);
        const bits16 more = x > best;
        best = (scores16)(((bits16)x & more) | ((bits16)best & ~more)), odd |= x != x;
      }
      for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++) {
          best[lane] = best[lane + half] > best[lane] ? best[lane + half] : best[lane];
          odd[lane] |= odd[lane + half];
        }
      most = best[0], nan = odd[0] != 0;
    } else
      for (int64_t i = 0; i < n; i++) {
        nan |= from[i] != from[i];
        most = from[i] > most ? from[i] : most;
      }
    bad |= nan;
    r->most[b] = most;
    r->highest = most > r->highest ? most : r->highest;
  }
  if (bad) r->highest = NAN;
  return 0;
}

static void end(row *r) { free(r->most), free(r->sorted), free(r->spare), free(r->scored), free(r->weight); }

static int grow(row *r, int64_t room) {
  if (room <= r->room) return 0;
  free(r->sorted), free(r->spare), free(r->scored), free(r->weight);
  r->sorted = malloc((size_t)room * sizeof *r->sorted), r->spare = malloc((size_t)room * sizeof *r->spare);
  r->scored = malloc((size_t)room * sizeof *r->scored), r->weight = malloc((size_t)room * sizeof *r->weight);
  r->room = room;
  return r->sorted && r->spare && r->scored && r->weight ? 0 : -1;
}

/* A whole number that is smaller for a larger score; both zeros have one. */
INLINE uint32_t place(float score) {
  uint32_t bits;
  score += 0.0f;
  memcpy(&bits, &score, sizeof bits);
  return bits & 0x80000000u ? bits : 0x7fffffffu - bits;
}

/* By the upper half, and what is equal stays in order: tokens come in rising order. */
static void sort(row *r) {
  const int64_t n = r->count;
  if (n <= 32) {
    for (int64_t i = 1; i < n; i++) {
      const uint64_t key = r->sorted[i];
      int64_t j = i;
      for (; j && r->sorted[j - 1] > key; j--) r->sorted[j] = r->sorted[j - 1];
      r->sorted[j] = key;
    }
    return;
  }
  for (int shift = 32; shift < 64; shift += DIGIT) {
    int64_t from[DIGITS] = {0}, sum = 0;
    for (int64_t i = 0; i < n; i++) from[r->sorted[i] >> shift & (DIGITS - 1)]++;
    for (int d = 0; d < DIGITS; d++) {
      const int64_t had = from[d];
      from[d] = sum, sum += had;
    }
    for (int64_t i = 0; i < n; i++) r->spare[from[r->sorted[i] >> shift & (DIGITS - 1)]++] = r->sorted[i];
    uint64_t *const swapped = r->sorted;
    r->sorted = r->spare, r->spare = swapped;
  }
}

/* Candidates: all tokens that score `lowest` and more, sorted where there are `least` of them. */
static int collect(row *r, float lowest, int64_t least) {
  int64_t room = 0;
  for (int64_t b = 0; b < r->blocks; b++) room += r->most[b] >= lowest ? BLOCK : 0;
  if (grow(r, room)) return -1;
  r->count = 0;
  for (int64_t b = 0; b < r->blocks; b++) {
    if (!(r->most[b] >= lowest)) continue;
    const int64_t last = b + 1 < r->blocks ? (b + 1) * BLOCK : r->V;
    for (int64_t i = b * BLOCK; i < last; i++) {
      r->sorted[r->count] = (uint64_t)place(r->scores[i]) << 32 | (uint64_t)i;
      r->count += r->scores[i] >= lowest;
    }
  }
  if (r->count < least) return 0;
  sort(r);
  for (int64_t i = 0; i < r->count; i++) r->scored[i] = r->scores[r->sorted[i] & 0xffffffffu];
  return 0;
}

INLINE int64_t most_kept(const lezero_asked *a, int64_t V) {
  return a->temperature > 0 && a->top_k >= 1 ? (a->top_k < V ? (int64_t)a->top_k : V) : 1;
}
INLINE int64_t token_of(const row *r, int64_t rank) { return (int64_t)(r->sorted[rank] & 0xffffffffu); }

/* The rank of the token that is drawn among the candidates; -1 where they do not suffice. */
static int64_t chosen(const row *r, const lezero_asked *a, double sum) {
  const int64_t k = most_kept(a, r->V), n = r->count < k ? r->count : k;
  const int whole = n == k;
  double mass = sum, reached = 0;
  if (k < r->V) {
    mass = 0;
    for (int64_t i = 0; i < n; i++) mass += r->weight[i];
  }
  int64_t kept = 0;
  for (; kept < n; kept++) {
    const double w = r->weight[kept];
    if (!(w >= a->min_p && w > 0 && reached < a->top_p * mass)) break;
    reached += w;
  }
  const int complete = whole || kept < n || reached >= a->top_p * mass;
  if (!complete && (a->top_p <= 1 || a->min_p > 0)) return -1;
  const double target = a->drawn * (complete ? reached : sum);
  double passed = 0;
  for (int64_t i = 0; i < kept; i++)
    if ((passed += r->weight[i]) > target) return i;
  return complete ? (kept ? kept - 1 : 0) : -1;
}

int lezero_draw(const float *scores, int64_t V, const lezero_asked *a, int64_t *token, float *highest) {
  row r;
  *token = 0;
  if (begin(&r, scores, V)) return -1;
  *highest = r.highest;
  int failed = 0;
  if (isfinite(r.highest)) {
    const int by_chance = a->temperature > 0;
    const double inverse = by_chance ? fmin(1 / a->temperature, DBL_MAX) : 0;
    const int64_t k = most_kept(a, V);
    const double sum = k == V ? total(scores, V, r.highest, inverse) : 0;
    for (double reach = by_chance ? FIRST_REACH : 0;; reach *= 2) {
      const int all = reach > LAST_REACH;
      const float lowest = all ? -INFINITY : (float)(r.highest - reach * a->temperature);
      const int64_t least = k < V && !all ? k : 0;
      if ((failed = collect(&r, lowest, least))) break;
      if (r.count < least) continue;
      if (by_chance) {
        weigh(r.scored, r.count, r.highest, inverse, r.weight);
        const int64_t rank = chosen(&r, a, sum);
        if (rank < 0 && !all) continue;
        *token = token_of(&r, rank < 0 ? 0 : rank);
      } else
        *token = token_of(&r, 0);
      break;
    }
  }
  end(&r);
  return failed;
}

int lezero_name(const float *scores, int64_t V, int64_t token, int64_t most, float *own,
                int64_t *likeliest, float *logprobs) {
  row r;
  if (begin(&r, scores, V)) return -1;
  int failed = 0;
  if (!isfinite(r.highest)) {
    *own = NAN;
    for (int64_t i = 0; i < most; i++) likeliest[i] = 0, logprobs[i] = NAN;
  } else {
    const double lse = r.highest + log(total(scores, V, r.highest, 1.0));
    *own = (float)(scores[token] - lse);
    for (double reach = FIRST_REACH; most; reach *= 2) {
      const int all = reach > LAST_REACH;
      const float lowest = all ? -INFINITY : (float)(r.highest - reach);
      if ((failed = collect(&r, lowest, most))) break;
      if (r.count < most) continue;
      for (int64_t i = 0; i < most; i++) {
        likeliest[i] = token_of(&r, i);
        logprobs[i] = (float)(r.scored[i] - lse);
      }
      break;
    }
  }
  end(&r);
  return failed;
}
