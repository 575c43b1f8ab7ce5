/* Linear layers for AMX. Few tokens are limited by memory, and small blocks by what is done with their
 * sums: their whole numbers are summed by AVX-512, with the same result. bf16 always takes tiles, so
 * that a token's result does not depend on its batch. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#define IN_LINES(l) (in_bf16(l) || (l)->M > few_tokens(l))
#define FEW_TOKENS
#define MANY_TOKENS(l) many_tokens(l)
#define LEFT_OF_SCALE(scale) _mm512_scalef_ps(scale, difference(all_floats(0), power_of(scale)))
#include "avx512.h"
/* The power of two in each scale, from -100 to 100: what is smaller would be a zero to tiles, and
 * exact_line() has no room for much more. */
INLINE floats power_of(floats scale) { return limited(_mm512_getexp_ps(scale), 100); }
#include "tiles.h"
#include "../decoder/avx512.h"
#include "../decoder/power.h"
#include "amx_tile.h"
#include "amx.h"
