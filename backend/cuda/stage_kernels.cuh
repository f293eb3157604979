// The kernels of push, reduce and tail when they run apart, as between the exchanges of the wire composition.
//
// One warp takes the groups of one task after another; everything between a group's loads and its stores stays in
// registers. Kernels are made for each element type, for 16 or 32 elements per lane, and with and without the
// compensator, which costs registers; whatever else a plan says is a branch that all lanes take alike.
#pragma once

#include "residual_device.cuh"
#include "stages.h"

namespace echo::cuda {

constexpr int kThreads = 128;
constexpr int kWarpsPerBlock = kThreads / kWarpLanes;

// Blocks of one multiprocessor that a kernel's registers must leave room for: as many as go without spills on sm_80 and
// sm_90 (nvcc 13.0), for 16 elements per lane without and with the compensator, and for 32.
template <int kElems, bool kFeedback>
constexpr int resident_blocks(int plain, int compensated, int wide) {
  return kElems == 32 ? wide : (kFeedback ? compensated : plain);
}

__device__ __forceinline__ int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * kThreads; }

// Up to 512 elements a group leaves 16 per lane, which keeps shuffles and the parameters' divisions few per element.
constexpr int32_t kMostGroupElemsOf16 = 16 * kWarpLanes;

inline int32_t elems_per_lane(const Codec& codec) { return codec.group_elems <= kMostGroupElemsOf16 ? 16 : 32; }

// Groups that the lanes of a warp hold side by side.
inline int32_t groups_per_task(const Codec& codec, int32_t elems_per_lane) {
  int32_t lanes = 1;
  while (elems_per_lane * lanes < codec.group_elems) lanes *= 2;
  return kWarpLanes / lanes;
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

template <int kElems>
__device__ __forceinline__ GroupAt group_of_task(const Job& job, const Lane& lane, int32_t task) {
  const Plan& plan = job.site.plan;
  const TaskList& list = job.list;
  const int32_t mine = (static_cast<int32_t>(threadIdx.x) % kWarpLanes) >> lane.lanes_log2;
  GroupAt at;
  if (task < list.full_tasks) {
    at.slot = task * list.groups_per_task + mine;
    at.elems = at.slot < list.full_groups ? plan.codec.group_elems : 0;
    at.rotated = is_rotated(plan.codec, plan.codec.group_elems);
    at.dense =
        plan.codec.group_elems == kElems << lane.lanes_log2 && (task + 1) * list.groups_per_task <= list.full_groups;
  } else {
    at.slot = list.full_groups;
    at.elems = mine == 0 ? group_elems_at(plan, job.groups.end - 1) : 0;
  }
  return at;
}

// Calls body(GroupAt) for the groups of this warp; all lanes of a warp make the same number of calls.
template <int kElems, typename Body>
__device__ __forceinline__ void for_each_group(const Job& job, const Lane& lane, Body body) {
  const int32_t warps = static_cast<int32_t>(gridDim.x) * kWarpsPerBlock;
#pragma unroll 1
  for (int32_t task = static_cast<int32_t>(thread_index() / kWarpLanes); task < job.list.tasks; task += warps) {
    body(group_of_task<kElems>(job, lane, task));
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

template <DType kDType, int kElems, bool kFeedback>
__global__ void __launch_bounds__(kThreads, (resident_blocks<kElems, kFeedback>(8, 5, 3)))
    push_kernel(const __grid_constant__ Job job, std::byte* tile) {
  const CallState agreed = *job.agreed;
  if (agreed.fault != 0) return;
  const Lane lane = make_lane<kElems>(job.site, job.state_layout, job.groups.begin, agreed.rescale_log2);
  const TileView<std::byte> view = view_tile(job.site.plan.codec, job.tile_groups, tile);
  clear_unused(job, tile);
  for_each_group<kElems>(job, lane, [&](const GroupAt& at) {
    float x[kElems];
    float c[kElems];
    float decoded[kElems];
    load_contribution<kDType, kFeedback>(lane, at, x, c);
    store_encoded(lane, at, encode_group(lane, at, x, decoded), view);
    update_after_push<kFeedback>(lane, at, x, c, decoded);
  });
}

// What the other ranks pushed of this rank's segment, one rank's copy at a time.
template <int kElems>
struct Copies {
  const Plan& plan;
  int64_t tile_groups;
  PeerTiles tiles;

  __device__ __forceinline__ int32_t after(int32_t rank) const { return rank + 1 == plan.rank ? rank + 2 : rank + 1; }
  __device__ __forceinline__ Encoded<kElems> load(const Lane& lane, const GroupAt& at, int32_t rank) const {
    return load_encoded<kElems>(lane, at, view_tile(plan.codec, tile_groups, tiles.base + rank * tiles.stride_bytes));
  }
};

// Adds up in rank order: this rank's own x and the copies of all others, of which `arriving` is the first.
template <int kElems>
__device__ __forceinline__ void sum_ranks(const Copies<kElems>& copies, const Lane& lane, const GroupAt& at,
                                          Encoded<kElems> arriving, const float (&x)[kElems], float (&sum)[kElems]) {
  const Plan& plan = lane.site.plan;
  // -0 + y is y for every y, -0 included: the sum starts from rank 0's value.
#pragma unroll
  for (int e = 0; e < kElems; ++e) sum[e] = -0.0f;
#pragma unroll 1
  for (int32_t rank = 0; rank < plan.world_size; ++rank) {
    if (rank == plan.rank) {
#pragma unroll
      for (int e = 0; e < kElems; ++e) sum[e] = sum[e] + x[e];
      continue;
    }
    float term[kElems];
    decode_group(lane, arriving, term);
    if (copies.after(rank) < plan.world_size) arriving = copies.load(lane, at, copies.after(rank));
#pragma unroll
    for (int e = 0; e < kElems; ++e) sum[e] = sum[e] + term[e];
  }
}

template <DType kDType, int kElems, bool kFeedback>
__global__ void __launch_bounds__(kThreads, (resident_blocks<kElems, kFeedback>(5, 4, 2)))
    reduce_kernel(const __grid_constant__ Job job, const PeerTiles peers, std::byte* tile) {
  const CallState agreed = *job.agreed;
  if (agreed.fault != 0) return;
  const Plan& plan = job.site.plan;
  const Lane lane = make_lane<kElems>(job.site, job.state_layout, job.groups.begin, agreed.rescale_log2);
  const TileView<std::byte> view = view_tile(plan.codec, job.tile_groups, tile);
  const Copies<kElems> copies{plan, job.tile_groups, peers};
  clear_unused(job, tile);
  for_each_group<kElems>(job, lane, [&](const GroupAt& at) {
    float x[kElems];
    float c[kElems];
    float sum[kElems];
    float decoded[kElems];
    const Encoded<kElems> first = copies.load(lane, at, copies.after(-1));
    load_contribution<kDType, kFeedback>(lane, at, x, c);
    sum_ranks(copies, lane, at, first, x, sum);
    store_encoded(lane, at, encode_group(lane, at, sum, decoded), view);
    update_after_reduce<kDType, kFeedback>(lane, at, sum, c, decoded);
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

template <DType kDType, int kElems, bool kFeedback>
__global__ void __launch_bounds__(kThreads, (resident_blocks<kElems, kFeedback>(8, 4, 2)))
    tail_kernel(const __grid_constant__ Job job, const std::byte* tile) {
  const CallState agreed = *job.agreed;
  if (agreed.fault != 0) return fill_nan<kDType>(job);
  const Plan& plan = job.site.plan;
  const Lane lane = make_lane<kElems>(job.site, job.state_layout, job.groups.begin, agreed.rescale_log2);
  const TileView<const std::byte> view = view_tile(plan.codec, job.tile_groups, tile);
  for_each_group<kElems>(job, lane, [&](const GroupAt& at) {
    float decoded[kElems];
    decode_group(lane, load_encoded<kElems>(lane, at, view), decoded);
    update_from_result<kDType, kFeedback>(lane, at, decoded);
    rotate_exit(lane, at, decoded);
    store_elements<kDType>(lane, at, decoded);
  });
}

}  // namespace echo::cuda
