/* The largest logit of each row, included by layers.h. */

/* A row's largest among a worker's columns, as whole numbers in the same order; and whether one of
 * them is not finite. */
typedef struct best_logit {
  int32_t most, bad;
  int64_t token;
} best_logit;
_Static_assert(sizeof(best_logit) == BEST_BYTES, "the room that layers.h makes for one");

enum { PIECE = 256 }; /* columns that are gone through again for the place of the largest */

INLINE int32_t in_order(int32_t bits) {
  return bits == INT32_MIN ? 0 : bits ^ ((bits >> 31) & 0x7fffffff); /* -0 is 0 */
}

static best_logit best_of(const int32_t *bits, int64_t begin, int64_t end) {
  best_logit best = {INT32_MIN, 0, begin};
  for (int64_t at = begin; at < end; at += PIECE) {
    const int64_t last = least_of(at + PIECE, end);
    int32_t most = INT32_MIN, size = 0;
    for (int64_t i = at; i < last; i++) {
      const int32_t x = in_order(bits[i]), a = bits[i] & 0x7fffffff;
      most = x > most ? x : most, size = a > size ? a : size;
    }
    best.bad |= size >= 0x7f800000;
    if (most > best.most) best.most = most, best.token = at;
  }
  while (best.token + 1 < end && in_order(bits[best.token]) != best.most) best.token++;
  return best;
}

/* What this worker's part of the head gave, to be joined when all are there. */
static void find_best(const worker *w, const lezero_linear *head) {
  const int64_t pairs = lezero_linear_pairs(head), V = w->s->V;
  const int64_t begin = 32 * from(w, pairs), end = least_of(32 * upto(w, pairs), V);
  for (int64_t r = 0; r < w->s->rows; r++)
    for (int64_t i = w->begin; i < w->end; i++) /* one thread has the columns of all its workers */
      w->a.best[i * w->s->rows + r] =
          best_of((const int32_t *)w->s->logits + r * V, begin, i == w->begin ? end : begin);
}

/* The first of equals; -1 where a logit is not finite, and who asked must look for himself. */
static void join_best(const worker *w) {
  const lezero_step *s = w->s;
  for (int64_t r = 0; r < s->rows; r++) {
    best_logit best = w->a.best[r];
    for (int64_t i = 1; i < s->crew; i++) {
      const best_logit *next = w->a.best + i * s->rows + r;
      best.bad |= next->bad;
      if (next->most > best.most) best.most = next->most, best.token = next->token;
    }
    s->best[r] = best.bad ? -1 : best.token;
  }
}
