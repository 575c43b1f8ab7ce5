/* Decoder layers for any processor. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#include "../linear/generic.h"
#include "generic.h"
#include "layers.h"
