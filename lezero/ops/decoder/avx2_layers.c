/* Decoder layers for AVX2. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#include "../linear/avx2.h"
#include "avx2.h"
#include "layers.h"
