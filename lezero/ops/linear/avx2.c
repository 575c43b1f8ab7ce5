/* Linear layers for AVX2. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#include "avx2.h"
#include "vectors.h"
