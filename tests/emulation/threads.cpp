// What a kernel's thread does other than compute: it switches to others, and meets them in warps and blocks.
#include "threads.h"

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <utility>

#if defined(ECHO_EMULATION_TSAN)
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace emulation {

const Coordinates* g_here = nullptr;

namespace {

std::vector<Thread*>& g_idle = *new std::vector<Thread*>;  // never destroyed: what it leads to is no leak
Fiber g_host;

Thread& self() { return *reinterpret_cast<Thread*>(const_cast<Coordinates*>(g_here)); }

[[noreturn]] void fail_in(const Thread& thread, const char* what) {
  std::fprintf(stderr, "block %u, thread %u: ", thread.here.block.x, thread.here.thread.x);
  fail(what, thread.at);
}

// ---- switching ----------------------------------------------------------------------------------------------------

int first_of(const Warp& warp, uint32_t lanes) {
  return warp.backwards ? 31 - std::countl_zero(lanes) : std::countr_zero(lanes);
}

// From the running thread to one of its warp that is ready, else to the scheduler.
void leave(Thread& me) {
  Warp& warp = *me.warp;
  Fiber* next = &g_host;
  if (warp.ready != 0) {
    const int lane = first_of(warp, warp.ready);
    warp.ready &= ~(1u << lane);
    g_here = &warp.threads[lane]->here;
    next = &warp.threads[lane]->fiber;
  } else {
    g_here = nullptr;
  }
  if (next == &me.fiber) return;
  switch_fiber(me.fiber, *next);
}

void complete_barrier(Block& block) {
  block.result = block.count;
  block.arrived = block.count = 0;
  for (Warp& warp : block.warps) {
    warp.ready |= warp.at_barrier;
    warp.at_barrier = 0;
  }
}

// Whoever waits for a lane that goes elsewhere waits for ever.
void check_nobody_collects_with(const Thread& me, const char* what) {
  for (uint32_t others = me.warp->collecting; others != 0; others &= others - 1) {
    const Thread& other = *me.warp->threads[std::countr_zero(others)];
    if ((other.mask >> me.lane & 1) == 0) continue;
    std::fprintf(stderr, "lane %d %s (%s:%u) while waited for\n", me.lane, what, me.at.file_name(), me.at.line());
    fail_in(other, "waits for a lane that goes elsewhere");
  }
}

void leave_for_good(Thread& me) {
  Block& block = *me.block;
  check_nobody_collects_with(me, "has left the kernel after");
  release(&block);
  me.warp->alive &= ~(1u << me.lane);
  if (--block.alive != 0 && block.arrived == block.alive) complete_barrier(block);
  leave(me);
}

[[noreturn]] void run_thread() {
  arrive_in_fiber(self().fiber);
  while (true) {
    Thread& me = self();
    acquire(me.block);
    me.block->kernel->body();
    leave_for_good(me);
  }
}

}  // namespace

Thread* take_thread() {
  if (g_idle.empty()) {
    auto* thread = new Thread;  // like its stack, for the life of the process
    thread->fiber = make_fiber([] { run_thread(); });
    return thread;
  }
  Thread* thread = g_idle.back();
  g_idle.pop_back();
  return thread;
}

void give_back_threads(const Block& block) {
  for (const Warp& warp : block.warps) {
    for (Thread* thread : warp.threads) {
      if (thread != nullptr) g_idle.push_back(thread);
    }
  }
}

void run_warp(Warp& warp) {
  warp.ready |= std::exchange(warp.resting, 0u);
  while (warp.ready != 0) {
    const int lane = first_of(warp, warp.ready);
    warp.ready &= ~(1u << lane);
    g_here = &warp.threads[lane]->here;
    switch_fiber(g_host, warp.threads[lane]->fiber);
  }
}

void set_host_fiber() { g_host = this_thread(); }

// ---- warps and blocks ---------------------------------------------------------------------------------------------

namespace {

void complete_collective(Warp& warp, const Thread& last) {
  uint64_t ballot = 0;
  uint64_t most = 0;
  uint64_t least = ~uint64_t{0};
  for (uint32_t lanes = last.mask; lanes != 0; lanes &= lanes - 1) {
    const int lane = std::countr_zero(lanes);
    const Thread& thread = *warp.threads[lane];
    if (thread.kind != last.kind || thread.mask != last.mask || thread.at.line() != last.at.line() ||
        thread.at.column() != last.at.column()) {
      std::fprintf(stderr, "lane %d waits at %s:%u\n", lane, thread.at.file_name(), thread.at.line());
      fail_in(last, "meets lanes that are elsewhere or name other lanes");
    }
    if (thread.value != 0) ballot |= uint64_t{1} << lane;
    most = thread.value > most ? thread.value : most;
    least = thread.value < least ? thread.value : least;
  }
  for (uint32_t lanes = last.mask; lanes != 0; lanes &= lanes - 1) {
    Thread& thread = *warp.threads[std::countr_zero(lanes)];
    if (last.kind == Collective::kShuffle) {
      if ((last.mask >> thread.source & 1) == 0) fail_in(thread, "asks for the value of a lane that takes no part");
      thread.result = warp.threads[thread.source]->value;
    } else {
      thread.result = last.kind == Collective::kBallot ? ballot : last.kind == Collective::kMax ? most : least;
    }
  }
}

}  // namespace

uint64_t collect(Collective kind, uint32_t mask, uint64_t value, int source, Location at) {
  Thread& me = self();
  Warp& warp = *me.warp;
  me.kind = kind;
  me.mask = mask;
  me.value = value;
  me.source = source;
  me.at = at;
  if ((mask >> me.lane & 1) == 0) fail_in(me, "is not named by its own mask");
  if ((mask & ~warp.alive) != 0) fail_in(me, "names lanes that have left, or never were");
  if ((mask & warp.at_barrier) != 0) fail_in(me, "names lanes that wait at a barrier of the block");
  // All kinds, where CUDA promises it of __syncwarp alone: a load whose value went into a collective is over after it,
  // and ThreadSanitizer cannot be told of loads apart from stores.
  release(&warp);
  warp.collecting |= 1u << me.lane;
  if ((warp.collecting & mask) == mask) {
    complete_collective(warp, me);
    warp.collecting &= ~mask;
    warp.ready |= mask & ~(1u << me.lane);
  } else {
    leave(me);
  }
  acquire(&warp);
  return me.result;
}

int wait_at_barrier(Barrier kind, bool predicate, Location at) {
  Thread& me = self();
  Block& block = *me.block;
  me.at = at;
  check_nobody_collects_with(me, "waits at a barrier of the block");
  if (block.arrived != 0 && (block.at.line() != at.line() || block.at.column() != at.column())) {
    std::fprintf(stderr, "others of the block wait at %s:%u\n", block.at.file_name(), block.at.line());
    fail_in(me, "comes to another barrier than others of its block");
  }
  block.at = at;
  block.count += predicate ? 1 : 0;
  ++block.arrived;
  release(&block);
  me.warp->at_barrier |= 1u << me.lane;
  if (block.arrived == block.alive) complete_barrier(block);
  leave(me);
  acquire(&block);
  switch (kind) {
    case Barrier::kOr:
      return block.result != 0;
    case Barrier::kAnd:
      return block.result == block.alive;
    default:
      return block.result;
  }
}

void give_way() {
  Thread& me = self();
  me.warp->resting |= 1u << me.lane;
  leave(me);
}

int lane() { return self().lane; }

// ---- the rest -------------------------------------------------------------------------------------------------------

namespace {

// While it lives, ThreadSanitizer ignores what this thread does: what one thread of a block allocates, all may use.
struct UnseenBySanitizer {
#if defined(ECHO_EMULATION_TSAN)
  UnseenBySanitizer() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~UnseenBySanitizer() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#endif
};

}  // namespace

void* shared_variable(size_t bytes, size_t alignment, Location at) {
  [[maybe_unused]] const UnseenBySanitizer unseen;
  std::vector<SharedVariable>& all = self().block->shared;
  for (const SharedVariable& one : all) {
    if (one.at.line() == at.line() && one.at.column() == at.column() &&
        std::strcmp(one.at.file_name(), at.file_name()) == 0) {
      return one.memory;
    }
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment < sizeof(void*) ? sizeof(void*) : alignment, bytes) != 0) std::abort();
  std::memset(memory, 0xa5, bytes);
  all.push_back({at, memory});
  return memory;
}

void* dynamic_shared(size_t offset, size_t bytes, Location at) {
  const size_t all = self().block->kernel->shared_bytes;
  if (offset % bytes != 0 || offset + bytes > all) fail("not a place in the dynamic shared memory", at);
  static constexpr Location kDeclaration = Location::current();
  return static_cast<std::byte*>(shared_variable(all, 128, kDeclaration)) + offset;
}

void start_copy(void* to, const void* from, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0) {
    fail("a copy that is not aligned to its size", Location::current());
  }
  if (random_below(2) == 0) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memset(to, 0xa5, bytes);
  self().copies.push_back({to, from, bytes, self().closed_sets});
}

void close_copies() { ++self().closed_sets; }

void wait_for_copies(uint64_t open) {
  std::erase_if(self().copies, [&](const PendingCopy& copy) {
    if (copy.set + open >= self().closed_sets) return false;
    std::memcpy(copy.to, copy.from, copy.bytes);
    return true;
  });
}

#if defined(ECHO_EMULATION_TSAN)
void release(const void* object) { __tsan_release(const_cast<void*>(object)); }
void acquire(const void* object) { __tsan_acquire(const_cast<void*>(object)); }
#else
void release(const void*) {}
void acquire(const void*) {}
#endif

void fail(const char* what, Location at) {
  std::fprintf(stderr, "CUDA emulation: %s\n  in %s\n  at %s:%u\n", what, at.function_name(), at.file_name(),
               at.line());
  std::abort();
}

}  // namespace emulation
