/* Words in memory that processes share (words.c). */
#ifndef LEZERO_WORDS_H
#define LEZERO_WORDS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

uint32_t lezero_signal_read(const uint32_t *word);
void lezero_signal_write(uint32_t *word, uint32_t value);
/* 1 when the word reached `value`, 0 after `timeout_us`; does not sleep in the first `spin_us`. */
int lezero_signal_wait(uint32_t *word, uint32_t value, int64_t spin_us, int64_t timeout_us);

#ifdef __cplusplus
}
#endif
#endif
