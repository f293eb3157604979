#include "fiber.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(ECHO_EMULATION_ASAN)
#include <sanitizer/common_interface_defs.h>
#elif defined(ECHO_EMULATION_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace emulation {
namespace {

// Enough for the peer kernels between the red zones of AddressSanitizer. Pages that nothing touches cost nothing.
constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kGuardBytes = 4096;

}  // namespace

// Callee-saved registers go to the old stack, whose pointer to *from; those of `to` come back. The modes of the
// floating-point units are the same on all stacks.
extern "C" void emulation_switch_stack(void** from, void* to);
asm(R"(
.text
.globl emulation_switch_stack
.type emulation_switch_stack, @function
emulation_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch_stack, .-emulation_switch_stack
)");

Fiber this_thread() {
  Fiber fiber;
  pthread_attr_t attributes;
  void* stack = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &stack, &fiber.stack_bytes);
  pthread_attr_destroy(&attributes);
  fiber.stack = stack;
#if defined(ECHO_EMULATION_TSAN)
  fiber.thread_sanitizer = __tsan_get_current_fiber();
#endif
  return fiber;
}

Fiber make_fiber(void (*entry)()) {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
    std::perror("a stack for an emulated thread");
    std::abort();
  }
  Fiber fiber;
  fiber.stack = static_cast<char*>(memory) + kGuardBytes;
  fiber.stack_bytes = kStackBytes;
  // As a call of entry() leaves it: 8 bytes below a multiple of 16. Six registers, the address to return to, and none
  // for entry() to return to.
  auto** top = reinterpret_cast<void**>(static_cast<char*>(memory) + kGuardBytes + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
#if defined(ECHO_EMULATION_TSAN)
  fiber.thread_sanitizer = __tsan_create_fiber(0);
#endif
  return fiber;
}

void arrive_in_fiber([[maybe_unused]] Fiber& self) {
#if defined(ECHO_EMULATION_ASAN)
  __sanitizer_finish_switch_fiber(self.fake_stack, nullptr, nullptr);
#endif
}

void switch_fiber(Fiber& from, Fiber& to) {
#if defined(ECHO_EMULATION_ASAN)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#elif defined(ECHO_EMULATION_TSAN)
  __tsan_switch_to_fiber(to.thread_sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
  emulation_switch_stack(&from.stack_pointer, to.stack_pointer);
  arrive_in_fiber(from);
}

}  // namespace emulation
