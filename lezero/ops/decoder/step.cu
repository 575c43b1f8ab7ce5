// What stands before and behind a decoder's layers in a step of one token a sequence, on NVIDIA:
// see cuda_step.py.
//
// Given: HALF, PAD (of the tokens, see few.cu), KIND (of logits, see prelude.cu).

constexpr int THREADS = 256;

// The token of each sequence: its own, or the best one of a row of the step before.
extern "C" __global__ void chosen(
    const i64* token, const i64* row, const i64* best, i64* out, i64 stride, int count) {
    let_next_begin();
    wait();
    int b = threadIdx.x;
    if (b >= count) return;
    i64 from = row[b * stride];
    i64 last = best[from < 0 ? 0 : from];
    out[b] = from < 0 ? token[b * stride] : last < 0 ? 0 : last;
}

// Tokens times a norm's weight as (K / 16, PAD, 16), and their sums of squares. A block a token.
extern "C" __global__ void spread(
    const u16* x, const u16* norm, u16* out, float* squares, int K) {
    __shared__ float sums[THREADS / 32];
    let_next_begin();
    wait();
    int m = blockIdx.x;
    float square = 0;
    for (int k = threadIdx.x; k < K; k += THREADS) {
        float v = number<HALF ? 1 : 2>(x, (i64)m * K + k), y = v * number<HALF ? 1 : 2>(norm, k);
        square += v * v;
        out[(i64)(k / 16) * 16 * PAD + m * 16 + k % 16] = narrow(y);
    }
    for (int far = 16; far; far /= 2) square += __shfl_xor_sync(~0u, square, far);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = square;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < THREADS / 32; i++) square += sums[i];
    squares[m] = square;
}

// Larger for larger logits, and for earlier ones of equals; NaN is the largest.
__device__ __forceinline__ u64 rank(float x, u32 at) {
    u32 bits = __float_as_uint(x == 0 ? 0.0f : x);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    if (x != x) bits = ~0u;
    return (u64)bits << 32 | (u32)~at;
}

__device__ __forceinline__ u64 highest(u64 mine, u64* shared) {
    for (int far = 16; far; far /= 2) mine = max(mine, __shfl_xor_sync(~0u, mine, far));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++) mine = max(mine, shared[i]);
    return mine;
}

// Where each row's largest logit is, -1 where that is no finite number. Blocks of a row take parts
// of it; the last of them to end looks at what the others found.
extern "C" __global__ void best(const void* logits, i64* out, u64* found, u32* counts, int V) {
    __shared__ u64 shared[THREADS / 32];
    __shared__ bool last;
    let_next_begin();
    wait();
    int part = blockIdx.x, parts = gridDim.x, b = blockIdx.y;
    u64 top = 0;
    for (int v = part * THREADS + threadIdx.x; v < V; v += parts * THREADS)
        top = max(top, rank(number<KIND>(logits, (i64)b * V + v), v));
    top = highest(top, shared);
    if (threadIdx.x == 0) {
        found[b * parts + part] = top;
        __threadfence();
        last = atomicAdd(&counts[b], 1) == parts - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    top = 0;
    for (int i = threadIdx.x; i < parts; i += THREADS)
        top = max(top, ((volatile u64*)found)[b * parts + i]);
    top = highest(top, shared);
    if (threadIdx.x) return;
    u32 bits = top >> 32;
    bool finite = bits > 0x007FFFFFu && bits < 0xFF800000u;  // above -inf, below inf
    out[b] = finite ? (i64)(u32)~top : -1;
    counts[b] = 0;
}
