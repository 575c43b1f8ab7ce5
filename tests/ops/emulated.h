// CUDA C++ on a processor, for the tests: what the compiler and instructions.cu give on the device.
//
// Threads of a block are fibers that run in turns; a warp's instructions and barriers are meetings,
// and threads that wait at different ones are an error, as is one for which nobody comes any more.
// Blocks run one after another, so nothing here finds races between blocks; every other launch runs
// blocks and threads from the last to the first. Shared memory begins as NaN in each block, and so
// does, until it waits, what the launch ahead of it writes. Wider reads than their address allows are
// an error, as on the device.
//
// The layout of `multiply` is that of mma.m16n8k16 in the PTX manual (section 9.7.14).

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared_memory")))

typedef unsigned u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Three {
    int x, y, z;
};
static Three threadIdx, blockIdx, blockDim, gridDim;
uint4 staged[(229 << 10) / 16];  // dynamic shared memory, by the name that sources give it
// Where the linker puts what kernels declare; a weak name is null where there is none.
extern char __start_shared_memory[] __attribute__((weak));
extern char __stop_shared_memory[] __attribute__((weak));

static void failed(const char* why) {
    fprintf(stderr, "emulated.h: block %d, thread %d: %s\n", blockIdx.x, threadIdx.x, why);
    abort();
}

// Fibers.
constexpr int MOST = 1024, STACK = 128 << 10, BEHIND = 1024;

struct Meeting {
    int here, turn, kind;
};

struct Slot {
    u32 words[6];
};

static jmp_buf fibers[MOST], scheduler;  // jumps leave the system alone, unlike swapcontext
static bool begun[MOST], ended[MOST], moved;
static Meeting of_block, of_warp[MOST / 32];
static Slot slots[2][MOST];
static void (*body)();

static void yield() {
    if (!_setjmp(fibers[threadIdx.x])) _longjmp(scheduler, 1);
}

static int awake(int from, int to) {
    int count = 0;
    for (int i = from; i < to; i++) count += !ended[i];
    return count;
}

// Returns when all threads that have not ended are here.
static void meet(Meeting& at, int kind, int from, int to) {
    if (at.here && at.kind != kind) failed("threads meet at different instructions");
    at.kind = kind;
    int turn = at.turn;
    at.here++;
    while (at.turn == turn) {
        if (at.here == awake(from, to)) at.here = 0, at.turn++, moved = true;
        else yield();
    }
}

enum { OF_SHUFFLE, OF_MULTIPLY, OF_WARP, OF_BLOCK };

// What each lane of the warp gave, in the order of lanes.
static const Slot* exchanged(int kind, const Slot& mine) {
    int warp = threadIdx.x / 32, first = 32 * warp;
    Slot* these = slots[of_warp[warp].turn % 2];
    these[threadIdx.x] = mine;
    if (awake(first, first + 32) < 32) failed("lanes have ended that a warp's instruction needs");
    meet(of_warp[warp], kind, first, first + 32);
    return these + first;
}

static void __syncwarp() { exchanged(OF_WARP, {}); }
static void __syncthreads() { meet(of_block, OF_BLOCK, 0, blockDim.x); }
static void __threadfence() {}

template <class T>
T __shfl_xor_sync(u32 mask, T mine, int far) {
    Slot slot = {};
    memcpy(&slot, &mine, sizeof mine);
    if (mask != ~0u) failed("a shuffle of less than a warp");
    memcpy(&mine, exchanged(OF_SHUFFLE, slot) + (threadIdx.x % 32 ^ far), sizeof mine);
    return mine;
}

inline u32 atomicAdd(u32* at, int more) {
    u32 before = *at;
    *at += more;
    return before;
}

// Numbers.
inline u32 __float_as_uint(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float __uint_as_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline float half_of(u32 bits) {
    u16 low = bits;
    _Float16 x;
    memcpy(&x, &low, 2);
    return x;
}

inline u16 narrow(float x) {
    u32 bits = __float_as_uint(x);
    if (!HALF) return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    _Float16 half = x;
    u16 y;
    memcpy(&y, &half, 2);
    return x != x ? 0x7FFF : y;
}

inline float widened(u32 bits) { return HALF ? half_of(bits) : __uint_as_float(bits << 16); }

inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    u64 both = (u64)y << 32 | x;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return out;
}

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u64 max(u64 a, u64 b) { return a > b ? a : b; }

// instructions.cu
static char *late, *late_copy;  // what the launch ahead writes: hidden until somebody waits
static size_t late_bytes;
static bool hidden;

static void show() {
    if (hidden) memcpy(late, late_copy, late_bytes);
    hidden = false;
}

inline void wait() { show(); }
inline void let_next_begin() {}

inline uint4 fetched(const void* at) {
    if ((uintptr_t)at % 16) failed("16 bytes are read between words");
    return *(const uint4*)at;
}

template <class T>
T soon(const T* at) {
    return *at;
}

template <u32 MASK, u32 BASE>
inline u32 below(u32 bits) {
    return (bits & MASK) ^ BASE;
}

inline u32 plus(u32 a, u32 b) {
    u32 high = narrow(widened(a >> 16) + widened(b >> 16));
    return high << 16 | narrow(widened(a & 0xFFFF) + widened(b & 0xFFFF));
}

inline void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const Slot* lanes = exchanged(OF_MULTIPLY, {{a0, a1, a2, a3, b0, b1}});
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int e = 0; e < 4; e++) {
        int column = 2 * t + e % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) {
            int lane = k % 8 / 2, high = k / 8, shift = 16 * (k % 2);
            u32 a = lanes[4 * g + lane].words[e / 2 + 2 * high];
            u32 b = lanes[4 * column + lane].words[4 + high];
            sum += widened(a >> shift & 0xFFFF) * widened(b >> shift & 0xFFFF);
        }
        c[e] += sum;
    }
}

// Launches.
static void thread() {
    body();
    ended[threadIdx.x] = moved = true;
    _longjmp(scheduler, 1);
}

// Lets a thread run until it waits or ends.
static void run(int i, char* stack) {
    threadIdx = {i, 0, 0};
    if (_setjmp(scheduler)) return;
    if (begun[i]) _longjmp(fibers[i], 1);
    begun[i] = true;
    static ucontext_t fresh;
    getcontext(&fresh);
    fresh.uc_stack.ss_sp = stack, fresh.uc_stack.ss_size = STACK, fresh.uc_link = nullptr;
    makecontext(&fresh, thread, 0);
    setcontext(&fresh);
}

static void run_block(char* stacks, int asked, bool backwards) {
    memset(staged, 0xFF, asked + BEHIND);
    char *from = __start_shared_memory, *to = __stop_shared_memory;
    if (from) memset(from, 0xFF, to - from);
    if (late_bytes) memset(late, 0xFF, late_bytes), hidden = true;
    of_block = {};
    memset(of_warp, 0, sizeof of_warp);
    memset(begun, 0, sizeof begun), memset(ended, 0, sizeof ended);
    for (moved = true; moved;) {
        moved = false;
        for (int turn = 0; turn < blockDim.x; turn++) {
            int i = backwards ? blockDim.x - 1 - turn : turn;
            if (!ended[i]) run(i, stacks + (size_t)i * STACK);
        }
    }
    if (awake(0, blockDim.x)) failed("threads wait for others that do not come");
    show();
}

template <class... Given>
void launched(void (*kernel)(Given...), void** arguments, const int* blocks, int threads, int shared) {
    static void (*which)(Given...);
    static void** given;
    which = kernel, given = arguments;
    body = [] {
        struct Call {
            Call(Given... all) { which(all...); }
        };
        int at = 0;
        Call{*(Given*)given[at++]...};  // in braces from left to right
    };
    if (threads > MOST || shared + BEHIND > (int)sizeof staged) failed("a block is too large");
    static bool backwards = true;
    backwards = !backwards;
    char* stacks = (char*)malloc((size_t)threads * STACK);
    late_copy = (char*)malloc(late_bytes);
    memcpy(late_copy, late, late_bytes);
    gridDim = {blocks[0], blocks[1], blocks[2]}, blockDim = {threads, 1, 1};
    int count = blocks[0] * blocks[1] * blocks[2];
    for (int turn = 0; turn < count; turn++) {
        int i = backwards ? count - 1 - turn : turn;
        blockIdx = {i % blocks[0], i / blocks[0] % blocks[1], i / blocks[0] / blocks[1]};
        run_block(stacks, shared, backwards);
        for (const char* p = (const char*)staged + shared, *end = p + BEHIND; p < end; p++)
            if (*p != (char)0xFF) failed("more shared memory is written than was asked for");
    }
    free(stacks);
    free(late_copy);
}

#define LAUNCHES(NAME)                                                                        \
    extern "C" void emulated(                                                                 \
        void** given, const int* blocks, int threads, int shared, char* ahead, i64 bytes) {   \
        late = ahead, late_bytes = bytes;                                                     \
        launched(NAME, given, blocks, threads, shared);                                       \
    }
