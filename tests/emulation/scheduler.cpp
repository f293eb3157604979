// Which blocks run when: queues of launches, and the blocks of those at their heads.
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <utility>

#include "threads.h"

namespace emulation {
namespace {

// Resident at once of a launch: more than the peer kernels of the tests have, whose blocks wait for each other, and few
// enough for ThreadSanitizer, which knows 8128 threads.
constexpr size_t kMostBlocks = 24;
// Nothing of the tests takes so long; a kernel that looks for ever without a timeout does.
constexpr uint64_t kMostRounds = 200'000'000;

struct Operation {
  Kernel kernel;  // without a body: on the host
  std::function<void()> on_host;
  uint64_t started = 0;  // blocks
  std::vector<std::unique_ptr<Block>> resident;
};

}  // namespace

class Queue {
 public:
  std::deque<std::unique_ptr<Operation>> operations;
};

namespace {

std::vector<Queue*>& g_queues = *new std::vector<Queue*>;
uint64_t g_round = 0;

uint3 place_in(uint64_t index, const dim3& extent) {
  return {static_cast<unsigned>(index % extent.x), static_cast<unsigned>(index / extent.x % extent.y),
          static_cast<unsigned>(index / extent.x / extent.y)};
}

uint64_t volume(const dim3& extent) { return uint64_t{extent.x} * extent.y * extent.z; }

std::unique_ptr<Block> start_block(const Kernel& kernel, uint64_t index) {
  constexpr uint32_t kPaces[] = {1, 1, 2, 3, 16};
  auto block = std::make_unique<Block>();
  const auto threads = static_cast<int>(volume(kernel.block));
  block->kernel = &kernel;
  block->alive = threads;
  block->pace = kPaces[random_below(5)];
  block->warps.resize((threads + kWarpLanes - 1) / kWarpLanes);
  release(block.get());
  for (int i = 0; i < threads; ++i) {
    Warp& warp = block->warps[i / kWarpLanes];
    Thread* thread = take_thread();
    thread->here = {place_in(i, kernel.block), place_in(index, kernel.grid), kernel.block, kernel.grid};
    thread->block = block.get();
    thread->warp = &warp;
    thread->lane = i % kWarpLanes;
    warp.threads[thread->lane] = thread;
    warp.alive |= 1u << thread->lane;
    warp.ready = warp.alive;
    if (thread->lane == 0) warp.backwards = random_below(2) != 0;
  }
  return block;
}

// True if some thread of the block may run now or later.
bool run_block(Block& block) {
  bool may_run = false;
  for (const Warp& warp : block.warps) may_run = may_run || (warp.ready | warp.resting) != 0;
  if (!may_run || random_below(block.pace) != 0) return may_run;
  // A barrier that fills in a warp's turn makes others ready that have had theirs: they follow in the next round.
  const size_t first = random_below(static_cast<uint32_t>(block.warps.size()));
  for (size_t i = 0; i < block.warps.size(); ++i) {
    // A warp that sits out a turn is overtaken by the rest of its block, and by other blocks.
    if (random_below(4) != 0) run_warp(block.warps[(first + i) % block.warps.size()]);
  }
  return true;
}

void end_block(Block& block) {
  acquire(&block);
  give_back_threads(block);
  for (const SharedVariable& one : block.shared) std::free(one.memory);
}

// True if the queue has done something, or may later.
bool run_queue(Queue& queue) {
  if (queue.operations.empty()) return false;
  Operation& operation = *queue.operations.front();
  if (!operation.kernel.body) {
    operation.on_host();
    queue.operations.pop_front();
    return true;
  }
  const uint64_t blocks = volume(operation.kernel.grid);
  while (operation.started < blocks && operation.resident.size() < kMostBlocks) {
    operation.resident.push_back(start_block(operation.kernel, operation.started++));
  }
  bool alive = false;
  const size_t first = random_below(static_cast<uint32_t>(operation.resident.size()));
  for (size_t i = 0; i < operation.resident.size(); ++i) {
    alive = run_block(*operation.resident[(first + i) % operation.resident.size()]) || alive;
  }
  alive = std::erase_if(operation.resident,
                        [](const std::unique_ptr<Block>& block) {
                          if (block->alive == 0) end_block(*block);
                          return block->alive == 0;
                        }) != 0 ||
          alive;
  if (operation.started == blocks && operation.resident.empty()) queue.operations.pop_front();
  return alive;
}

[[noreturn]] void fail_for_ever(const char* what) {
  for (const Queue* queue : g_queues) {
    if (queue->operations.empty()) continue;
    for (const auto& block : queue->operations.front()->resident) {
      for (const Warp& warp : block->warps) {
        if (warp.alive == 0) continue;
        const Thread& thread = *warp.threads[std::countr_zero(warp.alive)];
        std::fprintf(
            stderr, "block %u, warp %u: lanes %08x left, %08x in a collective, %08x at a barrier; last seen at %s:%u\n",
            thread.here.block.x, thread.here.thread.x / kWarpLanes, warp.alive, warp.collecting, warp.at_barrier,
            thread.at.file_name(), thread.at.line());
      }
    }
  }
  fail(what, Location::current());
}

}  // namespace

uint32_t random_below(uint32_t bound) {
  static uint64_t state = [] {
    const char* seed = std::getenv("ECHO_EMULATION_SEED");
    return (seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10)) * 0x9e3779b97f4a7c15u + 1;
  }();
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>((state >> 33) % bound);
}

uint64_t nanoseconds() { return g_round * kNanosecondsPerRound; }

Queue* create_queue() {
  if (g_queues.empty()) set_host_fiber();
  g_queues.push_back(new Queue);
  return g_queues.back();
}

void destroy_queue(Queue* queue) {
  std::erase(g_queues, queue);
  delete queue;
}

void enqueue(Queue* queue, const Kernel& kernel) {
  queue->operations.push_back(std::make_unique<Operation>(Operation{.kernel = kernel, .on_host = {}, .resident = {}}));
}

void enqueue(Queue* queue, std::function<void()> on_host) {
  queue->operations.push_back(
      std::make_unique<Operation>(Operation{.kernel = {}, .on_host = std::move(on_host), .resident = {}}));
}

bool is_idle(const Queue* queue) { return queue->operations.empty(); }

void run_round() {
  bool alive = false;
  const size_t first = random_below(static_cast<uint32_t>(g_queues.size()));
  for (size_t i = 0; i < g_queues.size(); ++i) alive = run_queue(*g_queues[(first + i) % g_queues.size()]) || alive;
  if (!alive) fail_for_ever("nothing of what is waited for can go on");
  if (++g_round % kMostRounds == 0) fail_for_ever("kernels have not come to an end");
}

}  // namespace emulation
