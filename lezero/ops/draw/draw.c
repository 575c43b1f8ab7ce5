/* Vectors as the compiler makes them; one source, built once for each instruction set.
 *
 * [Note: candidates] Sorting a vocabulary takes longer than a small model's step, and few tokens nearly
 * always decide: those that score within some temperatures of the best. They are collected, and where
 * they do not suffice, twice as far down. A pass over the row finds the largest score of each BLOCK first,
 * so that collecting reads only blocks that hold a candidate. Many candidates, as of a flat row, go into
 * buckets by their score, and only a bucket in which something is decided is put in order. */
#include "draw.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum { LANES = 8, SUMS = 4, BLOCK = 128, FEW = 48, DIGITS = 1 << 11 };
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

typedef struct {
  uint64_t key; /* smaller for a larger score, and of equals for a lower token, which is its lower half */
  double weight;
} candidate;

/* A row while it is worked on: the largest score of each block, and candidates in buckets, the best
 * bucket first; a bucket is put in order when somebody looks into it. */
typedef struct {
  const float *scores;
  int64_t V, blocks, count;
  float highest;
  candidate *of, *spare; /* V each, as the next two */
  double *weights;
  float *scored;
  float *most; /* blocks */
  int64_t edge[DIGITS + 1];
  double mass[DIGITS], least[DIGITS]; /* of a bucket's weights: the sum, and the smallest */
  char ordered[DIGITS];
  int buckets;
} row;

enum { EACH = 2 * sizeof(candidate) + sizeof(double) + sizeof(float) };

static void *room_on(lezero_desk *desk, size_t bytes) {
  if (bytes > desk->size) {
    free(desk->top);
    desk->top = malloc(bytes), desk->size = desk->top ? bytes : 0;
  }
  return desk->top;
}

static int begin(row *r, const float *scores, int64_t V, lezero_desk *desk) {
  r->scores = scores, r->V = V, r->blocks = (V + BLOCK - 1) / BLOCK, r->highest = -INFINITY;
  r->of = room_on(desk, (size_t)V * EACH + (size_t)r->blocks * sizeof *r->most + 64);
  if (!r->of) return -1;
  r->spare = r->of + V, r->weights = (double *)(r->spare + V), r->scored = (float *)(r->weights + V);
  r->most = r->scored + V;
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

/* A whole number that is smaller for a larger score; both zeros have one. */
INLINE uint32_t place(float score) {
  uint32_t bits;
  score += 0.0f;
  memcpy(&bits, &score, sizeof bits);
  return bits & 0x80000000u ? bits : 0x7fffffffu - bits;
}

/* Candidates: all tokens that score `lowest` and more, as they come, and their weights' sum. */
static void collect(row *r, float lowest, double inverse, double *sum) {
  int64_t n = 0;
  for (int64_t b = 0; b < r->blocks; b++) {
    if (!(r->most[b] >= lowest)) continue;
    const int64_t last = b + 1 < r->blocks ? (b + 1) * BLOCK : r->V;
    for (int64_t i = b * BLOCK; i < last; i++) {
      r->of[n].key = (uint64_t)i, r->scored[n] = r->scores[i];
      n += r->scores[i] >= lowest;
    }
  }
  weigh(r->scored, n, r->highest, inverse, r->weights);
  double found[LANES] = {0};
  for (int64_t i = 0; i < n; i++) found[i % LANES] += r->weights[i];
  *sum = 0;
  for (int lane = 0; lane < LANES; lane++) *sum += found[lane];
  r->count = n;
}

/* Puts candidates into buckets of about equal scores, a few of each, where they are many. */
static void spread(row *r) {
  const int64_t n = r->count;
  uint32_t best = place(r->highest), worst = best;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t key = place(r->scored[i]);
    worst = key > worst ? key : worst;
    r->of[i].key |= (uint64_t)key << 32, r->of[i].weight = r->weights[i];
  }
  int shift = 32;
  if (n > FEW)
    while (shift && (worst - best) >> (shift - 1) < DIGITS) shift--;
  r->buckets = shift == 32 ? 1 : (int)((worst - best) >> shift) + 1;
  memset(r->edge, 0, (size_t)(r->buckets + 1) * sizeof *r->edge);
  memset(r->mass, 0, (size_t)r->buckets * sizeof *r->mass);
  memset(r->ordered, 0, (size_t)r->buckets);
  for (int b = 0; b < r->buckets; b++) r->least[b] = 1;
  for (int64_t i = 0; i < n; i++) {
    const uint64_t b = (r->of[i].key - ((uint64_t)best << 32)) >> (32 + shift - 1) >> 1;
    const double w = r->of[i].weight;
    r->edge[b + 1]++, r->mass[b] += w, r->least[b] = w < r->least[b] ? w : r->least[b];
  }
  if (r->buckets == 1) return;
  int64_t at[DIGITS];
  for (int b = 0; b < r->buckets; b++) at[b] = r->edge[b], r->edge[b + 1] += r->edge[b];
  for (int64_t i = 0; i < n; i++) {
    const uint64_t b = (r->of[i].key - ((uint64_t)best << 32)) >> (32 + shift - 1) >> 1;
    r->spare[at[b]++] = r->of[i];
  }
  candidate *const swapped = r->of;
  r->of = r->spare, r->spare = swapped;
}

/* The candidates of a bucket, put in order: the best first, of equals the lower token. They were in
 * the order of tokens, and what is equal stays in it. */
static const candidate *ordered(row *r, int b) {
  candidate *x = r->of + r->edge[b], *y = r->spare;
  const int64_t n = r->edge[b + 1] - r->edge[b];
  if (r->ordered[b]) return x;
  r->ordered[b] = 1;
  if (n <= FEW) {
    for (int64_t i = 1; i < n; i++) {
      const candidate one = x[i];
      int64_t j = i;
      for (; j && x[j - 1].key > one.key; j--) x[j] = x[j - 1];
      x[j] = one;
    }
    return x;
  }
  for (int shift = 32; shift < 64; shift += 8) {
    int64_t from[256] = {0}, sum = 0;
    for (int64_t i = 0; i < n; i++) from[x[i].key >> shift & 255]++;
    for (int d = 0; d < 256; d++) {
      const int64_t had = from[d];
      from[d] = sum, sum += had;
    }
    for (int64_t i = 0; i < n; i++) y[from[x[i].key >> shift & 255]++] = x[i];
    candidate *const swapped = x;
    x = y, y = swapped;
  }
  return x; /* four passes: where it began */
}

INLINE int64_t most_kept(const lezero_asked *a, int64_t V) {
  return a->temperature > 0 && a->top_k >= 1 ? (a->top_k < V ? (int64_t)a->top_k : V) : 1;
}
INLINE int64_t token_of(const candidate *x) { return (int64_t)(x->key & 0xffffffffu); }

/* How many of the best candidates pass the filters, at least one, and their weight. */
static int64_t kept_of(row *r, int64_t k, double min_p, double limit, double *reached) {
  int64_t kept = 0;
  *reached = 0;
  for (int b = 0; b < r->buckets; b++) {
    const int64_t n = r->edge[b + 1] - r->edge[b];
    if (kept + n <= k && r->least[b] >= min_p && r->least[b] > 0 && *reached + r->mass[b] < limit) {
      kept += n, *reached += r->mass[b];
      continue;
    }
    const candidate *const x = ordered(r, b);
    for (int64_t i = 0; i < n; i++, kept++) {
      const int passes = kept < k && x[i].weight >= min_p && x[i].weight > 0 && *reached < limit;
      if (kept && !passes) return kept;
      *reached += x[i].weight;
    }
  }
  return kept;
}

/* The first of the `kept` best candidates that reaches beyond `target` with those before it; or the
 * last of them, or -1 where `beyond`. */
static int64_t first_beyond(row *r, double target, int64_t kept, int beyond) {
  double passed = 0;
  int64_t last = -1, left = kept;
  for (int b = 0; b < r->buckets && left; b++) {
    const int64_t n = r->edge[b + 1] - r->edge[b];
    if (n < left && passed + r->mass[b] <= target) {
      passed += r->mass[b], left -= n;
      continue;
    }
    const candidate *const x = ordered(r, b);
    for (int64_t i = 0; i < n && left; i++, left--) {
      last = token_of(x + i);
      if ((passed += x[i].weight) > target) return last;
    }
  }
  return beyond ? -1 : last;
}

/* The token that is drawn; -1 where the candidates do not suffice. sum: the weight of all tokens. */
static int64_t chosen(row *r, const lezero_asked *a, double sum) {
  const int64_t k = most_kept(a, r->V);
  double mass = sum, reached;
  if (k < r->V) kept_of(r, k, 0, INFINITY, &mass);
  const double limit = a->top_p * mass;
  const int64_t kept = kept_of(r, k, a->min_p, limit, &reached);
  const int complete = r->count >= k || kept < r->count || reached >= limit;
  if (!complete && (a->top_p <= 1 || a->min_p > 0)) return -1;
  return first_beyond(r, a->drawn * (complete ? reached : sum), kept, !complete);
}

int lezero_draw(const float *scores, int64_t V, const lezero_asked *a, lezero_desk *desk,
                int64_t *token, float *highest) {
  row r;
  *token = 0;
  if (begin(&r, scores, V, desk)) return -1;
  *highest = r.highest;
  if (isfinite(r.highest)) {
    const int by_chance = a->temperature > 0;
    const double inverse = by_chance ? fmin(1 / a->temperature, DBL_MAX) : 0;
    const int64_t k = most_kept(a, V);
    const double sum = k == V && by_chance ? total(scores, V, r.highest, inverse) : 0;
    const double needed = a->top_p <= 1 ? a->top_p * sum : a->min_p > 0 ? 0 : a->drawn * sum;
    for (double reach = by_chance ? FIRST_REACH : 0;; reach *= 2) {
      const int all = reach > LAST_REACH;
      double had;
      const float lowest = all ? -INFINITY : (float)(r.highest - reach * a->temperature);
      collect(&r, lowest, inverse, &had);
      if (!all && k < V && r.count < k) continue;
      if (!all && k == V && had < needed) continue;
      if (by_chance) spread(&r);
      const int64_t found = by_chance ? chosen(&r, a, sum) : token_of(r.of);
      if (found < 0 && !all) continue;
      *token = found < 0 ? 0 : found;
      break;
    }
  }
  return 0;
}

int lezero_name(const float *scores, int64_t V, int64_t token, int64_t most, lezero_desk *desk,
                float *own, int64_t *likeliest, float *logprobs) {
  row r;
  if (begin(&r, scores, V, desk)) return -1;
  if (!isfinite(r.highest)) {
    *own = NAN;
    for (int64_t i = 0; i < most; i++) likeliest[i] = 0, logprobs[i] = NAN;
  } else {
    const double lse = log(total(scores, V, r.highest, 1.0));
    *own = (float)((double)scores[token] - r.highest - lse);
    for (double reach = FIRST_REACH; most; reach *= 2) {
      double had;
      const float lowest = reach > LAST_REACH ? -INFINITY : (float)(r.highest - reach);
      collect(&r, lowest, 1.0, &had);
      if (r.count < most) continue;
      spread(&r);
      int64_t named = 0;
      for (int b = 0; named < most; b++) {
        const candidate *const x = ordered(&r, b);
        for (int64_t i = 0; i < r.edge[b + 1] - r.edge[b] && named < most; i++, named++) {
          likeliest[named] = token_of(x + i);
          logprobs[named] = (float)((double)scores[likeliest[named]] - r.highest - lse);
        }
      }
      break;
    }
  }
  return 0;
}

int lezero_penalize(const float *scores, int64_t V, const int64_t *tokens, int64_t answer, int64_t count,
                    const lezero_penalties *penalties, lezero_desk *marks, float *to) {
  enum { SEEN = 1 << 30 };
  const float repetition = (float)penalties->repetition, presence = (float)penalties->presence;
  const float frequency = (float)penalties->frequency;
  if (marks->size < (size_t)V * sizeof(int32_t)) {
    free(marks->top);
    marks->top = calloc((size_t)V, sizeof(int32_t));
    marks->size = marks->top ? (size_t)V * sizeof(int32_t) : 0;
  }
  int32_t *const seen = marks->top;
  if (!seen) return -1;
  for (int64_t i = 0; i < count; i++)
    if (tokens[i] < 0 || tokens[i] >= V) return -2;
  memcpy(to, scores, (size_t)V * sizeof *to);
  for (int64_t i = 0; i < count; i++) {
    const int64_t t = tokens[i];
    if (!seen[t]) to[t] = to[t] < 0 ? to[t] * repetition : to[t] / repetition;
    seen[t] |= SEEN;
    seen[t] += i >= answer;
  }
  for (int64_t i = answer; i < count; i++) {
    const int64_t t = tokens[i];
    if (seen[t] == SEEN) continue;
    to[t] -= presence + frequency * (float)(seen[t] - SEEN);
    seen[t] = SEEN;
  }
  for (int64_t i = 0; i < count; i++) seen[tokens[i]] = 0;
  return 0;
}
