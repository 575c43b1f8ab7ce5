// What stands before every CUDA source: words, numbers of 16 bits, and launches that begin early.
// Given: HALF (16 bits are fp16, else bf16).

typedef unsigned u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ float half_of(u32 bits) {
    float y;
    asm volatile("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)bits));
    return y;
}

// Number `at` of those kept as fp32 (0), fp16 (1) or bf16 (2).
template <int OF>
__device__ __forceinline__ float number(const void* from, i64 at) {
    if (OF == 0) return ((const float*)from)[at];
    u16 x = ((const u16*)from)[at];
    return OF == 1 ? half_of(x) : __uint_as_float((u32)x << 16);
}

__device__ __forceinline__ u16 narrow(float x) {
    u16 y;
    if (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
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

extern "C" __global__ void nothing() {}
