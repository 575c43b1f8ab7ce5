/* A word that one process writes and others wait for. Memory written before `write` is seen after a
 * `read` or `wait` that saw its value (release, acquire). Words count up and may wrap around: a value
 * is reached when the difference, taken modulo 2^32, is not negative.
 */
#define _GNU_SOURCE
#include "words.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int64_t now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int reached(uint32_t seen, uint32_t value) { return (int32_t)(seen - value) >= 0; }

uint32_t lezero_signal_read(const uint32_t *word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

void lezero_signal_write(uint32_t *word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, 0, 0, 0);
}

int lezero_signal_wait(uint32_t *word, uint32_t value, int64_t spin_us, int64_t timeout_us) {
  const int64_t begin = now_us();
  for (;;) {
    for (int i = 0; i < 64; i++) {
      if (reached(lezero_signal_read(word), value)) return 1;
      relax();
    }
    const int64_t waited = now_us() - begin;
    if (waited >= timeout_us) return 0;
    if (waited < spin_us) continue;
    /* The kernel sleeps only while the word is still what was seen, so no wake is lost. */
    const uint32_t seen = lezero_signal_read(word);
    if (reached(seen, value)) return 1;
    const int64_t left = timeout_us - waited;
    const struct timespec t = {left / 1000000, left % 1000000 * 1000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, 0, 0);
  }
}
