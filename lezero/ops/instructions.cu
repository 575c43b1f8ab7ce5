// What CUDA C++ has no words for: instructions of the device, and launches that begin early. Words of
// all sources. Given: HALF (numbers of 16 bits are fp16, else bf16).
//
// tests/ops/emulated.h does the same on a processor, so that the tests run the sources there.

typedef unsigned u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ float half_of(u32 bits) {
    float y;
    asm volatile("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)bits));
    return y;
}

__device__ __forceinline__ u16 narrow(float x) {
    u16 y;
    if (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// 16 bytes that are read once.
__device__ __forceinline__ uint4 fetched(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// A number that is asked for here, however far behind it is looked at.
__device__ __forceinline__ float soon(const float* at) {
    float y;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(y) : "l"(at));
    return y;
}

__device__ __forceinline__ u16 soon(const u16* at) {
    u16 y;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(y) : "l"(at));
    return y;
}

// (bits & MASK) ^ BASE
template <u32 MASK, u32 BASE>
__device__ __forceinline__ u32 below(u32 bits) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(bits), "n"(MASK), "n"(BASE));
    return y;
}

// Of two numbers of 16 bits each.
__device__ __forceinline__ u32 plus(u32 a, u32 b) {
    u32 y;
    if (HALF) asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(0x3F803F80u), "r"(b));
    return y;
}

// Adds to a lane's four numbers of 16 × 8 sums what a warp's rows (16 × 16) times columns (16 × 8) are.
__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Launches ahead have ended, and what they wrote is there.
__device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next launch may begin; it waits for this one's end itself.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
