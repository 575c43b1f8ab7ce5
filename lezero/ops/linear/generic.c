/* Linear layers for any processor. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#include "generic.h"
#include "vectors.h"
