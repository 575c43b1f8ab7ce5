/* Linear layers for AVX-512 with VNNI; where flags allow, bf16 is multiplied by AVX512-BF16. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#include "avx512.h"
#include "vectors.h"
