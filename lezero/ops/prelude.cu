// What stands before every CUDA source, behind instructions.cu.

// Number `at` of those kept as fp32 (0), fp16 (1) or bf16 (2).
template <int OF>
__device__ __forceinline__ float number(const void* from, i64 at) {
    if (OF == 0) return ((const float*)from)[at];
    u16 x = ((const u16*)from)[at];
    return OF == 1 ? half_of(x) : __uint_as_float((u32)x << 16);
}

extern "C" __global__ void nothing() {}
