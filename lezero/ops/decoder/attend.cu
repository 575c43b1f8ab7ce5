// Attention of one new token a sequence over keys and values in blocks, on NVIDIA's matrix units:
// see cuda_attend.py.
//
// A block of threads takes the query heads of one key-value head of one sequence and a part of its
// past; its warps take 16 places each at a time. A lane (g = lane / 4, t = lane % 4) reads 16 bytes
// of the keys of places g and 8 + g, which are the second operand of a product with the queries as
// they lie, since the order of inputs is free. What comes of it, places 2t, 2t + 1, 8 + 2t and
// 9 + 2t of head g, is the first operand of the product with the values, of which the lane reads
// 16 bytes of these four places: numbers 8g to 8g + 7 of 64. Warps, and blocks of one head, each
// have the largest score, the sum of weights and the weighted sum of their places, and are joined.
//
// All of the past that a block looks at first is asked for before launches ahead have ended: they
// write the new token's place alone.
//
// Given: HALF, E (64 or 128), G (query heads of a key-value head, at most 16), NORM (queries and keys
// are normed), PAD (of the tokens, see few.cu).

constexpr int WARPS = 8, AT_ONCE = 16, BLOCK = 16, MOST_PARTS = 16;
constexpr int TILES = E == 64 ? 2 : 1;                   // of 16 places, that a warp reads at once
constexpr int ROUND = WARPS * TILES * AT_ONCE;           // places
constexpr int SMALLEST = ROUND < 256 ? 256 : ROUND;      // of a part
constexpr int UNITS = E / 32, WIDE = E / 64;             // 16 bytes of a lane: of a key, a value
constexpr int ROWS = G > 8 ? 2 : 1;                      // heads of a lane
constexpr float NONE = -1e30f;                           // below all scores

struct Past {
    const u16 *keys, *values;
    const i64* table;
    int heads, head;  // of keys and values

    __device__ __forceinline__ i64 line(int place) const {
        return ((table[place / BLOCK] * BLOCK + place % BLOCK) * heads + head) * E;
    }
};

__device__ __forceinline__ uint4 word4(const u16* at) { return *(const uint4*)at; }

__device__ __forceinline__ void spread8(const uint4& from, float* to) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u16 bits = i % 2 ? words[i / 2] >> 16 : words[i / 2];
        to[i] = number<HALF ? 1 : 2>(&bits, 0);
    }
}

__device__ __forceinline__ u32 both(float low, float high) {
    return (u32)narrow(high) << 16 | narrow(low);
}

__device__ __forceinline__ uint4 packed8(const float* from) {
    return make_uint4(
        both(from[0], from[1]), both(from[2], from[3]), both(from[4], from[5]), both(from[6], from[7]));
}

// What turns a lane's numbers 32 u + 8 t … + 7 of a query or key.
struct Turn {
    float cos[UNITS / 2][8], sin[UNITS / 2][8];

    __device__ __forceinline__ Turn(const float* cosines, const float* sines, i64 at, int t) {
#pragma unroll
        for (int u = 0; u < UNITS / 2; u++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                i64 from = at * (E / 2) + 32 * u + 8 * t + i;
                cos[u][i] = cosines[from], sin[u][i] = sines[from];
            }
    }

    // A head's numbers, normed and turned. All lanes of a warp come here.
    __device__ __forceinline__ void operator()(
        const u16* from, const u16* norm, float eps, int t, uint4* to) const {
        float x[UNITS][8];
#pragma unroll
        for (int u = 0; u < UNITS; u++) spread8(word4(from + 32 * u + 8 * t), x[u]);
        if (NORM) {
            float square = 0;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int i = 0; i < 8; i++) square += x[u][i] * x[u][i];
            square += __shfl_xor_sync(~0u, square, 1);
            square += __shfl_xor_sync(~0u, square, 2);
            float factor = rsqrtf(square / E + eps), weight[8];
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                spread8(word4(norm + 32 * u + 8 * t), weight);
#pragma unroll
                for (int i = 0; i < 8; i++) x[u][i] *= factor * weight[i];
            }
        }
#pragma unroll
        for (int u = 0; u < UNITS / 2; u++) {
            float first[8], second[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float a = x[u][i], b = x[u + UNITS / 2][i];
                first[i] = a * cos[u][i] - b * sin[u][i];
                second[i] = b * cos[u][i] + a * sin[u][i];
            }
            to[u] = packed8(first), to[u + UNITS / 2] = packed8(second);
        }
    }
};

// The keys and values of 16 places, as a lane holds them.
struct Tile {
    uint4 key[2][UNITS], value[4][WIDE];
};

// Of the four places whose values a lane holds, the i-th one.
__device__ __forceinline__ int of_values(int i, int t) { return 8 * (i / 2) + 2 * t + i % 2; }

__device__ __forceinline__ void load_keys(Tile& to, const Past& past, int first, int low, int at, int lane) {
    int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int place = first + 8 * j + g;
        bool seen = place >= low && place < at;
        const u16* from = past.keys + (seen ? past.line(place) : 0) + 8 * t;
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            to.key[j][u] = seen ? word4(from + 32 * u) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void load_values(
    Tile& to, const Past& past, int first, int low, int at, int lane) {
    int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int place = first + of_values(i, t);
        bool seen = place >= low && place < at;
        const u16* from = past.values + (seen ? past.line(place) : 0) + 8 * g;
#pragma unroll
        for (int v = 0; v < WIDE; v++)
            to.value[i][v] = seen ? word4(from + 64 * v) : make_uint4(0, 0, 0, 0);
    }
}

// What was found of some places: for heads g and g + 8, and in `sum` the numbers 64 v + 16 t …  of
// both, as products leave them.
struct Found {
    float top[ROWS], weight[ROWS], sum[8 * WIDE][4];
};

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores of 16 places with the heads' queries.
__device__ __forceinline__ void scores(float (*to)[4], const Tile& tile, const uint4 (*query)[UNITS]) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) to[j][e] = 0;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const uint4 &k = tile.key[j][u], &q = query[0][u];
            uint4 lower = ROWS > 1 ? query[ROWS - 1][u] : make_uint4(0, 0, 0, 0);
            multiply(to[j], q.x, lower.x, q.y, lower.y, k.x, k.y);
            multiply(to[j], q.z, lower.z, q.w, lower.w, k.z, k.w);
        }
    }
}

// Takes 16 places in: `first` is the first of them.
__device__ __forceinline__ void take(
    Found& found, float (*score)[4], const Tile& tile, int first, int low, int at, float scale, int t) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float top = NONE;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int place = first + of_values(i, t);
            float& x = score[i / 2][2 * r + i % 2];
            x = place >= low && place <= at ? x * scale : NONE;
            top = fmaxf(top, x);
        }
        top = fmaxf(found.top[r], quad_max(top));
        float before = expf(found.top[r] - top), weight = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float& x = score[i / 2][2 * r + i % 2];
            x = x == NONE ? 0 : expf(x - top);
            weight += x;
        }
        found.top[r] = top;
        found.weight[r] = found.weight[r] * before + weight;
#pragma unroll
        for (int n = 0; n < 8 * WIDE; n++)
            found.sum[n][2 * r] *= before, found.sum[n][2 * r + 1] *= before;
    }
    u32 p[4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        p[2 * j] = both(score[j][0], score[j][1]);
        p[2 * j + 1] = ROWS > 1 ? both(score[j][2], score[j][3]) : 0;
    }
#pragma unroll
    for (int v = 0; v < WIDE; v++) {
        u32 words[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4& value = tile.value[i][v];
            words[i][0] = value.x, words[i][1] = value.y, words[i][2] = value.z, words[i][3] = value.w;
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            u32 selector = n % 2 ? 0x7632 : 0x5410;
            u32 b0 = __byte_perm(words[0][n / 2], words[1][n / 2], selector);
            u32 b1 = __byte_perm(words[2][n / 2], words[3][n / 2], selector);
            multiply(found.sum[8 * v + n], p[0], p[1], p[2], p[3], b0, b1);
        }
    }
}

// What warps found: G heads each. Sums lie as products leave them, 64 v + 8 n + 2 t + e, and rows a
// little apart, so that lanes write to different banks.
struct Shared {
    float top[WARPS][G], weight[WARPS][G], sum[WARPS][G][E + 8];
};

// Where number 64 v + 16 t + 8 e + n of a head lies.
__device__ __forceinline__ int lies(int d) {
    return d / 64 * 64 + d % 8 * 8 + d / 16 % 4 * 2 + d / 8 % 2;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) attend(
    const u16* qkv, const u16* q_norm, const u16* k_norm, const float* cosines, const float* sines,
    const i64* position, const i64* tables, u16* keys, u16* values, u16* out, float* sums, u32* counts,
    int H, int K, i64 position_stride, i64 table_stride, int parts, float eps, float scale, int window) {
    extern __shared__ uint4 staged[];
    __shared__ bool last;
    Shared& shared = *(Shared*)staged;
    let_next_begin();
    int head = blockIdx.x, b = blockIdx.y, part = blockIdx.z;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int at = position[b * position_stride], start = max(at - window + 1, 0);
    int size = SMALLEST;  // of the sequence's own past alone, so that others do not change sums
    while (at >= MOST_PARTS * size) size *= 2;
    int from = start / size, to = at / size, begin = part * size, end = begin + size;
    // The part of the new token always waits, below: were there a launch of which no block does, its
    // end would say nothing of those ahead of it.
    if (part < from || part > to) return;
    int low = max(start, begin);
    Past past = {keys, values, tables + b * table_stride, K, head};
    Turn turn(cosines, sines, at, t);
    int first = low / ROUND * ROUND + warp * TILES * AT_ONCE;
    Tile tile[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        load_keys(tile[i], past, first + i * AT_ONCE, low, min(at, end), lane);
        load_values(tile[i], past, first + i * AT_ONCE, low, min(at, end), lane);
    }
    wait();

    const u16* mine = qkv + (i64)b * (H + 2 * K) * E;
    uint4 query[ROWS][UNITS], fresh[UNITS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        turn(mine + (i64)(head * G + min(g + 8 * r, G - 1)) * E, q_norm, eps, t, query[r]);
    bool newest = at < end;
    const u16* value = mine + (i64)(H + K + head) * E;
    if (newest) {
        turn(mine + (i64)(H + head) * E, k_norm, eps, t, fresh);
        i64 own = past.line(at);
        if (warp == 0 && g == 0)
#pragma unroll
            for (int u = 0; u < UNITS; u++) *(uint4*)(keys + own + 32 * u + 8 * t) = fresh[u];
        if (warp == 1 && lane < E / 8) *(uint4*)(values + own + 8 * lane) = word4(value + 8 * lane);
    }
    Found found;
#pragma unroll
    for (int r = 0; r < ROWS; r++) found.top[r] = NONE, found.weight[r] = 0;
#pragma unroll
    for (int n = 0; n < 8 * WIDE; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) found.sum[n][e] = 0;

    int stop = min(at + 1, end);
    for (; first < stop; first += ROUND) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            int these = first + i * AT_ONCE, then = these + ROUND;
            if (newest && at / AT_ONCE == these / AT_ONCE) {  // the new token's own
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (at == these + 8 * j + g)
#pragma unroll
                        for (int u = 0; u < UNITS; u++) tile[i].key[j][u] = fresh[u];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (at == these + of_values(j, t))
#pragma unroll
                        for (int v = 0; v < WIDE; v++)
                            tile[i].value[j][v] = word4(value + 64 * v + 8 * g);
            }
            float score[2][4];
            scores(score, tile[i], query);
            if (then < stop) load_keys(tile[i], past, then, low, min(at, end), lane);
            take(found, score, tile[i], these, low, min(at, end - 1), scale, t);
            if (then < stop) load_values(tile[i], past, then, low, min(at, end), lane);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int row = g + 8 * r;
        float weight = quad_sum(found.weight[r]);
        if (row >= G) continue;
        if (t == 0) shared.top[warp][row] = found.top[r], shared.weight[warp][row] = weight;
#pragma unroll
        for (int n = 0; n < 8 * WIDE; n++)
            *(float2*)&shared.sum[warp][row][8 * n + 2 * t] =
                make_float2(found.sum[n][2 * r], found.sum[n][2 * r + 1]);
    }
    __syncthreads();

    i64 pair = (i64)b * K + head;
    constexpr int KEPT = E + 2;  // numbers of a head that a part leaves
    bool alone = from == to;
    auto write = [&](int row, int d, float y) {
        int n = (head * G + row) * E + d;
        out[(i64)(n / 16 * PAD + b) * 16 + n % 16] = narrow(y);
    };
    for (int i = threadIdx.x; i < G * E; i += 32 * WARPS) {
        int row = i / E, d = i % E;
        float top = NONE, weight = 0, sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, shared.top[w][row]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float factor = expf(shared.top[w][row] - top);
            weight += shared.weight[w][row] * factor;
            sum += shared.sum[w][row][lies(d)] * factor;
        }
        if (alone) {
            write(row, d, sum / weight);
            continue;
        }
        float* left = sums + ((pair * parts + part) * G + row) * KEPT;
        left[d] = sum;
        if (d == 0) left[E] = top, left[E + 1] = weight;
    }
    if (alone) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&counts[pair], 1) == to - from;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < G * E; i += 32 * WARPS) {
        int row = i / E, d = i % E;
        auto left = [&](int other, int number) {
            return ((volatile float*)sums)[((pair * parts + other) * G + row) * KEPT + number];
        };
        float top = NONE, weight = 0, sum = 0;
        for (int other = from; other <= to; other++) top = fmaxf(top, left(other, E));
        for (int other = from; other <= to; other++) {
            float factor = expf(left(other, E) - top);
            weight += left(other, E + 1) * factor;
            sum += left(other, d) * factor;
        }
        write(row, d, sum / weight);
    }
    if (threadIdx.x == 0) counts[pair] = 0;
}
