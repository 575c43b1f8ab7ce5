// Tensors' host memory from malloc, aligned here.
//
// torch asks for blocks by posix_memalign, and glibc (before 2.38) cuts the piece before an aligned
// block off and frees it by itself: small objects settle there, so that a freed block seldom fits a
// request of its own size again. A block of malloc does. It is asked for 72 bytes larger, and the
// address that malloc gave stands before the one that the tensor gets.
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstdlib>

namespace {

constexpr uintptr_t kAlignment = 64;

void give_back(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free(static_cast<void**>(data)[-1]);
}

struct FromMalloc final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const size_t room = kAlignment + sizeof(void*);
    if (bytes == 0 || bytes > SIZE_MAX / 2 - room) return torch_s()->allocate(bytes);
    void* block = std::malloc(bytes + room);
    if (block == nullptr) return torch_s()->allocate(bytes);  // it raises torch's own error
    const auto begin = reinterpret_cast<uintptr_t>(block) + sizeof(void*);
    void* data = reinterpret_cast<void*>((begin + kAlignment - 1) / kAlignment * kAlignment);
    static_cast<void**>(data)[-1] = block;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  static c10::Allocator* torch_s() { return c10::GetDefaultCPUAllocator(); }
};

FromMalloc ours;

}  // namespace

// Whether tensors come from here (1) or from torch's own allocator (0) from now on; -1 where
// somebody else's allocator is in place, which stays. Tensors that exist are not touched.
extern "C" int lezero_tensors_from_malloc(int on) {
  c10::Allocator* now = c10::GetCPUAllocator();
  if (now != FromMalloc::torch_s() && now != &ours) return -1;
  c10::SetCPUAllocator(on ? static_cast<c10::Allocator*>(&ours) : FromMalloc::torch_s());
  return on;
}
