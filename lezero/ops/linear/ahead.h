/* Fetching weights while something else is computed. Included by tiles.h and by the decoder. */

enum { LINE = 64 }; /* bytes */

/* The next lines of what is multiplied later, if there are any. */
INLINE void fetch_some(lezero_ahead *a, const int lines) {
  if (!a || a->left <= 0) return;
  UNROLL for (int i = 0; i < lines; i++) prefetch_far(a->at + LINE * i);
  a->at += LINE * lines, a->left -= LINE * lines;
}
