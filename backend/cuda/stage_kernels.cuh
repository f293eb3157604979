// The kernels of push, reduce and tail when they run apart, as between the exchanges of the wire composition.
//
// One warp takes the groups of one task after another; everything between a group's loads and its stores stays in
// registers. Kernels are made for each element type, each width of codes, and with and without the compensator, which
// costs registers; whatever else a plan says is a branch that all lanes take alike.
#pragma once

#include "residual_device.cuh"
#include "stages.h"

namespace echo::cuda {

constexpr int kThreads = 128;
constexpr int kWarpsPerBlock = kThreads / kWarpLanes;

// Blocks of one multiprocessor that a kernel's registers must leave room for, and as many as are launched: as many as
// go without spills on sm_80 and sm_90 (nvcc 13.0).
constexpr int push_blocks(StateKind state) { return state == StateKind::kNone ? 5 : 4; }
constexpr int reduce_blocks(StateKind state, bool late) { return state != StateKind::kNone && late ? 3 : 4; }
constexpr int tail_blocks(StateKind state) { return state == StateKind::kNone ? 5 : 3; }

__device__ __forceinline__ int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * kThreads; }

// Groups that the lanes of a warp hold side by side.
inline int32_t groups_per_task(const Codec& codec) {
  int32_t lanes = 1;
  while (kLaneElems * lanes < codec.group_elems) lanes *= 2;
  return kWarpLanes / lanes;
}

inline StateKind state_kind(const Plan& plan) {
  if (!plan.feedback.enabled) return StateKind::kNone;
  return plan.feedback.state_dtype == StateDType::kInt8 ? StateKind::kInt8 : StateKind::kWide;
}

// ---- tasks --------------------------------------------------------------------------------------------------------

// Full groups go side by side into a warp; a partial one goes alone, so that all lanes agree on whether to rotate.
struct TaskList {
  int32_t full_groups;
  int32_t full_tasks;
  int32_t tasks;
  int32_t groups_per_task;
};

struct Job {
  Site site;
  StateLayout state_layout;
  GroupRange groups;
  int64_t tile_groups;
  const CallState* agreed;
  TaskList list;
};

template <Spread kSpread>
__device__ __forceinline__ GroupAt group_of_task(const Job& job, const Lane<kSpread>& lane, int32_t task) {
  const Plan& plan = job.site.plan;
  const TaskList& list = job.list;
  const int32_t mine = (static_cast<int32_t>(threadIdx.x) % kWarpLanes) >> lane.lanes_log2;
  GroupAt at;
  if (task < list.full_tasks) {
    at.slot = task * list.groups_per_task + mine;
    at.elems = at.slot < list.full_groups ? plan.codec.group_elems : 0;
    at.rotated = is_rotated(plan.codec, plan.codec.group_elems);
    at.dense = plan.codec.group_elems == kLaneElems << lane.lanes_log2 &&
               (task + 1) * list.groups_per_task <= list.full_groups;
  } else {
    at.slot = list.full_groups;
    at.elems = mine == 0 ? group_elems_at(plan, job.groups.end - 1) : 0;
  }
  return at;
}

// Calls body(GroupAt) for the groups of this warp; all lanes of a warp make the same number of calls.
template <Spread kSpread, typename Body>
__device__ __forceinline__ void for_each_group(const Job& job, const Lane<kSpread>& lane, Body body) {
  const int32_t warps = static_cast<int32_t>(gridDim.x) * kWarpsPerBlock;
#pragma unroll 1
  for (int32_t task = static_cast<int32_t>(thread_index() / kWarpLanes); task < job.list.tasks; task += warps) {
    body(group_of_task(job, lane, task));
  }
}

// Bytes of absent groups and of the padding, so that a tile never carries what memory happened to hold. All offsets are
// even.
__device__ __forceinline__ void clear_bytes(std::byte* tile, int64_t begin, int64_t end) {
#pragma unroll 1
  for (int64_t at = begin + 2 * thread_index(); at < end; at += 2 * thread_count())
    *reinterpret_cast<uint16_t*>(tile + at) = 0;
}

__device__ __forceinline__ void clear_unused(const Job& job, std::byte* tile) {
  const Codec& codec = job.site.plan.codec;
  const int64_t used = job.groups.end - job.groups.begin;
  const int64_t params = params_offset(codec, job.tile_groups);
  clear_bytes(tile, used * code_bytes(codec), params);
  clear_bytes(tile, params + used * param_bytes(codec), tile_bytes(codec, job.tile_groups));
}

// ---- stages -------------------------------------------------------------------------------------------------------

template <DType kDType, int kBits, StateKind kState>
__global__ void __launch_bounds__(kThreads, push_blocks(kState))
    push_kernel(const __grid_constant__ Job job, std::byte* tile) {
  const CallState agreed = *job.agreed;
  if (agreed.fault != 0) return;
  const auto lane = make_lane<Spread::kRuns>(job.site, job.state_layout, job.groups.begin, agreed.rescale_log2);
  const TileView<std::byte> view = view_tile(job.site.plan.codec, job.tile_groups, tile);
  clear_unused(job, tile);
  for_each_group(job, lane, [&](const GroupAt& at) {
    float x[kLaneElems];
    Correction<kState> correction;
    const Extremes extremes = load_measured_contribution<kDType>(lane, at, x, correction);
    const Encoded<kBits> encoded = encode_group<kBits>(lane, at, x, extremes);
    store_encoded(lane, at, encoded, view);
    update_after_push(lane, at, x, correction, encoded);
  });
}

// What the other ranks pushed of this rank's segment, one rank's copy at a time.
template <int kBits>
struct Copies {
  const Plan& plan;
  int64_t tile_groups;
  PeerTiles tiles;

  __device__ __forceinline__ int32_t after(int32_t rank) const { return rank + 1 == plan.rank ? rank + 2 : rank + 1; }
  template <Spread kSpread>
  __device__ __forceinline__ Encoded<kBits> load(const Lane<kSpread>& lane, const GroupAt& at, int32_t rank) const {
    return load_encoded<kBits>(lane, at, view_tile(plan.codec, tile_groups, tiles.base + rank * tiles.stride_bytes));
  }
};

// sum += the copies of ranks begin, begin + 1, ... end - 1 but this one's, in that order; `arriving` is the first.
template <int kBits, Spread kSpread>
__device__ __forceinline__ void add_copies(const Copies<kBits>& copies, const Lane<kSpread>& lane, const GroupAt& at,
                                           Encoded<kBits>& arriving, int32_t begin, int32_t end,
                                           float (&sum)[kLaneElems]) {
#pragma unroll 1
  for (int32_t rank = begin; rank < end;) {
    const Encoded<kBits> copy = arriving;
    rank = copies.after(rank);
    if (rank < lane.site.plan.world_size) arriving = copies.load(lane, at, rank);
    for_each_decoded(lane, copy, [&](int part, const float(&term)[kChunkElems]) {
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) sum[kChunkElems * part + i] = sum[kChunkElems * part + i] + term[i];
    });
  }
}

// This rank's own contribution and what all others sent, added up in rank order. kLate: this rank is none of the first
// two. Those commute, so that elsewhere its own may come first, which needs no registers for a second sum.
template <DType kDType, bool kLate, int kBits, StateKind kState, Spread kSpread>
__device__ __forceinline__ void load_sum(const Copies<kBits>& copies, const Lane<kSpread>& lane, const GroupAt& at,
                                         float (&sum)[kLaneElems], Correction<kState>& correction) {
  const Plan& plan = lane.site.plan;
  Encoded<kBits> arriving = copies.load(lane, at, copies.after(-1));
  if constexpr (!kLate) {
    load_contribution<kDType>(lane, at, sum, correction);
    add_copies(copies, lane, at, arriving, copies.after(-1), plan.world_size, sum);
  } else {
    float below[kLaneElems];
    // -0 + y is y for every y, -0 included: the sum starts from rank 0's value.
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) below[e] = -0.0f;
    add_copies(copies, lane, at, arriving, 0, plan.rank, below);
    load_contribution<kDType>(lane, at, sum, correction);
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) sum[e] = below[e] + sum[e];
    add_copies(copies, lane, at, arriving, plan.rank + 1, plan.world_size, sum);
  }
}

template <DType kDType, int kBits, StateKind kState, bool kLate>
__global__ void __launch_bounds__(kThreads, (reduce_blocks(kState, kLate)))
    reduce_kernel(const __grid_constant__ Job job, const PeerTiles peers, std::byte* tile) {
  const CallState agreed = *job.agreed;
  if (agreed.fault != 0) return;
  const Plan& plan = job.site.plan;
  const auto lane = make_lane<Spread::kRuns>(job.site, job.state_layout, job.groups.begin, agreed.rescale_log2);
  const TileView<std::byte> view = view_tile(plan.codec, job.tile_groups, tile);
  const Copies<kBits> copies{plan, job.tile_groups, peers};
  clear_unused(job, tile);
  for_each_group(job, lane, [&](const GroupAt& at) {
    float sum[kLaneElems];
    Correction<kState> correction;
    load_sum<kDType, kLate>(copies, lane, at, sum, correction);
    const Extremes extremes = group_extremes(lane, at, sum);
    const Encoded<kBits> encoded = encode_group<kBits>(lane, at, sum, extremes);
    store_encoded(lane, at, encoded, view);
    update_after_reduce<kDType>(lane, at, sum, correction, encoded);
  });
}

template <DType kDType>
__device__ __forceinline__ void store_nan(void* tensor, int64_t elem) {
  if constexpr (kDType == DType::kFloat32) {
    static_cast<uint32_t*>(tensor)[elem] = kNanBits32;
  } else {
    static_cast<uint16_t*>(tensor)[elem] = kDType == DType::kBFloat16 ? kNanBitsBFloat16 : kNanBitsFloat16;
  }
}

template <DType kDType>
__device__ void fill_nan(const Job& job) {
  const Plan& plan = job.site.plan;
  const int64_t end = min_i64(plan.numel, job.groups.end * plan.codec.group_elems);
#pragma unroll 1
  for (int64_t i = job.groups.begin * plan.codec.group_elems + thread_index(); i < end; i += thread_count()) {
    store_nan<kDType>(job.site.tensor, i);
  }
}

// What everyone decodes, delivered.
template <DType kDType, int kBits, Spread kSpread>
__device__ __forceinline__ void deliver(const Lane<kSpread>& lane, const GroupAt& at, const Encoded<kBits>& encoded) {
  float decoded[kLaneElems];
  decode_group(lane, encoded, decoded);
  rotate_exit(lane, at, decoded);
  store_elements<kDType>(lane, at, decoded, may_decode_to_nan(lane, encoded.params));
}

template <DType kDType, int kBits, StateKind kState>
__global__ void __launch_bounds__(kThreads, tail_blocks(kState))
    tail_kernel(const __grid_constant__ Job job, const std::byte* tile) {
  const CallState agreed = *job.agreed;
  if (agreed.fault != 0) return fill_nan<kDType>(job);
  const auto lane = make_lane<Spread::kChunks>(job.site, job.state_layout, job.groups.begin, agreed.rescale_log2);
  const TileView<const std::byte> view = view_tile(job.site.plan.codec, job.tile_groups, tile);
  for_each_group(job, lane, [&](const GroupAt& at) {
    const Encoded<kBits> encoded = load_encoded<kBits>(lane, at, view);
    update_from_result<kDType, kState>(lane, at, encoded);
    deliver<kDType>(lane, at, encoded);
  });
}

}  // namespace echo::cuda
