// A lane's side of the protocol: which tiles it has, where they lie, what it waits for and what it hands over.
#pragma once

#include "peer_call.cuh"

namespace echo::cuda {

// Warps of a block that wait and release, one thread per peer: different ones, so that they do so side by side.
constexpr int kPushWaitWarp = 0;
constexpr int kGatherWaitWarp = 1;
constexpr int kReleaseWarp = 2;
// And the one that meanwhile prepares the next step.
constexpr int kPrepareWarp = 3;
static_assert(kPrepareWarp < kPeerWarps && 2 * kMaxPeerDevices <= kWarpLanes);

// The parts of a step, by turn: this rank's own first, then those of its peers in an order of its own, so that not all
// ranks write to the same one.
struct StepParts {
  PeerPart encoded[kMaxPeerDevices];
  PeerPart stored[kMaxPeerDevices];
};

// Equal in all threads of the block.
struct PeerLane {
  const PeerJob& job;
  const WaitContext& context;
  const OpenCall& call;
  StepParts* steps;  // two, in shared memory: a warp may still store one step when another prepares the next
  int32_t tiles;     // of this lane

  __device__ __forceinline__ int32_t slot(Stage stage, int32_t i) const {
    const uint64_t sequence = call.first + static_cast<uint64_t>(i);
    return static_cast<int32_t>(stage == Stage::kPush ? sequence % kDevicePushSlots : sequence % kRingSlots);
  }
  __device__ __forceinline__ uint64_t ticket(int32_t i) const {
    return ticket_of(static_cast<uint32_t>(call.first + static_cast<uint64_t>(i)), call.hash);
  }
  __device__ __forceinline__ int64_t tile(int32_t i) const { return blockIdx.x + static_cast<int64_t>(i) * gridDim.x; }
  __device__ __forceinline__ int32_t rank_at(int32_t turn) const {
    const int32_t rank = job.site.plan.rank + turn;
    return rank < job.shape.world_size ? rank : rank - job.shape.world_size;
  }
  // The slot of what `source` sends in a stage to `owner`, another rank: among this lane's slots in the slab of
  // `owner`.
  __device__ __forceinline__ int32_t place_of(int32_t owner, Stage stage, int32_t source, int32_t i) const {
    return slot_in_lane(job.shape, owner, stage, source, slot(stage, i));
  }
  __device__ __forceinline__ int64_t flag_at(Stage stage, int32_t source, int32_t i) const {
    return flag_offset(job.shape, static_cast<int32_t>(blockIdx.x), stage, source, slot(stage, i));
  }
  __device__ __forceinline__ bool has(int32_t i) const { return i >= 0 && i < tiles; }

  // What step `step` works on, which stores tile `last`. By one warp, a lane per part: in the warp's lower half those
  // that are encoded, in the upper those that are stored.
  __device__ __forceinline__ void prepare(int32_t step, int32_t last) const {
    const auto turn = static_cast<int32_t>(threadIdx.x % kMaxPeerDevices);
    if (turn >= job.shape.world_size) return;
    const bool stores = threadIdx.x % kWarpLanes >= kMaxPeerDevices;
    PeerPart& part = stores ? steps[step % 2].stored[turn] : steps[step % 2].encoded[turn];
    const int32_t summed = step - kLookAhead;
    const int32_t i = stores ? last : turn == 0 ? summed : step;
    const int32_t self = job.site.plan.rank;
    const int32_t owner = rank_at(turn);
    const int64_t lane = slots_offset(job.shape, static_cast<int32_t>(blockIdx.x), 0);
    const auto at = [&](int32_t rank, int32_t place) {
      return job.slabs[rank] + (lane + static_cast<int64_t>(place) * job.shape.slot_bytes);
    };
    if (has(i)) {
      part = make_part(job, owner, tile(i));
      const int32_t place = turn == 0 ? own_slot_in_lane(job.shape, static_cast<uint32_t>(i))
                            : stores  ? place_of(self, Stage::kGather, owner, i)
                                      : place_of(owner, Stage::kPush, self, i);
      part.tile = at(stores ? self : owner, place);
      part.pushed = at(self, place_of(self, Stage::kPush, self == 0 ? 1 : 0, i));
    } else {
      part.tasks = 0;
    }
    // Also where the part has no tasks: what is summed up at this step is gathered there.
    part.gathered = turn == 0 ? part.tile : at(owner, place_of(owner, Stage::kGather, self, summed));
  }

  // One warp: until tile i of a stage has come from every peer; false after a fault.
  __device__ __forceinline__ bool wait_for(Stage stage, int32_t i) const {
    for (int32_t source = threadIdx.x % kWarpLanes; source < job.shape.world_size; source += kWarpLanes) {
      if (source == job.site.plan.rank) continue;
      if (!wait_for_ticket(context, source, stage, flag_at(stage, source, i), ticket(i))) return false;
    }
    return true;
  }

  // Pre: the block has written what it encodes at this step, and met at a barrier. By one warp.
  __device__ __forceinline__ void hand_over(int32_t step) const {
    const int32_t self = job.site.plan.rank;
    const int32_t ranks = job.shape.world_size;
    for (int32_t k = threadIdx.x % kWarpLanes; k < 2 * ranks; k += kWarpLanes) {
      const int32_t peer = k < ranks ? k : k - ranks;
      const Stage stage = k < ranks ? Stage::kPush : Stage::kGather;
      const int32_t i = k < ranks ? step : step - kLookAhead;
      if (peer != self && has(i))
        store_release_sys(word_at(job.slabs[peer], flag_at(stage, self, i)), ticket(i));  // P1
    }
  }

  // Until what a step works on is here; the same answer for the whole block, false after a fault. A negative tile is
  // none.
  __device__ __forceinline__ bool wait_for_both(int32_t pushed, int32_t gathered) const {
    bool here = true;
    const auto warp = static_cast<int>(threadIdx.x / kWarpLanes);
    if (warp == kPushWaitWarp && has(pushed)) here = wait_for(Stage::kPush, pushed);
    if (warp == kGatherWaitWarp && has(gathered)) here = wait_for(Stage::kGather, gathered);
    return __syncthreads_or(!here) == 0;
  }
};

}  // namespace echo::cuda
