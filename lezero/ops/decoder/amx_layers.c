/* Decoder layers for AMX: those for AVX-512, whose attention goes by tiles. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#define TILES
#include "../linear/avx512.h"
#include "../linear/amx_tile.h"
#include "avx512.h"
#include "layers.h"
