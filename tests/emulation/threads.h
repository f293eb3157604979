// Threads, warps and blocks, as threads.cpp and scheduler.cpp share them.
#pragma once

#include <vector>

#include "engine.h"
#include "fiber.h"

namespace emulation {

struct Block;
struct Warp;

struct PendingCopy {
  void* to;
  const void* from;
  size_t bytes;
  uint64_t set;
};

struct Thread {
  Coordinates here;  // first: g_here points to it
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int lane = 0;
  // What it waits for, in the warp or at a barrier.
  Collective kind = Collective::kOrder;
  uint32_t mask = 0;
  uint64_t value = 0;
  int source = 0;
  uint64_t result = 0;
  Location at = Location::current();
  std::vector<PendingCopy> copies;
  uint64_t closed_sets = 0;
};

// Every lane is in one of the sets, or runs, or has left.
struct Warp {
  Thread* threads[kWarpLanes] = {};
  uint32_t alive = 0;
  uint32_t ready = 0;
  uint32_t resting = 0;  // ready in the next round
  uint32_t collecting = 0;
  uint32_t at_barrier = 0;
  bool backwards = false;  // the last lane goes first
};

struct SharedVariable {
  Location at;
  void* memory;
};

struct Block {
  const Kernel* kernel = nullptr;
  std::vector<Warp> warps;
  int alive = 0;
  uint32_t pace = 1;  // it takes one turn in so many
  // The barrier that is filling, and what the last one gave: whoever waits there reads it before the next can fill.
  int arrived = 0;
  int count = 0;
  Location at = Location::current();
  int result = 0;
  std::vector<SharedVariable> shared;
};

// ---- threads.cpp --------------------------------------------------------------------------------------------------

// One that runs no kernel; once its fiber is switched to, it executes the kernel of its block.
Thread* take_thread();
// All threads of a block that none of them runs any more.
void give_back_threads(const Block& block);
// From the host until no thread of the warp is ready.
void run_warp(Warp& warp);
void set_host_fiber();

// ---- scheduler.cpp ------------------------------------------------------------------------------------------------

// Drawn in the order of scheduling, so that a seed gives the same run.
uint32_t random_below(uint32_t bound);

}  // namespace emulation
