#include "state_pool.hpp"

#include <ATen/Functions.h>

namespace echo::pg {
namespace {

constexpr int64_t kSlotAlignBytes = 256;

int64_t padded(int64_t bytes) { return (bytes + kSlotAlignBytes - 1) / kSlotAlignBytes * kSlotAlignBytes; }

at::Tensor new_block(int64_t bytes, c10::Device device) {
  try {
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  } catch (const c10::Error& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "echo could not allocate ", bytes, " bytes on ", device,
                     " for the state of the error feedback; state_dtype=\"int8\" needs least, feedback=False none (",
                     error.what_without_backtrace(), ")");
  }
}

}  // namespace

StatePool::~StatePool() {
  for (auto& [key, arena] : arenas_) {
    if (!arena.pinned) continue;
    for (at::Tensor& block : arena.blocks) block.unsafeReleaseTensorImpl();
  }
}

int64_t StatePool::Arena::block_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& block : blocks) bytes += block.numel();
  return bytes;
}

void StatePool::start_pass(Direction direction, bool recording) {
  std::erase_if(slots_, [&](const auto& entry) { return std::get<0>(entry.first) == direction; });
  for (auto& [key, arena] : arenas_) {
    if (std::get<0>(key) != direction) continue;
    arena.pinned = arena.pinned || recording;
    if (arena.blocks.size() > 1 && !arena.pinned) {
      int64_t used = 0;
      for (const int64_t bytes : arena.used) used += bytes;
      // The old blocks go first, so that the new one does not come on top of them.
      arena = Arena{};
      arena.blocks.push_back(new_block(used, c10::Device(std::get<1>(key), std::get<2>(key))));
    }
    arena.used.assign(arena.blocks.size(), 0);
  }
}

Slot StatePool::acquire(Direction direction, const SlotKey& key, int64_t bytes, c10::Device device, bool recording) {
  const auto arena_key = std::tuple(direction, device.type(), device.index());
  Arena& arena = arenas_[arena_key];
  arena.pinned = arena.pinned || recording;
  const auto slot_key = std::tuple(direction, device.type(), device.index(), key);
  if (const auto found = slots_.find(slot_key); found != slots_.end()) {
    Slot& slot = found->second;
    slot.first_site = false;
    return slot;
  }
  size_t held = 0;
  for (const auto& entry : slots_) held += std::get<0>(entry.first) == direction ? 1 : 0;
  if (held >= kMaxSlotsPerPass) start_pass(direction, recording);
  return slots_[slot_key] = Slot{take(arena, bytes, device, recording), true};
}

at::Tensor StatePool::take(Arena& arena, int64_t bytes, c10::Device device, bool recording) {
  const int64_t needed = padded(bytes);
  for (size_t i = 0; i < arena.blocks.size(); ++i) {
    if (arena.blocks[i].numel() - arena.used[i] < needed) continue;
    const int64_t offset = arena.used[i];
    arena.used[i] += needed;
    return arena.blocks[i].narrow(0, offset, bytes);
  }
  TORCH_CHECK(!recording, "no memory is left for the state of a quantized all_reduce (", bytes, " bytes on ", device,
              "), and none can be allocated while a CUDA graph is recorded: run one warm-up pass of the same calls in ",
              "eager mode first");
  // A block that no slot uses yet is too small for this pass: a larger one takes its place.
  if (arena.used.size() == 1 && arena.used[0] == 0 && !arena.pinned) arena = Arena{};
  arena.blocks.push_back(new_block(needed, device));
  arena.used.push_back(needed);
  return arena.blocks.back().narrow(0, 0, bytes);
}

int64_t StatePool::total_bytes() const {
  int64_t bytes = 0;
  for (const auto& [key, arena] : arenas_) bytes += arena.block_bytes();
  return bytes;
}

}  // namespace echo::pg
