// Stacks to switch between, and what the sanitizers have to be told of it.
#pragma once

#include <cstddef>

namespace emulation {

struct Fiber {
  void* stack_pointer = nullptr;  // while it does not run: callee-saved registers and the return address lie there
  const void* stack = nullptr;    // its lowest address
  size_t stack_bytes = 0;
  void* thread_sanitizer = nullptr;
  void* fake_stack = nullptr;  // of AddressSanitizer
};

// The stack of the calling thread.
Fiber this_thread();
// A stack on which the first switch to it calls entry(), which never returns. Lives as long as the process.
Fiber make_fiber(void (*entry)());
// Returns when something switches back to `from`.
void switch_fiber(Fiber& from, Fiber& to);
// What a fiber calls first when it was switched to for the first time.
void arrive_in_fiber(Fiber& self);

}  // namespace emulation
