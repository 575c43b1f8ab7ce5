// Whether kernels start.
extern "C" __global__ void nothing() {}
