// One call over peer memory as one kernel. A block is a lane: it walks its tiles, and at step t it pushes tile t,
// reduces and hands on tile t-d, and stores tile t-2d, while the other lanes of the device are at other steps.
//
//   tensor, state   read and written in place, a group's chunk always by the same warp of the same stage
//   own slab        slots that the peers fill, read here behind acquired tickets
//   peers' slabs    written only: codes first, then a barrier of the block, then one release of the ticket
//
// An owner's code goes into its own gather slot too, so that tail treats all segments alike.
#pragma once

#include "../core/reduce.h"
#include "peer_wait.cuh"
#include "stage_device.cuh"

namespace echo::cuda {

constexpr int kPeerThreads = 128;
constexpr int kPeerWarps = kPeerThreads / kWarpLanes;

// Warps of a block that wait and release, one thread per peer: different ones, so that they do so side by side.
constexpr int kPushWaitWarp = 0;
constexpr int kGatherWaitWarp = 1;
constexpr int kReleaseWarp = 2;

struct PeerJob {
  Site site;
  StateLayout state_layout;
  SlabShape shape;
  CallRecord record;  // call_number and exact_calls as far as the host knows them: 0 and what was forwarded since
  bool rescale;
  bool partial;  // the tensor's last group is
  int64_t groups;
  int64_t tile_groups;
  int64_t tiles;  // of a segment
  uint64_t timeout_ns;
  GroupState* group;
  uint32_t* sequences;  // per lane: tiles finished so far
  PeerHostWords* words;
  std::byte* slabs[kMaxPeerRanks];
};

// ---- groups of a tile ---------------------------------------------------------------------------------------------

// The tile that the block works on in one stage.
struct TileAt {
  GroupRange groups;
  int64_t room;  // groups that its slot has room for
};

__device__ __forceinline__ TileAt tile_of(const PeerJob& job, int32_t owner, int64_t tile) {
  const int64_t per_segment = segment_groups(job.site.plan);
  return TileAt{tile_range(job.site.plan, owner, tile, job.tile_groups),
                min_i64(job.tile_groups, per_segment - tile * job.tile_groups)};
}

// Calls body(lane, GroupAt) for the groups of the tile; all lanes of a warp make the same number of calls. Full groups
// go side by side into a warp, the tensor's partial one goes alone, so that all lanes agree on whether to rotate.
template <Spread kSpread, typename Body>
__device__ __forceinline__ void for_each_group_of(const PeerJob& job, const GroupRange& groups, int32_t rescale_log2,
                                                  Body body) {
  const Codec& codec = job.site.plan.codec;
  const auto lane = make_lane<kSpread>(job.site, job.state_layout, groups.begin, rescale_log2);
  const int32_t side_by_side = kWarpLanes >> lane.lanes_log2;
  const bool partial = job.partial && groups.end == job.groups && groups.begin < groups.end;
  const int32_t full = static_cast<int32_t>(groups.end - groups.begin) - (partial ? 1 : 0);
  const int32_t tasks = ((full + side_by_side - 1) >> (5 - lane.lanes_log2)) + (partial ? 1 : 0);
  const int32_t mine = (static_cast<int32_t>(threadIdx.x) % kWarpLanes) >> lane.lanes_log2;
#pragma unroll 1
  for (int32_t task = static_cast<int32_t>(threadIdx.x) / kWarpLanes; task < tasks; task += kPeerWarps) {
    const int32_t first = task * side_by_side;
    const int32_t here = min(full - first, side_by_side);
    GroupAt at;
    if (here > 0) {
      at.slot = first + mine;
      at.elems = mine < here ? codec.group_elems : 0;
      at.rotated = is_rotated(codec, codec.group_elems);
      at.dense = here == side_by_side && codec.group_elems == kLaneElems << lane.lanes_log2;
    } else {
      at.slot = full;
      at.elems = mine == 0 ? group_elems_at(job.site.plan, job.groups - 1) : 0;
    }
    body(lane, at);
  }
}

// What this lane still owes of the tensor: every rank's segment, its tiles from `first` on.
template <DType kDType>
__device__ __noinline__ void fill_lane_with_nan(const PeerJob& job, int64_t first) {
  const Plan& plan = job.site.plan;
  for (int64_t tile = first; tile < job.tiles; tile += gridDim.x) {
    for (int32_t owner = 0; owner < plan.world_size; ++owner) {
      const GroupRange groups = tile_range(plan, owner, tile, job.tile_groups);
      const int64_t end = min_i64(plan.numel, groups.end * plan.codec.group_elems);
      for (int64_t i = groups.begin * plan.codec.group_elems + threadIdx.x; i < end; i += kPeerThreads) {
        store_nan<kDType>(job.site.tensor, i);
      }
    }
  }
}

// ---- the call -----------------------------------------------------------------------------------------------------

// What a block knows of the call once it is open. In shared memory: stages need the registers.
struct OpenCall {
  uint32_t hash;
  uint32_t first;  // the lane's sequence number of its first tile
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
  context.timeout_ms = static_cast<uint32_t>(job.timeout_ns / 1000000);
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

// Blocks of one multiprocessor, as many as a kernel's registers leave room for: so many lanes a call may have.
constexpr int peer_blocks(StateKind state) { return state == StateKind::kNone ? 4 : state == StateKind::kInt8 ? 3 : 2; }
constexpr int kMostPeerBlocks = 4;

// kPair: of two ranks, where the sum needs no order kept.
template <DType kDType, int kBits, StateKind kState, Updates kUpdates, bool kPair>
struct LaneWalk {
  const PeerJob& job;
  const WaitContext& context;
  const OpenCall& call;

  __device__ __forceinline__ int32_t slot(int32_t i) const {
    return static_cast<int32_t>((call.first + static_cast<uint32_t>(i)) % kRingSlots);
  }
  __device__ __forceinline__ uint64_t ticket(int32_t i) const {
    return ticket_of(call.first + static_cast<uint32_t>(i), call.hash);
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

  __device__ __forceinline__ void push(int32_t i) const {
#pragma unroll 1
    for (int32_t turn = 1; turn < job.shape.world_size; ++turn) {
      const int32_t peer = peer_at(turn);
      const TileAt at_tile = tile_of(job, peer, tile(i));
      const TileView<std::byte> view =
          view_tile(job.site.plan.codec, at_tile.room, job.slabs[peer] + slot_at(Stage::kPush, job.site.plan.rank, i));
      for_each_group_of<Spread::kRuns>(
          job, at_tile.groups, call.rescale_log2,
          [&](const auto& lane, const GroupAt& at) { push_group<kDType, kBits, kState, kUpdates>(lane, at, view); });
    }
    hand_over(Stage::kPush, i);
  }

  // With the gather, which is the owner's store to everyone.
  __device__ __forceinline__ void reduce(int32_t i) const {
    const Plan& plan = job.site.plan;
    const TileAt at_tile = tile_of(job, plan.rank, tile(i));
    const Copies<kBits> copies{
        plan, at_tile.room,
        PeerTiles{job.slabs[plan.rank] + slot_at(Stage::kPush, 0, i), kRingSlots * job.shape.slot_bytes}};
    const int64_t target = slot_at(Stage::kGather, plan.rank, i);
    for_each_group_of<Spread::kRuns>(job, at_tile.groups, call.rescale_log2, [&](const auto& lane, const GroupAt& at) {
      reduce_group<kDType, kBits, kState, !kPair, kUpdates>(copies, lane, at, [&](const Encoded<kBits>& encoded) {
#pragma unroll 1
        for (int32_t turn = 0; turn < job.shape.world_size; ++turn) {
          store_encoded(lane, at, encoded, view_tile(plan.codec, at_tile.room, job.slabs[peer_at(turn)] + target));
        }
      });
    });
    hand_over(Stage::kGather, i);
  }

  __device__ __forceinline__ void tail(int32_t i) const {
#pragma unroll 1
    for (int32_t turn = 0; turn < job.shape.world_size; ++turn) {
      const int32_t owner = peer_at(turn);
      const TileAt at_tile = tile_of(job, owner, tile(i));
      const std::byte* slot = job.slabs[job.site.plan.rank] + slot_at(Stage::kGather, owner, i);
      const TileView<const std::byte> view = view_tile(job.site.plan.codec, at_tile.room, slot);
      for_each_group_of<Spread::kChunks>(
          job, at_tile.groups, call.rescale_log2,
          [&](const auto& lane, const GroupAt& at) { tail_group<kDType, kBits, kState, kUpdates>(lane, at, view); });
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
    if (threadIdx.x == 0) job.sequences[blockIdx.x] = call.first + static_cast<uint32_t>(mine);
  }
};

template <DType kDType, int kBits, StateKind kState, Updates kUpdates, bool kPair>
__global__ void __launch_bounds__(kPeerThreads, peer_blocks(kState)) peer_kernel(const __grid_constant__ PeerJob job) {
  __shared__ WaitContext context;
  __shared__ OpenCall call;
  if (open_peer_call(job, context, call)) {
    LaneWalk<kDType, kBits, kState, kUpdates, kPair>{job, context, call}.run();
  } else {
    fill_lane_with_nan<kDType>(job, blockIdx.x);
  }
  close_peer_call(job);
}

}  // namespace echo::cuda
