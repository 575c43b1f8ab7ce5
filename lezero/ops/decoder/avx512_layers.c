/* Decoder layers for AVX-512. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#include "../linear/avx512.h"
#include "avx512.h"
#include "layers.h"
