// The kernels of push, reduce and tail when they run apart, as between the exchanges of the wire composition.
//
// One warp takes the groups of one task after another; everything between a group's loads and its stores stays in
// registers. Kernels are made for each element type, each width of codes, and with and without the compensator, which
// costs registers; whatever else a plan says is a branch that all lanes take alike.
#pragma once

#include "stage_device.cuh"

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

// ---- tasks --------------------------------------------------------------------------------------------------------

// See group_of_task.
struct TaskList {
  int32_t full_groups;
  int32_t tasks;
};

struct Job {
  Site site;
  StateLayout state_layout;
  GroupRange groups;
  int64_t tile_groups;
  const CallState* agreed;
  TaskList list;
};

// Calls body(GroupAt) for the groups of this warp; all lanes of a warp make the same number of calls.
template <Spread kSpread, typename Body>
__device__ __forceinline__ void for_each_group(const Job& job, const Lane<kSpread>& lane, Body body) {
  const int32_t warps = static_cast<int32_t>(gridDim.x) * kWarpsPerBlock;
#pragma unroll 1
  for (int32_t task = static_cast<int32_t>(thread_index() / kWarpLanes); task < job.list.tasks; task += warps) {
    body(group_of_task(lane, task, job.list.full_groups, job.groups.end));
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
    auto stored = load_stored<kDType, kState>(lane, at);
    push_group<kBits>(lane, at, stored, view);
  });
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
    auto addends = load_addends<kDType, kState>(copies, lane, at);
    reduce_group<kLate>(copies, lane, at, addends,
                        [&](const Encoded<kBits>& encoded) { store_encoded(lane, at, encoded, view); });
  });
}

template <DType kDType, int kBits, StateKind kState>
__global__ void __launch_bounds__(kThreads, tail_blocks(kState))
    tail_kernel(const __grid_constant__ Job job, const std::byte* tile) {
  const CallState agreed = *job.agreed;
  if (agreed.fault != 0) return fill_with_nan<kDType>(job.site, job.groups, thread_index(), thread_count());
  const auto lane = make_lane<Spread::kChunks>(job.site, job.state_layout, job.groups.begin, agreed.rescale_log2);
  const TileView<const std::byte> view = view_tile(job.site.plan.codec, job.tile_groups, tile);
  for_each_group(job, lane,
                 [&](const GroupAt& at) { tail_group<kDType, kState>(lane, at, load_encoded<kBits>(lane, at, view)); });
}

}  // namespace echo::cuda
