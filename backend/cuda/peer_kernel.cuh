// One call over peer memory as one kernel. A block is a lane: it walks its tiles, and at step t it pushes tile t,
// reduces and hands on tile t-d, and stores tile t-2d, while the other lanes of the device are at other steps.
//
//   tensor, state   read and written in place, a group's chunk always by the same warp of the same stage
//   own slab        slots that the peers fill, read here behind acquired tickets
//   peers' slabs    written only: codes first, then a barrier of the block, then one release of the ticket
//
// The owner decodes its own code in registers and stores the result at once, so its tile never visits a slot.
#pragma once

#include "../core/reduce.h"
#include "peer_wait.cuh"
#include "stage_kernels.cuh"

namespace echo::cuda {

constexpr int kPeerThreads = 256;
constexpr int kPeerWarps = kPeerThreads / kWarpLanes;

// Threads that wait for push tickets are 0.. P-1, for gather tickets kMaxPeerRanks .., those that release 2 *
// kMaxPeerRanks ..: different warps, so that they do so side by side.
static_assert(3 * kMaxPeerRanks <= kPeerThreads);

struct PeerJob {
  Site site;
  StateLayout state_layout;
  SlabShape shape;
  CallRecord record;  // call_number and exact_calls as far as the host knows them: 0 and what was forwarded since
  bool rescale;
  bool partial;  // the tensor's last group is
  int32_t groups_per_task;
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

// Calls body(GroupAt) for the groups of the tile; all lanes of a warp make the same number of calls.
template <Spread kSpread, typename Body>
__device__ __forceinline__ void for_each_group_of(const PeerJob& job, const Lane<kSpread>& lane,
                                                  const GroupRange& groups, Body body) {
  const Codec& codec = job.site.plan.codec;
  const bool partial = job.partial && groups.end == job.groups && groups.begin < groups.end;
  const int32_t full = static_cast<int32_t>(groups.end - groups.begin) - (partial ? 1 : 0);
  const int32_t mine = (static_cast<int32_t>(threadIdx.x) % kWarpLanes) >> lane.lanes_log2;
  const bool rotated = is_rotated(codec, codec.group_elems);
  const bool whole = codec.group_elems == kLaneElems << lane.lanes_log2;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpLanes;
#pragma unroll 1
  for (int32_t first = warp * job.groups_per_task; first < full; first += kPeerWarps * job.groups_per_task) {
    GroupAt at;
    at.slot = first + mine;
    at.elems = at.slot < full ? codec.group_elems : 0;
    at.rotated = rotated;
    at.dense = whole && first + job.groups_per_task <= full;
    body(at);
  }
  // The partial group goes alone, so that all lanes agree on whether to rotate.
  if (partial && warp == kPeerWarps - 1) {
    GroupAt at;
    at.slot = full;
    at.elems = mine == 0 ? group_elems_at(job.site.plan, job.groups - 1) : 0;
    body(at);
  }
}

// ---- stages -------------------------------------------------------------------------------------------------------
// Functions of their own, so that none holds registers for what the others keep over their groups.

template <Spread kSpread>
__device__ __forceinline__ Lane<kSpread> lane_of(const PeerJob& job, const TileAt& tile, int32_t rescale_log2) {
  return make_lane<kSpread>(job.site, job.state_layout, tile.groups.begin, rescale_log2);
}

template <DType kDType, int kBits, StateKind kState>
__device__ __noinline__ void push_tile(const PeerJob& job, int32_t rescale_log2, const TileAt& tile, std::byte* slot) {
  const auto lane = lane_of<Spread::kRuns>(job, tile, rescale_log2);
  const TileView<std::byte> view = view_tile(job.site.plan.codec, tile.room, slot);
  for_each_group_of(job, lane, tile.groups, [&](const GroupAt& at) {
    float x[kLaneElems];
    Correction<kState> correction;
    const Extremes extremes = load_measured_contribution<kDType>(lane, at, x, correction);
    const Encoded<kBits> encoded = encode_group<kBits>(lane, at, x, extremes);
    store_encoded(lane, at, encoded, view);
    update_after_push(lane, at, x, correction, encoded);
  });
}

template <DType kDType, int kBits, StateKind kState, bool kLate>
__device__ __noinline__ void reduce_tile(const PeerJob& job, int32_t rescale_log2, const TileAt& tile,
                                         const PeerTiles& copies, int64_t gather_offset) {
  const Plan& plan = job.site.plan;
  const auto lane = lane_of<Spread::kRuns>(job, tile, rescale_log2);
  const Copies<kBits> pushed{plan, tile.room, copies};
  for_each_group_of(job, lane, tile.groups, [&](const GroupAt& at) {
    float sum[kLaneElems];
    Correction<kState> correction;
    load_sum<kDType, kLate>(pushed, lane, at, sum, correction);
    const Extremes extremes = group_extremes(lane, at, sum);
    const Encoded<kBits> encoded = encode_group<kBits>(lane, at, sum, extremes);
#pragma unroll 1
    for (int32_t turn = 1; turn < plan.world_size; ++turn) {
      const int32_t peer = plan.rank + turn < plan.world_size ? plan.rank + turn : plan.rank + turn - plan.world_size;
      store_encoded(lane, at, encoded, view_tile(plan.codec, tile.room, job.slabs[peer] + gather_offset));
    }
    update_after_reduce<kDType>(lane, at, sum, correction, encoded);
    update_from_result<kDType, kState>(lane, at, encoded);
    deliver<kDType>(lane, at, encoded);
  });
}

template <DType kDType, int kBits, StateKind kState>
__device__ __noinline__ void tail_tile(const PeerJob& job, int32_t rescale_log2, const TileAt& tile,
                                       const std::byte* slot) {
  const auto lane = lane_of<Spread::kChunks>(job, tile, rescale_log2);
  const TileView<const std::byte> view = view_tile(job.site.plan.codec, tile.room, slot);
  for_each_group_of(job, lane, tile.groups, [&](const GroupAt& at) {
    const Encoded<kBits> encoded = load_encoded<kBits>(lane, at, view);
    update_from_result<kDType, kState>(lane, at, encoded);
    deliver<kDType>(lane, at, encoded);
  });
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

// What a block knows of the call once it is open.
struct OpenCall {
  uint32_t hash;
  uint32_t first;  // the lane's sequence number of its first tile
  int32_t rescale_log2;
  bool failed;
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

// The largest max|x| of all ranks, waited for by one thread per rank.
__device__ __forceinline__ void agree_on_rescale(const PeerJob& job, const WaitContext& context, uint32_t* largest,
                                                 bool* ok) {
  const auto peer = static_cast<int32_t>(threadIdx.x);
  if (peer >= job.shape.world_size) return;
  const auto parity = static_cast<int32_t>(context.record.call_number % kCallParities);
  const uint64_t ticket = ticket_of(static_cast<uint32_t>(context.record.call_number), 0);
  *ok = wait_for_ticket(context, peer, Stage::kPush, record_ticket_offset(peer, parity), ticket);
  if (!*ok) return;
  const auto* theirs =
      reinterpret_cast<const CallRecord*>(context.slabs[context.rank] + record_offset(job.shape, peer, parity));
  atomicMax(largest, theirs->max_magnitude);
}

__device__ __forceinline__ OpenCall open_peer_call(const PeerJob& job, WaitContext& context) {
  __shared__ OpenCall shared;
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) {
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
    largest = 0;
    shared.hash = ticket_hash(context.record);
    shared.first = job.sequences[blockIdx.x];
    shared.failed = false;
    if (const uint64_t word = fault_word(context); word != 0) {
      pass_on_fault(context, word);
      shared.failed = true;
    }
    // Calls of a group follow each other on the device; a replay on a stream that nobody ordered may not.
    if (blockIdx.x == 0 && atomicExch(&job.group->in_use, 1u) != 0) {
      raise_fault(context, FaultRecord{.kind = FaultKind::kOverlap});
      shared.failed = true;
    }
  }
  __syncthreads();
  bool ok = !shared.failed;
  if (ok && blockIdx.x == 0) publish_record(job, context.record);
  if (ok && job.rescale) agree_on_rescale(job, context, &largest, &ok);
  const bool failed = __syncthreads_or(!ok) != 0;
  return OpenCall{shared.hash, shared.first, rescale_exponent(largest), failed};
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

template <DType kDType, int kBits, StateKind kState, bool kLate>
__device__ __forceinline__ bool walk_lane(const PeerJob& job, const WaitContext& context, const OpenCall& call) {
  const Plan& plan = job.site.plan;
  const SlabShape& shape = job.shape;
  const int32_t rank = plan.rank;
  const auto index = static_cast<int32_t>(blockIdx.x);
  const int64_t lanes = gridDim.x;
  const int64_t mine = (job.tiles - index + lanes - 1) / lanes;

  const auto slot = [&](int64_t i) {
    return static_cast<int32_t>((call.first + static_cast<uint32_t>(i)) % kRingSlots);
  };
  const auto ticket = [&](int64_t i) { return ticket_of(call.first + static_cast<uint32_t>(i), call.hash); };
  const auto peer_at = [&](int32_t turn) {
    return rank + turn < shape.world_size ? rank + turn : rank + turn - shape.world_size;
  };
  const auto hand_over = [&](Stage stage, int64_t i) {
    __syncthreads();
    const int32_t peer = static_cast<int32_t>(threadIdx.x) - 2 * kMaxPeerRanks;
    if (peer < 0 || peer >= shape.world_size || peer == rank) return;
    store_release_sys(word_at(job.slabs[peer], flag_offset(shape, index, stage, rank, slot(i))), ticket(i));  // P1
  };
  const auto arrived = [&](Stage stage, int32_t first_thread, int64_t i) {
    const int32_t source = static_cast<int32_t>(threadIdx.x) - first_thread;
    if (i < 0 || i >= mine || source < 0 || source >= shape.world_size || source == rank) return true;
    return wait_for_ticket(context, source, stage, flag_offset(shape, index, stage, source, slot(i)), ticket(i));
  };

#pragma unroll 1
  for (int64_t step = 0; step < mine + 2 * kLookAhead; ++step) {
    if (const int64_t i = step; i < mine) {  // push
#pragma unroll 1
      for (int32_t turn = 1; turn < shape.world_size; ++turn) {
        const int32_t peer = peer_at(turn);
        push_tile<kDType, kBits, kState>(job, call.rescale_log2, tile_of(job, peer, index + i * lanes),
                                         job.slabs[peer] + slot_offset(shape, index, Stage::kPush, rank, slot(i)));
      }
      hand_over(Stage::kPush, i);
    }
    const bool here =
        arrived(Stage::kPush, 0, step - kLookAhead) && arrived(Stage::kGather, kMaxPeerRanks, step - 2 * kLookAhead);
    if (__syncthreads_or(!here) != 0) {
      fill_lane_with_nan<kDType>(job, index + (step < 2 * kLookAhead ? 0 : step - 2 * kLookAhead) * lanes);
      return false;
    }
    if (const int64_t i = step - kLookAhead; i >= 0 && i < mine) {  // reduce, gather
      const PeerTiles copies{job.slabs[rank] + slot_offset(shape, index, Stage::kPush, 0, slot(i)),
                             kRingSlots * shape.slot_bytes};
      reduce_tile<kDType, kBits, kState, kLate>(job, call.rescale_log2, tile_of(job, rank, index + i * lanes), copies,
                                                slot_offset(shape, index, Stage::kGather, rank, slot(i)));
      hand_over(Stage::kGather, i);
    }
    if (const int64_t i = step - 2 * kLookAhead; i >= 0) {  // tail
#pragma unroll 1
      for (int32_t turn = 1; turn < shape.world_size; ++turn) {
        const int32_t owner = peer_at(turn);
        tail_tile<kDType, kBits, kState>(job, call.rescale_log2, tile_of(job, owner, index + i * lanes),
                                         job.slabs[rank] + slot_offset(shape, index, Stage::kGather, owner, slot(i)));
      }
    }
  }
  if (threadIdx.x == 0) job.sequences[index] = call.first + static_cast<uint32_t>(mine);
  return true;
}

// Blocks of one multiprocessor that the kernels' registers leave room for, and so how many lanes a call may have.
constexpr int kMostPeerBlocks = 2;
constexpr int peer_blocks(StateKind state) { return state == StateKind::kNone ? kMostPeerBlocks : 1; }

template <DType kDType, int kBits, StateKind kState, bool kLate>
__global__ void __launch_bounds__(kPeerThreads, peer_blocks(kState)) peer_kernel(const __grid_constant__ PeerJob job) {
  __shared__ WaitContext context;
  const OpenCall call = open_peer_call(job, context);
  if (call.failed) {
    fill_lane_with_nan<kDType>(job, blockIdx.x);
  } else {
    walk_lane<kDType, kBits, kState, kLate>(job, context, call);
  }
  close_peer_call(job);
}

}  // namespace echo::cuda
