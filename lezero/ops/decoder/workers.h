/* Who does what of a step; included by layers.h. */

/* [Note: alone]
 * A step of so few tokens that they are one tile is prepared by every worker for itself, which takes
 * no longer than by one of them for all, and saves four of a layer's barriers. So each has its own
 * copy of the residual stream, as long as all of these together are small. */

/* [Note: own tokens]
 * Of a long prompt each worker takes its own tokens through all products: what one of them writes the same
 * one reads, from its own cache, and workers meet for attention alone. Weights are read by all of them. */

/* [Note: wanted rows]
 * Behind the last layer's keys and values only the rows whose logits are wanted go on, and what lies
 * between them: of a prompt's last chunk that is one row, of those before none. */
typedef struct {
  int64_t first, end;
} row_range;

typedef struct {
  const lezero_step *s;
  layout a;
  int64_t begin, end, meets;
  float *x;       /* (T, D) */
  char *rows;     /* where it fills them in; the layout's, and `prepared` too, or its own */
  void *prepared, *gated;
  lezero_ahead *ahead; /* [Note: fetching meanwhile] */
  int by_tokens;
  int64_t first, count; /* rows that it prepares and multiplies: its own tokens, or all that go on */
  row_range asking;     /* rows that attend to others */
} worker;

static worker worker_of(const lezero_step *s, int64_t begin, int64_t end, lezero_ahead *ahead) {
  const layout a = ((struct shared_state *)s->scratch)->layout;
  worker w = {s, a, begin, end, 0, s->x, a.rows, a.prepared, a.gated, ahead, a.by_tokens, 0, s->T,
              {0, s->T}};
  if (a.by_tokens) {
    w.first = own_row(s, begin), w.count = own_row(s, end) - w.first;
    w.prepared = (char *)a.prepared + begin * (int64_t)a.prepared_each;
    w.gated = (char *)a.gated + begin * (int64_t)a.gated_each;
    w.rows = a.normal;
  }
  if (!a.alone) return w;
  char *own = a.own + begin * (int64_t)a.each;
  w.x = (float *)(own + a.alone_x), w.rows = own + a.alone_rows, w.prepared = own + a.alone_prepared;
  memcpy(w.x, s->x, (size_t)(s->T * s->D) * 4);
  return w;
}

static row_range wanted_rows(const lezero_step *s) {
  row_range r = {s->rows ? s->T : 0, 0};
  for (int64_t i = 0; i < s->rows; i++) {
    r.first = least_of(r.first, s->row[i]);
    r.end = larger_of(r.end, s->row[i] + 1);
  }
  return r;
}

/* Whether they fit the room that each worker has for its own tokens. */
static int few_wanted(const lezero_step *s) {
  const row_range r = wanted_rows(s);
  return s->V && (r.end - r.first) * s->crew <= s->T;
}

/* From now on all workers share the work on these rows. */
static void share(worker *w, row_range r) {
  w->by_tokens = 0, w->prepared = w->a.alone ? w->prepared : w->a.prepared, w->gated = w->a.gated;
  w->first = r.first, w->count = r.end - r.first;
}

static int64_t from(const worker *w, int64_t units) { return units * w->begin / w->s->crew; }
static int64_t upto(const worker *w, int64_t units) { return units * w->end / w->s->crew; }

/* [Note: fetching meanwhile]
 * Memory is the limit of a step of few tokens, and it would rest while tokens are prepared, attention
 * is computed, and workers meet. So a worker fetches its part of the weights that are multiplied next
 * meanwhile: a few lines with each step of such work, and all the time while it waits. */
static void look_ahead(worker *w, const lezero_linear *next) {
  const int64_t pairs = lezero_linear_pairs(next);
  *w->ahead = lezero_linear_part(next, from(w, pairs), upto(w, pairs));
  w->ahead->left = least_of(w->ahead->left, MOST_AHEAD);
}

/* Returns when all workers are here, with what they wrote before. */
static void meet(worker *w) {
  w->meets += w->s->crew;
  int64_t *meets = &w->a.shared->meets;
  __atomic_fetch_add(meets, w->end - w->begin, __ATOMIC_ACQ_REL);
  for (int spins = 0; __atomic_load_n(meets, __ATOMIC_ACQUIRE) < w->meets; spins++) {
    if (w->ahead->left > 0) fetch_some(w->ahead, 1);
    else if (spins < 4000) rest();
    else sched_yield(); /* another program has the core that we wait for */
  }
}
