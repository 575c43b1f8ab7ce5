// Tensors' host memory from malloc, aligned here.
//
// torch asks for blocks by posix_memalign, and glibc (before 2.38) cuts the piece before an aligned
// block off and frees it by itself: small objects settle there, so that a freed block seldom fits a
// request of its own size again. A block of malloc does. It is asked for 72 bytes larger, and the
// address that malloc gave stands before the one that the tensor gets.
//
// Note [Both kinds]
// Parts of torch (oneDNN's engine) allocate and free through whatever allocator is in place at the
// time, with one deleter for all. So ours, once in place, stays; switched off it passes requests on
// to torch's; and its deleter takes blocks of either kind. They are told apart by the word before a
// block: here an address less than 73 bytes away, with glibc the size of the block. Nothing is known
// of that word under another malloc (jemalloc by LD_PRELOAD, say), where this steps aside; and on
// 64-bit Arm, where torch from 2.10 on brings mimalloc for its own blocks, which free() does not know.
#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>

#if defined(__GLIBC__)
#include <link.h>
#endif

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace {

constexpr uintptr_t kAlignment = 64;
constexpr size_t kRoom = kAlignment + sizeof(void*);

std::atomic<bool> from_malloc{false};

// What this thread takes and gives back (-1 bytes), while it is recorded.
thread_local std::vector<std::pair<const void*, int64_t>>* record = nullptr;

void give_back(void* data) {
  if (data == nullptr) return;
  if (record != nullptr) record->emplace_back(data, -1);
  c10::profiledCPUMemoryReporter().Delete(data);
  void* before = static_cast<void**>(data)[-1];
  const uintptr_t away = reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(before);
  std::free(away <= kRoom ? before : data);
}

void* aligned(size_t bytes) {
  void* block = bytes <= SIZE_MAX / 2 ? std::malloc(bytes + kRoom) : nullptr;
  if (block == nullptr) return nullptr;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(block) + sizeof(void*);
  void* data = reinterpret_cast<void*>((begin + kAlignment - 1) / kAlignment * kAlignment);
  static_cast<void**>(data)[-1] = block;
  c10::profiledCPUMemoryReporter().New(data, bytes);
  return data;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes != 0 && from_malloc ? aligned(bytes) : nullptr;
    if (data == nullptr) data = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);  // or its error
    if (record != nullptr && data != nullptr) record->emplace_back(data, bytes);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

#if defined(__GLIBC__) && !defined(__aarch64__)
// The object whose function of that name is called: the first that was loaded and has one. Its
// address does not tell: in a program that is not position-independent (Ubuntu's Python) that is
// the program's own jump to it, a symbol without a section.
void* origin(const char* function) {
  link_map* object = nullptr;
  if (dlinfo(dlopen(nullptr, RTLD_LAZY), RTLD_DI_LINKMAP, &object) != 0) return nullptr;
  for (; object != nullptr; object = object->l_next) {
    void* handle = dlopen(object->l_name, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    void* found = dlsym(handle, function);
    dlclose(handle);
    Dl_info info;
    void *owner = nullptr, *symbol = nullptr;
    if (found != nullptr && dladdr1(found, &info, &owner, RTLD_DL_LINKMAP) != 0 &&
        owner == object && dladdr1(found, &info, &symbol, RTLD_DL_SYMENT) != 0 &&
        symbol != nullptr && static_cast<const ElfW(Sym)*>(symbol)->st_shndx != SHN_UNDEF)
      return object;
  }
  return nullptr;
}

bool malloc_is_glibc_s() {
  const void* glibc = origin("gnu_get_libc_version");
  return glibc != nullptr && origin("malloc") == glibc && origin("free") == glibc &&
         origin("posix_memalign") == glibc;
}
#else
bool malloc_is_glibc_s() { return false; }
#endif

Allocator& ours() {
  static Allocator* one = new Allocator;  // never destroyed: torch frees blocks while it ends
  return *one;
}

}  // namespace

// Whether the call below works here: not where somebody else's allocator or malloc is in place.
extern "C" int lezero_tensors_can_come_from_malloc() {
  static const bool known = malloc_is_glibc_s();
  c10::Allocator* now = c10::GetCPUAllocator();
  return known && (now == c10::GetDefaultCPUAllocator() || now == &ours());
}

// Whether tensors come from malloc (1) or as torch has it (0) from now on; -1 where they cannot.
// Tensors that exist are not touched.
extern "C" int lezero_tensors_from_malloc(int on) {
  if (!lezero_tensors_can_come_from_malloc()) return -1;
  from_malloc = on != 0;
  c10::SetCPUAllocator(&ours());
  return on;
}

// From now on what this thread takes of tensors' memory and gives back is recorded. -1 as above.
extern "C" int lezero_record_begin() {
  if (!lezero_tensors_can_come_from_malloc()) return -1;
  c10::SetCPUAllocator(&ours());  // which serves as before
  delete record;
  record = new std::vector<std::pair<const void*, int64_t>>;
  return 0;
}

// No longer; writes the addresses and bytes (-1: given back) of the first `most` that were recorded,
// and returns how many there were.
extern "C" int64_t lezero_record_end(int64_t most, int64_t* addresses, int64_t* bytes) {
  auto* found = std::exchange(record, nullptr);
  if (found == nullptr) return 0;
  const int64_t count = static_cast<int64_t>(found->size());
  for (int64_t i = 0; i < count && i < most; ++i) {
    addresses[i] = reinterpret_cast<int64_t>((*found)[i].first);
    bytes[i] = (*found)[i].second;
  }
  delete found;
  return count;
}
