// Makes the words of words.c known to torch: int32 tensors over shared memory.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "words.h"

using torch::stable::Tensor;

namespace {

uint32_t* word(const Tensor& words, int64_t index) {
  return static_cast<uint32_t*>(words.data_ptr()) + index;
}

int64_t read_word(const Tensor& words, int64_t index) { return lezero_signal_read(word(words, index)); }

void write_word(const Tensor& words, int64_t index, int64_t value) {
  lezero_signal_write(word(words, index), static_cast<uint32_t>(value));
}

bool wait_word(const Tensor& words, int64_t index, int64_t value, int64_t spin_us, int64_t timeout_us) {
  return lezero_signal_wait(word(words, index), static_cast<uint32_t>(value), spin_us, timeout_us);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) {
  m.def("read(Tensor words, int index) -> int");
  m.def("write(Tensor(a!) words, int index, int value) -> ()");
  m.def("wait(Tensor words, int index, int value, int spin_us, int timeout_us) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CPU, m) {
  m.impl("read", TORCH_BOX(&read_word));
  m.impl("write", TORCH_BOX(&write_word));
  m.impl("wait", TORCH_BOX(&wait_word));
}
