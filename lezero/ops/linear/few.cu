// A few tokens times a weight, on NVIDIA's matrix units: see cuda_few.py.
//
//     out = norm(x) wᵀ + bias + residual        or, of gates and what they multiply, silu(g) u
//
// A block takes tiles of 16 outputs and all inputs, cut into steps that its warps take in turn. A
// warp's lanes read 16 bytes each of rows g and g + 8 of the tile (g = lane / 4), and what they
// read is, but for a few instructions, what mma.m16n8k16 wants in their registers: the order of
// inputs within a product is free as long as tokens are read in the same one. So weights pass
// through no shared memory. Tokens are the 8 columns of a product; what lanes of columns that are
// none read is anything, and nobody looks at what comes of it.
//
// A code of 4 bits below the leading bit of a 16-bit float is 128 + c (fp16: 1024 + c) without any
// arithmetic; 8 bits make two such numbers in bf16, whose sum is exact.
//
// Weights that depend on no launch before this one are asked for before its end is waited for.
//
// Given: BITS, J (rows.py), GROUP (0: a scale a row), SCALE (0 fp32, 1 fp16, 2 bf16), HALF (fp16
// tokens), EVEN (inputs are whole steps), PAD (1, 8 or 16 tokens), STAGED (tokens lie in shared
// memory), WARPS, BLOCKS of a multiprocessor, whether there are ZERO, BIAS, NORMED, PAIRED,
// RESIDUAL, NEXT, and EARLY: no launch ahead that may still run writes weights.

constexpr int UNITS = BITS == 4 ? J / 16 : 4;      // of 16 bytes a lane and row, in a step
constexpr int STEP = UNITS * 4 * 16 * 8 / BITS;    // inputs
constexpr int SPAN = BITS == 16 || GROUP == 0 || GROUP > STEP ? 1 : STEP / GROUP;  // groups
constexpr int TILES = PAD > 8 ? 2 : 1, TOKENS = 8 * TILES;
constexpr int WIDTH = PAIRED ? 8 : 16;  // outputs of a tile
constexpr int SOON = 4;                 // sums of squares of a lane that are asked for early

// Scales or zero points as they are kept, 4 or 2 bytes each, side by side.
struct Several {
    u32 words[SCALE ? (SPAN + 1) / 2 : SPAN];
};

struct Step {
    uint4 w[2][UNITS];
    Several scale[2], zero[2];
};

struct Around {
    const u16* bias;
    const u16* residual;
    const float* squares;  // (parts, M)
    const u16* next_norm;
    u16* next;
    float* next_squares;
    int parts;
    float eps;
};

__device__ __forceinline__ float wide(u16 x) { return number<HALF ? 1 : 2>(&x, 0); }

__device__ __forceinline__ float at_place(const Several& s, int i) {
    if (SCALE == 0) return __uint_as_float(s.words[i]);
    u32 word = s.words[i / 2];
    if (SCALE == 2) return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
    return half_of(i % 2 ? word >> 16 : word);
}

// Of SPAN neighbours in a row that begins at `row`; those after the last one are the last.
__device__ __forceinline__ Several several(const void* from, i64 row, int at, int groups) {
    constexpr int WORDS = sizeof(Several) / 4;
    Several s;
    if (SCALE && (!EVEN || SPAN == 1)) {
        const u16* line = (const u16*)from + row;
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            u32 bits = line[min(at + i, groups - 1)];
            s.words[i / 2] = i % 2 ? s.words[i / 2] | bits << 16 : bits;
        }
    } else if (!EVEN) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) s.words[i] = ((const u32*)from)[row + min(at + i, groups - 1)];
    } else {
        const u32* line = (const u32*)((const char*)from + (row + at) * (SCALE ? 2 : 4));
        constexpr int WIDE = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
#pragma unroll
        for (int i = 0; i < WORDS; i += WIDE) {
            if (WIDE == 4) *(uint4*)(s.words + i) = *(const uint4*)(line + i);
            else if (WIDE == 2) *(uint2*)(s.words + i) = *(const uint2*)(line + i);
            else s.words[i] = line[i];
        }
    }
    return s;
}

// Of codes counted from 0: what stands for 0 where there is no zero point.
constexpr int MIDDLE = BITS == 4 ? 8 : 128;

constexpr u32 ONES = HALF ? 0x3C003C00u : 0x3F803F80u;

// Tokens lie as (K / 16, PAD, 16), and in shared memory a little apart, for its banks.
constexpr int SLICE = 16 * PAD, APART = STAGED ? SLICE + (PAD > 1 ? 32 : 0) : SLICE;

// Inputs k of a lane's tokens: `from` is where they lie for k = at.
struct Tokens {
    const u16* from[TILES];
    int at, K;

    __device__ __forceinline__ uint2 four(int n, int slice, int inside, int k) const {
        if (!EVEN && at + k >= K) return make_uint2(0, 0);
        return *(const uint2*)(from[n] + slice * APART + inside);
    }

    __device__ __forceinline__ uint4 eight(int n, int slice, int inside, int k) const {
        if (!EVEN && at + k >= K) return make_uint4(0, 0, 0, 0);
        return *(const uint4*)(from[n] + slice * APART + inside);
    }
};

// What a step of a tile reads.
struct Weights {
    const char* w;
    const void *scale, *zero;
    i64 line_bytes;
    int N, K, groups;

    // Rows g and g + 8 of a tile; of gates the second is what the first multiplies.
    __device__ __forceinline__ i64 row(int tile, int g, int r) const {
        int last = outputs() - 1;
        return PAIRED ? r * (last + 1) + min(tile * 8 + g, last) : min(tile * 16 + 8 * r + g, last);
    }

    __device__ __forceinline__ int outputs() const { return PAIRED ? N / 2 : N; }
};

__device__ __forceinline__ void load(Step& s, const Weights& from, int tile, int b, int lane) {
    int g = lane / 4, t = lane % 4, K = from.K, groups = from.groups;
    i64 row[2] = {from.row(tile, g, 0), from.row(tile, g, 1)};
    const char* line[2] = {from.w + row[0] * from.line_bytes, from.w + row[1] * from.line_bytes};
    const void *scale = from.scale, *zero = from.zero;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            i64 at = (i64)b * UNITS * 64 + u * 64 + t * 16;
            bool inside = EVEN || BITS == 4 || at * 8 < (i64)K * BITS;
            s.w[r][u] = inside ? fetched(line[r] + at) : make_uint4(0, 0, 0, 0);
        }
    if (BITS == 16 || GROUP == 0) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int at = GROUP > STEP ? b * STEP / (GROUP ? GROUP : 1) : b * SPAN;
        s.scale[r] = several(scale, row[r] * groups, at, groups);
        if (ZERO) s.zero[r] = several(zero, row[r] * groups, at, groups);
    }
}

// Adds a group's products. sums: of the group's tokens, where zero points ask for them.
__device__ __forceinline__ void add(
    float (*acc)[4], float (*c)[4], const float* sums, const Step& s, int i, int t) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float x = c[n][e];
            if (ZERO)
                x -= (at_place(s.zero[e / 2], i) - MIDDLE) * sums[i * TOKENS + 8 * n + 2 * t + e % 2];
            acc[n][e] += at_place(s.scale[e / 2], i) * x;
        }
}

__device__ __forceinline__ void work(
    const Step& s, const Tokens& x, float (*acc)[4], const float* sums, int t) {
    float c[TILES][4];
    auto clear = [&]() {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[n][e] = 0;
    };
    auto product = [&](const u32* a, const uint2* b) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
            multiply(GROUP ? c[n] : acc[n], a[0], a[1], a[2], a[3], b[n].x, b[n].y);
    };
    if (BITS == 4) {
        constexpr u32 OFF = HALF ? 0xE408E408u : 0xC308C308u, BASE = HALF ? 0x64006400u : 0x43004300u;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 m[2][UNITS][2];
            u32 selector = h ? 0x7632 : 0x5410;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    m[r][u][0] = __byte_perm(s.w[r][u].x, s.w[r][u].y, selector);
                    m[r][u][1] = __byte_perm(s.w[r][u].z, s.w[r][u].w, selector);
                }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                constexpr int RUNS = GROUP > J ? GROUP / J : 1;  // of one group
                int i = 4 * h + j;
                if (GROUP && i % RUNS == 0) clear();
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    u32 a[4];
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        a[q] = below<0x000F000Fu, BASE>(m[q % 2][u][q / 2] >> (4 * j));
                        a[q] = plus(a[q], OFF);
                    }
                    uint2 b[TILES];
#pragma unroll
                    for (int n = 0; n < TILES; n++)
                        b[n] = x.four(n, i * J / 16 + u, 0, i * J + 16 * u);
                    product(a, b);
                }
                if (GROUP && i % RUNS == RUNS - 1)
                    add(acc, c, sums, s, i / RUNS, t);
            }
        }
    } else if (BITS == 8) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            constexpr int RUNS = GROUP > 64 ? GROUP / 64 : 1;
            if (GROUP && u % RUNS == 0) clear();
            u32 words[2][4] = {{s.w[0][u].x, s.w[0][u].y, s.w[0][u].z, s.w[0][u].w},
                               {s.w[1][u].x, s.w[1][u].y, s.w[1][u].z, s.w[1][u].w}};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint4 both[TILES];
#pragma unroll
                for (int n = 0; n < TILES; n++)
                    both[n] = x.eight(n, 4 * u, 8 * h, 64 * u + 8 * h);
#pragma unroll
                for (int q = 0; q < 2; q++) {
                    uint2 b[TILES];  // inputs 0 and 2, 1 and 3
#pragma unroll
                    for (int n = 0; n < TILES; n++) {
                        u32 one = q ? both[n].z : both[n].x, two = q ? both[n].w : both[n].y;
                        b[n] = make_uint2(__byte_perm(one, two, 0x5410), __byte_perm(one, two, 0x7632));
                    }
                    u32 a[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {  // bytes 0 and 2, then 1 and 3, of rows g and g + 8
                        u32 word = words[e % 2][2 * h + q] >> (e / 2 * 8);
                        if (HALF) {
                            a[e] = plus(below<0x00FF00FFu, 0x64806480u>(word), 0xE480E480u);
                        } else {
                            u32 high = below<0x00780078u, 0x43C043C0u>(word >> 1);  // 256 + 16 h
                            u32 low = below<0x000F000Fu, 0x43004300u>(word);        // 128 + l
                            a[e] = plus(plus(high, 0xC400C400u), low);              // - 512
                        }
                    }
                    product(a, b);
                }
            }
            if (GROUP && u % RUNS == RUNS - 1 || GROUP && u == UNITS - 1)
                add(acc, c, sums, s, u / RUNS, t);
        }
    } else {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            uint2 first[TILES], second[TILES];
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                uint4 b = x.eight(n, 2 * u, 0, 32 * u);
                first[n] = make_uint2(b.x, b.y), second[n] = make_uint2(b.z, b.w);
            }
            const uint4 &one = s.w[0][u], &two = s.w[1][u];
            u32 left[4] = {one.x, two.x, one.y, two.y}, right[4] = {one.z, two.z, one.w, two.w};
            product(left, first);
            product(right, second);
        }
    }
}

// Sums of a step's tokens, SPAN groups of them, whatever the rows: of columns 2 t and 2 t + 1.
__device__ __forceinline__ void count(const Tokens& x, float* sums, int lane) {
    constexpr int PART = STEP / SPAN / 16;  // products of a group
    // A lane's inputs in the order of `work`: a unit of 8 bits is four products, of bytes apart.
#pragma unroll
    for (int i = 0; i < SPAN; i++) {
        float sum[TILES][4] = {};
#pragma unroll
        for (int q = 0; q < PART; q++) {
            int p = i * PART + q;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                uint2 b = BITS == 4 ? x.four(n, p, 0, 16 * p)
                                    : x.four(n, p / 4 * 4, 4 * (p % 4), p / 4 * 64 + 4 * (p % 4));
                multiply(sum[n], ONES, ONES, ONES, ONES, b.x, b.y);
            }
        }
        if (lane < 4)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) sums[i * TOKENS + 8 * n + 2 * lane + e] = sum[n][e];
    }
}

// What an output takes beside its sum: number `e` of a tile's, token by token.
struct Beside {
    float bias, of_up, residual, norm;
    bool ours;

    __device__ __forceinline__ Beside(const Around& from, int tile, int e, int M, int outputs) {
        int m = e / WIDTH, n = tile * WIDTH + e % WIDTH;
        ours = m < M && n < outputs;
        if (!ours) return;
        if (BIAS) bias = wide(soon(from.bias + n));
        if (BIAS && PAIRED) of_up = wide(soon(from.bias + outputs + n));
        if (RESIDUAL) residual = wide(soon(from.residual + (i64)m * outputs + n));
        if (NEXT) norm = wide(soon(from.next_norm + n));
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) few(
    const u16* x, Weights weights, u16* out, int M, Around around) {
    __shared__ float sums[2][WARPS][TOKENS][17];
    __shared__ float factor[TOKENS];
    extern __shared__ uint4 staged[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int K = weights.K, outputs = weights.outputs();
    int steps = (K + STEP - 1) / STEP, tiles = (outputs + WIDTH - 1) / WIDTH;
    Step step;
    let_next_begin();
    if (!EARLY) wait();
    if (warp < steps) load(step, weights, blockIdx.x, warp, lane);
    if (EARLY) wait();

    if (STAGED)
        for (int i = threadIdx.x; i < K / 8 * PAD; i += 32 * WARPS)
            staged[i / (2 * PAD) * (APART / 8) + i % (2 * PAD)] = ((const uint4*)x)[i];
    // What stands around products is asked for before them, and all of a step's tokens at once: there
    // are too few registers to ask for them as products take them.
    int ahead = warp * STEP + lane * 16;
    if (BITS == 4 && PAD == 1 && !STAGED && lane * 16 < STEP && ahead < K) soon(x + ahead);
    float squares[SOON];
    if (NORMED)
#pragma unroll
        for (int i = 0; i < SOON; i++) {
            int p = lane + 32 * i;
            squares[i] = warp < M && p < around.parts ? soon(around.squares + p * M + warp) : 0;
        }
    Beside first(around, blockIdx.x, threadIdx.x, M, outputs);
    if (STAGED) __syncthreads();
    const u16* tokens = STAGED ? (const u16*)staged : x;
    // Of a lane's 16 bytes: the inputs within a unit.
    int inside = BITS == 4 ? 4 * t : BITS == 8 ? 16 * t : 8 * t;
    auto those = [&](int b) {
        Tokens mine;
        mine.at = b * STEP + inside, mine.K = K;
#pragma unroll
        for (int n = 0; n < TILES; n++)
            mine.from[n] =
                tokens + (i64)(mine.at / 16) * APART + mine.at % 16 + min(8 * n + g, PAD - 1) * 16;
        return mine;
    };
    // A warp counts its own steps: nobody else asks for them.
    float* counted = (float*)((char*)staged + (STAGED ? K / 16 * APART * 2 : 0));
    if (ZERO) {
        for (int b = warp; b < steps; b += WARPS)
            count(those(b), counted + b * SPAN * TOKENS, lane);
        __syncwarp();
    }
    int turn = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn++) {
        float acc[TILES][4] = {};
        for (int b = warp; b < steps; b += WARPS) {
            bool ends = b + WARPS >= steps;
            int then = ends ? tile + gridDim.x : tile;
            work(step, those(b), acc, counted + b * SPAN * TOKENS, t);
            if (then < tiles) load(step, weights, then, ends ? warp : b + WARPS, lane);
        }
        if (NORMED && turn == 0)
            for (int m = warp; m < M; m += WARPS) {
                float square = 0;
#pragma unroll
                for (int i = 0; i < SOON; i++) {
                    int p = lane + 32 * i;
                    if (m == warp) square += squares[i];
                    else if (p < around.parts) square += around.squares[p * M + m];
                }
                for (int p = lane + 32 * SOON; p < around.parts; p += 32)
                    square += around.squares[p * M + m];
#pragma unroll
                for (int far = 16; far; far /= 2) square += __shfl_xor_sync(~0u, square, far);
                if (lane == 0) factor[m] = rsqrtf(square / K + around.eps);
            }
        float(*mine)[17] = sums[turn % 2][warp];
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float y = acc[n][e];
                if (ZERO && GROUP == 0) {
                    float sum = 0;
                    for (int b = warp; b < steps; b += WARPS)
                        sum += counted[b * TOKENS + 8 * n + 2 * t + e % 2];
                    y -= (number<SCALE>(weights.zero, weights.row(tile, g, e / 2)) - MIDDLE) * sum;
                }
                if (BITS < 16 && GROUP == 0)
                    y *= number<SCALE>(weights.scale, weights.row(tile, g, e / 2));
                mine[8 * n + 2 * t + e % 2][g + 8 * (e / 2)] = y;
            }
        __syncthreads();  // what others read of the turn before last is read

        auto value = [&](int m, int r, float bias) {
            float y = 0;
#pragma unroll
            for (int other = 0; other < WARPS; other++) y += sums[turn % 2][other][m][r];
            if (NORMED) y *= factor[m];
            if (BIAS) y += bias;
            return y;
        };
        // Warps take turns, since one has often enough to do with all of it.
        int thread = (warp + turn) % WARPS * 32 + lane;
        for (int e = thread; e < (M * WIDTH + 31) / 32 * 32; e += 32 * WARPS) {
            Beside there = turn == 0 && e == thread ? first : Beside(around, tile, e, M, outputs);
            int m = e / WIDTH, r = e % WIDTH, n = tile * WIDTH + r;
            float y = 0;
            if (there.ours) {
                y = value(m, r, there.bias);
                if (PAIRED) {
                    float gate = wide(narrow(y)), up = wide(narrow(value(m, r + 8, there.of_up)));
                    y = gate / (1 + expf(-gate)) * up;
                }
                if (RESIDUAL) y = wide(narrow(y)) + there.residual;
                i64 sliced = (i64)(n / 16) * SLICE + m * 16 + n % 16;
                out[PAIRED ? sliced : (i64)m * outputs + n] = narrow(y);
                y = wide(narrow(y));
                if (NEXT) around.next[sliced] = narrow(y * there.norm);
            }
            if (NEXT) {  // WIDTH is 16 here
                float square = there.ours ? y * y : 0;
#pragma unroll
                for (int far = 8; far; far /= 2) square += __shfl_xor_sync(~0u, square, far);
                if (r == 0 && m < M) around.next_squares[tile * M + m] = square;
            }
        }
    }
}
