// Storage of the compensator's state, per group: slots inside arenas that are as large as the largest pass seen and are
// used again by every pass, so that memory does not grow with the number of shapes.
//
//   arena (one per direction and device)   | slot | slot | slot |    free    |
//   slot                                    belongs to one (lane, half, numel, dtype) for the rest of the pass
//
// A pass that outgrows its arena gets further blocks; the next pass starts with one block of their total size.
//
// A graph keeps the addresses that its calls were recorded with, so an arena that serves a recording keeps its blocks
// as they are from then on: further ones may come, none goes. Equal sequences of sites get equal slots in it, so that
// eager passes and replays share their state. While a graph is recorded nothing is allocated.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "../core/config.h"

namespace echo::pg {

// Slots that one pass may hold. Callers that never start a pass would otherwise keep a slot for every shape they ever
// use; beyond the limit the state of the direction starts anew, on all ranks at the same call.
constexpr size_t kMaxSlotsPerPass = 256;

struct SlotKey {
  int32_t lane = 0;
  int32_t half = 0;  // 1 and 2: the halves of a batch that take turns, 0: no halves
  int64_t numel = 0;
  DType dtype = DType::kBFloat16;

  auto operator<=>(const SlotKey&) const = default;
};

struct Slot {
  at::Tensor bytes;
  bool first_site = true;  // nothing has been stored in it in this pass
};

// Not thread-safe: callers hold the group's issue lock.
class StatePool {
 public:
  StatePool() = default;
  // Leaves what graphs refer to: they may be replayed after the group has gone.
  ~StatePool();
  StatePool(const StatePool&) = delete;
  StatePool& operator=(const StatePool&) = delete;

  // Gives back all slots of a direction. `recording`: for a pass that a graph records.
  void start_pass(Direction direction, bool recording);

  // The slot of a key, of `bytes` bytes on `device`; new ones have first_site set. Throws c10::OutOfMemoryError with
  // advice; while `recording`, c10::Error if a new slot would need memory.
  Slot acquire(Direction direction, const SlotKey& key, int64_t bytes, c10::Device device, bool recording);

  // Bytes held, in use or not.
  int64_t total_bytes() const;

 private:
  struct Arena {
    std::vector<at::Tensor> blocks;
    std::vector<int64_t> used;  // bytes of each block that slots occupy
    bool pinned = false;        // a graph refers to the blocks

    int64_t block_bytes() const;
  };

  static at::Tensor take(Arena& arena, int64_t bytes, c10::Device device, bool recording);

  std::map<std::tuple<Direction, c10::DeviceType, c10::DeviceIndex>, Arena> arenas_;
  std::map<std::tuple<Direction, c10::DeviceType, c10::DeviceIndex, SlotKey>, Slot> slots_;
};

}  // namespace echo::pg
