// Memory on huge pages, where the system gives them to what asks (Linux): products read and write
// from one end to the other, and looking up pages of 4 KiB is a part of their time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kSmall = kHugePage / 4;  // what would leave most of a huge page empty
// malloc takes blocks from here on straight from the kernel, whatever was freed before.
constexpr size_t kFresh = 32 << 20;

// The huge pages that lie whole in a block that nothing was written to: a page of 4 KiB is made and
// cleared one by one, which takes twice as long.
void advise_fresh(void* block, size_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < kFresh) return;
  const auto begin = (reinterpret_cast<uintptr_t>(block) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<uintptr_t>(block) + bytes) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)block, (void)bytes;
#endif
}

// Room that one thread uses again and again.
class Room {
 public:
  Room() = default;
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room() { drop(); }

  // `bytes`, aligned to 64; what was taken before is lost. nullptr for 0.
  void* take(size_t bytes) {
    if (bytes > size_) {
      drop();
      const size_t page = bytes < kSmall ? 64 : kHugePage, whole = (bytes + page - 1) / page * page;
      begin_ = std::aligned_alloc(page, whole);
      if (!begin_) throw std::bad_alloc();
      size_ = whole;
#ifdef MADV_HUGEPAGE
      if (page == kHugePage) madvise(begin_, whole, MADV_HUGEPAGE);
#endif
    }
    return bytes ? begin_ : nullptr;
  }

 private:
  void drop() {
    std::free(begin_);
    begin_ = nullptr, size_ = 0;
  }

  void* begin_ = nullptr;
  size_t size_ = 0;
};

}  // namespace
