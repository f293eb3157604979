// One call over peer memory as one kernel. A block is a lane: it walks its tiles, and at step t it pushes tile t,
// reduces and hands on tile t-d, and stores tile t-2d, while the other lanes of the device are at other steps.
//
//   tensor, state   read and written in place; a group is read by push or reduce before tail stores it, in one block
//   own slab        slots that the peers fill, read here behind acquired tickets
//   peers' slabs    written only: codes first, then a barrier of the block, then one release of the ticket
//
// An owner's code goes into its own gather slot too, so that tail treats all segments alike.
#pragma once

#include "../core/reduce.h"
#include "peer_tile.cuh"

namespace echo::cuda {

// Warps of a block that wait and release, one thread per peer: different ones, so that they do so side by side.
constexpr int kPushWaitWarp = 0;
constexpr int kGatherWaitWarp = 1;
constexpr int kReleaseWarp = 2;

// What this lane still owes of the tensor: every rank's segment, its tiles from `first` on.
template <DType kDType>
__device__ __noinline__ void fill_lane_with_nan(const PeerJob& job, int64_t first) {
  for (int64_t tile = first; tile < job.tiles; tile += gridDim.x) {
    for (int32_t owner = 0; owner < job.shape.world_size; ++owner) {
      fill_with_nan<kDType>(job.site, tile_of(job, owner, tile).groups, threadIdx.x, kPeerThreads);
    }
  }
}

// ---- the call -----------------------------------------------------------------------------------------------------

// What a block knows of the call once it is open. In shared memory: stages need the registers.
struct OpenCall {
  uint32_t hash;
  uint64_t first;  // the lane's sequence number of its first tile
  int32_t rescale_log2;
  uint32_t largest;  // bits of max|x| over all ranks
};

// This rank's record to everyone (P2), by one lane.
__device__ __forceinline__ void publish_record(const PeerJob& job, const CallRecord& record) {
  const auto peer = static_cast<int32_t>(threadIdx.x);
  if (peer >= job.shape.world_size) return;
  const auto parity = static_cast<int32_t>(record.call_number % kCallParities);
  std::byte* slab = job.slabs[peer];
  *reinterpret_cast<CallRecord*>(slab + record_offset(job.shape, job.site.plan.rank, parity)) = record;
  store_release_sys(word_at(slab, record_ticket_offset(job.site.plan.rank, parity)),
                    ticket_of(static_cast<uint32_t>(record.call_number), 0));
}

// The largest max|x| of all ranks, waited for by one thread per rank; false after a fault.
__device__ __forceinline__ bool agree_on_rescale(const PeerJob& job, const WaitContext& context, OpenCall& call) {
  const auto peer = static_cast<int32_t>(threadIdx.x);
  if (peer >= job.shape.world_size) return true;
  const auto parity = static_cast<int32_t>(context.record.call_number % kCallParities);
  const uint64_t ticket = ticket_of(static_cast<uint32_t>(context.record.call_number), 0);
  if (!wait_for_ticket(context, peer, Stage::kPush, record_ticket_offset(peer, parity), ticket)) return false;
  const auto* theirs =
      reinterpret_cast<const CallRecord*>(context.slabs[context.rank] + record_offset(job.shape, peer, parity));
  atomicMax(&call.largest, theirs->max_magnitude);
  return true;
}

// By one thread; false if the group has failed before.
__device__ __forceinline__ bool begin_call(const PeerJob& job, WaitContext& context, OpenCall& call) {
  context.shape = job.shape;
  context.slabs = job.slabs;
  context.rank = job.site.plan.rank;
  context.lane = static_cast<int32_t>(blockIdx.x);
  context.group = job.group;
  context.words = job.words;
  context.deadline = global_nanoseconds() + job.timeout_ns;
  context.timeout_ms = static_cast<uint32_t>(min(job.timeout_ns / 1000000, uint64_t{0xffffffffu}));
  context.record = job.record;
  context.record.call_number = job.group->call_number;
  context.record.exact_calls += job.group->exact_calls;
  if (job.rescale) context.record.max_magnitude = job.group->record.max_magnitude;
  call = OpenCall{
      .hash = ticket_hash(context.record), .first = job.sequences[blockIdx.x], .rescale_log2 = 0, .largest = 0};
  if (const uint64_t word = fault_word(context); word != 0) {
    pass_on_fault(context, word);
    return false;
  }
  // Calls of a group follow each other on the device; a replay on a stream that nobody ordered may not.
  if (blockIdx.x == 0 && atomicExch(&job.group->in_use, 1u) != 0) {
    raise_fault(context, FaultRecord{.kind = FaultKind::kOverlap});
    return false;
  }
  return true;
}

__device__ __forceinline__ bool open_peer_call(const PeerJob& job, WaitContext& context, OpenCall& call) {
  const bool begun = threadIdx.x != 0 || begin_call(job, context, call);
  if (__syncthreads_or(!begun) != 0) return false;
  if (blockIdx.x == 0) publish_record(job, context.record);
  if (!job.rescale) return true;
  if (__syncthreads_or(!agree_on_rescale(job, context, call)) != 0) return false;
  if (threadIdx.x == 0) call.rescale_log2 = rescale_exponent(call.largest);
  __syncthreads();
  return true;
}

// The last block to leave moves the group on to its next call.
__device__ __forceinline__ void close_peer_call(const PeerJob& job) {
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&job.group->blocks_done, 1u) + 1 != gridDim.x) return;
  job.group->blocks_done = 0;
  job.group->call_number += 1;
  job.group->exact_calls += job.record.exact_calls;
  __threadfence();
  job.group->in_use = 0;
}

// Blocks of one multiprocessor, for which a kernel's registers leave room: so many lanes a call may have. Without a
// state four and five blocks were no faster than three, and fewer lanes leave larger slots (2x H200, 1 GiB,
// 2026-11-30).
constexpr int peer_blocks(StateKind state, Kind kind) {
  return kind != Kind::kAny && state == StateKind::kNone ? 3 : 2;
}
constexpr int kMostPeerBlocks = 3;

// kPair: of two ranks, where the sum needs no order kept.
template <DType kDType, int kBits, StateKind kState, Updates kUpdates, bool kPair, Kind kKind>
struct LaneWalk {
  const PeerJob& job;
  const WaitContext& context;
  const OpenCall& call;

  __device__ __forceinline__ int32_t slot(int32_t i) const {
    return static_cast<int32_t>((call.first + static_cast<uint64_t>(i)) % kRingSlots);
  }
  __device__ __forceinline__ uint64_t ticket(int32_t i) const {
    return ticket_of(static_cast<uint32_t>(call.first + static_cast<uint64_t>(i)), call.hash);
  }
  __device__ __forceinline__ int64_t tile(int32_t i) const { return blockIdx.x + static_cast<int64_t>(i) * gridDim.x; }
  // Ranks in an order of each rank's own, so that not all write to the same one.
  __device__ __forceinline__ int32_t peer_at(int32_t turn) const {
    const int32_t peer = job.site.plan.rank + turn;
    return peer < job.shape.world_size ? peer : peer - job.shape.world_size;
  }
  // This lane's slot of what `source` sends in a stage, in anyone's slab.
  __device__ __forceinline__ int64_t slot_at(Stage stage, int32_t source, int32_t i) const {
    return slot_offset(job.shape, static_cast<int32_t>(blockIdx.x), stage, source, slot(i));
  }
  __device__ __forceinline__ int64_t flag_at(Stage stage, int32_t source, int32_t i) const {
    return flag_offset(job.shape, static_cast<int32_t>(blockIdx.x), stage, source, slot(i));
  }

  // Pre: the block has written tile i of this stage to every peer.
  __device__ __forceinline__ void hand_over(Stage stage, int32_t i) const {
    __syncthreads();
    if (threadIdx.x / kWarpLanes != kReleaseWarp) return;
    const int32_t rank = job.site.plan.rank;
    for (int32_t peer = threadIdx.x % kWarpLanes; peer < job.shape.world_size; peer += kWarpLanes) {
      if (peer != rank) store_release_sys(word_at(job.slabs[peer], flag_at(stage, rank, i)), ticket(i));  // P1
    }
  }

  // One warp: until tile i of a stage has come from every peer; false after a fault.
  __device__ __forceinline__ bool wait_for(Stage stage, int32_t i) const {
    for (int32_t source = threadIdx.x % kWarpLanes; source < job.shape.world_size; source += kWarpLanes) {
      if (source == job.site.plan.rank) continue;
      if (!wait_for_ticket(context, source, stage, flag_at(stage, source, i), ticket(i))) return false;
    }
    return true;
  }

  __device__ __forceinline__ TileView<std::byte> slot_view(int32_t rank, Stage stage, int32_t i, int64_t room) const {
    return view_tile(job.site.plan.codec, room, job.slabs[rank] + slot_at(stage, job.site.plan.rank, i));
  }

  // One task of any kind, apart from those that the stages below have in their loops.
  __device__ __noinline__ void push_task(int32_t peer, int32_t i, int32_t task) const {
    const TileAt at_tile = tile_of(job, peer, tile(i));
    const TileWalk<Spread::kRuns, kState, Kind::kAny> walk(job, at_tile.groups, call.rescale_log2);
    const GroupAt at = walk.any_group(task);
    auto stored = load_stored<kDType, kState>(walk.lane, at);
    push_group<kUpdates, kBits>(walk.lane, at, stored, slot_view(peer, Stage::kPush, i, at_tile.room));
  }

  __device__ __noinline__ void reduce_task(int32_t i, int32_t task) const {
    const TileAt at_tile = tile_of(job, job.site.plan.rank, tile(i));
    const TileWalk<Spread::kRuns, kState, Kind::kAny> walk(job, at_tile.groups, call.rescale_log2);
    const GroupAt at = walk.any_group(task);
    const Copies<kBits> copies = pushed_copies(i, at_tile.room);
    auto addends = load_addends<kDType, kState>(copies, walk.lane, at);
    reduce_group<kUpdates, !kPair>(copies, walk.lane, at, addends, [&](const Encoded<kBits>& encoded) {
      gather_group(walk.lane, at, encoded, i, at_tile.room);
    });
  }

  __device__ __noinline__ void tail_task(int32_t owner, int32_t i, int32_t task) const {
    const TileAt at_tile = tile_of(job, owner, tile(i));
    const TileWalk<Spread::kChunks, kState, Kind::kAny> walk(job, at_tile.groups, call.rescale_log2);
    const GroupAt at = walk.any_group(task);
    tail_group<kUpdates, kDType, kState>(walk.lane, at,
                                         load_encoded<kBits>(walk.lane, at, gathered_view(owner, i, at_tile.room)));
  }

  __device__ __forceinline__ Copies<kBits> pushed_copies(int32_t i, int64_t room) const {
    const Plan& plan = job.site.plan;
    return {plan, room,
            PeerTiles{job.slabs[plan.rank] + slot_at(Stage::kPush, 0, i), kRingSlots * job.shape.slot_bytes}};
  }

  __device__ __forceinline__ TileView<const std::byte> gathered_view(int32_t owner, int32_t i, int64_t room) const {
    const std::byte* slot = job.slabs[job.site.plan.rank] + slot_at(Stage::kGather, owner, i);
    return view_tile(job.site.plan.codec, room, slot);
  }

  // The owner's store to everyone, itself included.
  template <Spread kSpread>
  __device__ __forceinline__ void gather_group(const Lane<kSpread>& lane, const GroupAt& at,
                                               const Encoded<kBits>& encoded, int32_t i, int64_t room) const {
#pragma unroll 1
    for (int32_t turn = 0; turn < job.shape.world_size; ++turn) {
      store_encoded(lane, at, encoded, slot_view(peer_at(turn), Stage::kGather, i, room));
    }
  }

  __device__ __forceinline__ void push(int32_t i) const {
#pragma unroll 1
    for (int32_t turn = 1; turn < job.shape.world_size; ++turn) {
      const int32_t peer = peer_at(turn);
      const TileAt at_tile = tile_of(job, peer, tile(i));
      const TileView<std::byte> view = slot_view(peer, Stage::kPush, i, at_tile.room);
      const TileWalk<Spread::kRuns, kState, kKind> walk(job, at_tile.groups, call.rescale_log2);
      walk.run([&](const GroupAt& at) { return load_stored<kDType, kState>(walk.lane, at); },
               [&](const GroupAt& at, auto& stored) { push_group<kUpdates, kBits>(walk.lane, at, stored, view); },
               [&](int32_t task) { push_task(peer, i, task); });
    }
    hand_over(Stage::kPush, i);
  }

  // With the gather.
  __device__ __forceinline__ void reduce(int32_t i) const {
    const TileAt at_tile = tile_of(job, job.site.plan.rank, tile(i));
    const Copies<kBits> copies = pushed_copies(i, at_tile.room);
    const TileWalk<Spread::kRuns, kState, kKind> walk(job, at_tile.groups, call.rescale_log2);
    walk.run([&](const GroupAt& at) { return load_addends<kDType, kState>(copies, walk.lane, at); },
             [&](const GroupAt& at, auto& addends) {
               reduce_group<kUpdates, !kPair>(copies, walk.lane, at, addends, [&](const Encoded<kBits>& encoded) {
                 gather_group(walk.lane, at, encoded, i, at_tile.room);
               });
             },
             [&](int32_t task) { reduce_task(i, task); });
    hand_over(Stage::kGather, i);
  }

  __device__ __forceinline__ void tail(int32_t i) const {
#pragma unroll 1
    for (int32_t turn = 0; turn < job.shape.world_size; ++turn) {
      const int32_t owner = peer_at(turn);
      const TileAt at_tile = tile_of(job, owner, tile(i));
      const TileView<const std::byte> view = gathered_view(owner, i, at_tile.room);
      const TileWalk<Spread::kChunks, kState, kKind> walk(job, at_tile.groups, call.rescale_log2);
      walk.run(
          [&](const GroupAt& at) { return load_encoded<kBits>(walk.lane, at, view); },
          [&](const GroupAt& at, const auto& encoded) { tail_group<kUpdates, kDType, kState>(walk.lane, at, encoded); },
          [&](int32_t task) { tail_task(owner, i, task); });
    }
  }

  // The same number of steps on all ranks, empty tiles included.
  __device__ __forceinline__ void run() const {
    const auto mine = static_cast<int32_t>((job.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
#pragma unroll 1
    for (int32_t step = 0; step < mine + 2 * kLookAhead; ++step) {
      const int32_t reduced = step - kLookAhead;
      const int32_t stored = step - 2 * kLookAhead;
      if (step < mine) push(step);
      bool here = true;
      const auto warp = static_cast<int>(threadIdx.x / kWarpLanes);
      if (warp == kPushWaitWarp && reduced >= 0 && reduced < mine) here = wait_for(Stage::kPush, reduced);
      if (warp == kGatherWaitWarp && stored >= 0) here = wait_for(Stage::kGather, stored);
      if (__syncthreads_or(!here) != 0) return fill_lane_with_nan<kDType>(job, tile(stored < 0 ? 0 : stored));
      if (reduced >= 0 && reduced < mine) reduce(reduced);
      if (stored >= 0) tail(stored);
    }
    if (threadIdx.x == 0) job.sequences[blockIdx.x] = call.first + static_cast<uint64_t>(mine);
  }
};

template <DType kDType, int kBits, StateKind kState, Updates kUpdates, bool kPair, Kind kKind>
__global__ void __launch_bounds__(kPeerThreads, peer_blocks(kState, kKind))
    peer_kernel(const __grid_constant__ PeerJob job) {
  __shared__ WaitContext context;
  __shared__ OpenCall call;
  if (open_peer_call(job, context, call)) {
    LaneWalk<kDType, kBits, kState, kUpdates, kPair, kKind>{job, context, call}.run();
  } else {
    fill_lane_with_nan<kDType>(job, blockIdx.x);
  }
  close_peer_call(job);
}

}  // namespace echo::cuda
