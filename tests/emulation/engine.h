// Runs CUDA kernels on the CPU, for tests of what they write and for sanitizers: GPUs are not needed, nor is speed.
//
//   thread   a stack of its own (fiber.h). All run on the host's thread, inside the calls that wait (a synchronize, a
//            copy); nothing runs between them. What comes after what depends on the seed alone, so failures repeat
//   warp     its threads meet only in the *_sync intrinsics. Each checks that all lanes its mask names execute it, at
//            the same place of the source: a GPU would hang there, or compute something
//   block    runs at a pace of its own, drawn at its start, so that some fall far behind others
//   launch   kMostBlocks blocks are resident at once; kernels of different streams run side by side
//   time     a clock that only the rounds of the scheduler move on: a timeout does not depend on the machine's load
//
// A thread gives way where it pauses, looks at a word that others write at system scope, or does an atomic operation.
// ECHO_EMULATION_SEED (default 1) chooses another order of all that.
// Memory is the host's, sequentially consistent: orders that a GPU would allow besides are not seen here, except by
// ThreadSanitizer, which is told what CUDA's operations order, and for some of them more than that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>

#include "vector_types.h"

namespace emulation {

using Location = std::source_location;

constexpr int kWarpLanes = 32;
constexpr uint64_t kNanosecondsPerRound = 1000;

// ---- for kernels --------------------------------------------------------------------------------------------------

struct Coordinates {
  uint3 thread;
  uint3 block;
  dim3 block_dim;
  dim3 grid_dim;
};
// Of the thread that runs; null on the host.
extern const Coordinates* g_here;

enum class Collective { kShuffle, kBallot, kMax, kMin, kOrder };
enum class Barrier { kPlain, kOr, kAnd, kCount };

// Waits for the lanes of `mask`. kShuffle: the value that lane `source` brought, which must be one of them. kBallot:
// the lanes that brought a value other than 0. kMax, kMin: of unsigned values. kOrder: nothing; memory is in order.
uint64_t collect(Collective kind, uint32_t mask, uint64_t value, int source, Location at);
// Waits for all threads of the block that are left; memory is in order.
int wait_at_barrier(Barrier kind, bool predicate, Location at);
// Lets others go first.
void give_way();
uint64_t nanoseconds();
int lane();

// The block's variable that is declared at a place of the source; undefined (0xa5) at the block's start.
void* shared_variable(size_t bytes, size_t alignment, Location at);
template <typename T>
T& shared(Location at = Location::current()) {
  return *static_cast<T*>(shared_variable(sizeof(T), alignof(T), at));
}

// Bytes of the shared memory that the launch asked for, from `offset` on; aligned to their number, up to 16.
void* dynamic_shared(size_t offset, size_t bytes, Location at = Location::current());

// Copies that go on by themselves: carried out at once or when their set is waited for, as chance has it; until then
// the place they go to is undefined (0xa5). close_copies ends a set; all but the last `open` are waited for.
void start_copy(void* to, const void* from, size_t bytes);
void close_copies();
void wait_for_copies(uint64_t open);

// What ThreadSanitizer is to take for an edge of happens-before; nothing without it.
void release(const void* object);
void acquire(const void* object);

// ---- for the runtime ----------------------------------------------------------------------------------------------

// A kernel with its arguments, called by every thread.
struct Kernel {
  std::function<void()> body;
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
};

// What is enqueued is carried out one after another; queues go on side by side.
class Queue;
Queue* create_queue();
void destroy_queue(Queue* queue);  // Pre: idle
void enqueue(Queue* queue, const Kernel& kernel);
void enqueue(Queue* queue, std::function<void()> on_host);
bool is_idle(const Queue* queue);
// Every block that may run takes a turn, of all queues. Ends the process, saying who waits where, if none ever will
// again.
void run_round();

// Ends the process.
[[noreturn]] void fail(const char* what, Location at);

}  // namespace emulation
