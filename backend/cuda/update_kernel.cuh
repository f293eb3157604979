// The update of residual "group" apart from the call that it belongs to: from what the call kept (core/tile.h), never
// from the tensor, so that it may run beside whatever the caller does next. Warps take tasks as in quick_device.cuh,
// one after another, with a ring of entries ahead; what is left to the exact way, update_task does.
#pragma once

#include "peer_wait.cuh"
#include "quick_device.cuh"

namespace echo::cuda {

constexpr int kUpdateWarps = 4;

// Blocks of a multiprocessor, for which registers are left: as many as go without spills on sm_80 and sm_90 (nvcc
// 13.0). Where shared memory is scarcer than on sm_90 there are fewer.
constexpr int kUpdateBlocks = 4;
constexpr int kUpdateBlockBytes = 56 << 10;  // of shared memory, for so many on sm_90

struct UpdateJob {
  Site site;  // tensor: the contribution that was kept
  StateLayout state_layout;
  TileView<const std::byte> codes;  // of the sum, one tile of all groups
  int32_t full;                     // groups that are whole
  int32_t dense;                    // tasks in which no lane lacks a group
  int32_t tasks;                    // all of them, with the one of the tensor's partial group
  const GroupState* group;
};

// Entries of a warp's ring.
template <StateKind kState, int kAverages>
struct UpdateRing {
  using Layout = EntryLayout<4, kState, kAverages, true>;
  static constexpr int kEntries = 3 * kUpdateWarps * Layout::kBytes <= kUpdateBlockBytes ? 3 : 2;
  static constexpr int kRingBytes = kEntries * Layout::kBytes;
  static constexpr int kBlockBytes = kUpdateWarps * kRingBytes;
};

template <DType kDType, StateKind kState>
__device__ __noinline__ void update_task(const UpdateJob& job, int32_t task) {
  const auto lane = make_lane<Spread::kChunks>(job.site, job.state_layout, 0, 0);
  const GroupAt at = group_of_task(lane, task, job.full, group_count(job.site.plan));
  update_from_result<kDType, kState>(lane, at, load_encoded<4>(lane, at, job.codes));
}

template <DType kDType, StateKind kState, int kAverages>
struct UpdateTasks {
  using Ring = UpdateRing<kState, kAverages>;
  using Layout = typename Ring::Layout;

  const UpdateJob& job;
  Lane<Spread::kRuns> lane;
  GroupAt at;
  SharedAddress ring;
  int32_t stride;  // between the tasks of a warp

  __device__ __forceinline__ explicit UpdateTasks(const UpdateJob& update)
      : job(update), lane(make_lane<Spread::kRuns>(update.site, update.state_layout, 0, 0)) {
    at = GroupAt{.slot = 0, .elems = 0, .rotated = lane.site.plan.codec.rotation_log2 > 0, .dense = true};
    ring = dynamic_shared() + threadIdx.x / kWarpLanes * Ring::kRingBytes;
    stride = static_cast<int32_t>(gridDim.x) * kUpdateWarps;
  }

  __device__ __forceinline__ static int64_t first_of(int32_t task) { return int64_t{task} * kTaskElems; }

  __device__ __forceinline__ void fetch(int32_t task, SharedAddress place) const {
    if (task < job.dense) {
      const Entry<Layout> entry{place};
      start_stored_copies<kAverages>(lane, entry, first_of(task));
      start_code_copies<4>(lane, entry, job.codes, task);
    }
    close_copies();
  }

  // True if the averages of a task's groups were stored.
  __device__ __forceinline__ bool update(int32_t task, const Entry<Layout>& entry) const {
    bool sure = true;
    const auto encoded = read_encoded<4>(lane, entry);
    const QuickDecoder decoder = quick_decoder<4>(encoded.params, lane.site.plan.codec, sure);
    float u[kLaneElems];
    quick_group_residual<kDType>(lane, at, entry, first_of(task), decoder, encoded, u, sure);
    const auto averages = quick_update<kAverages>(lane, entry, first_of(task), u, sure);
    if (!__all_sync(kAllLanes, sure)) return false;
    __syncwarp();
    store_averages(lane, entry, first_of(task), averages);
    return true;
  }

  // From `task` on; returns the first task that is not dense or that `update` leaves.
  __device__ __forceinline__ int32_t run_quick(int32_t task) const {
    const SharedAddress last = ring + (Ring::kEntries - 1) * Layout::kBytes;
    int32_t coming = task;
#pragma unroll 1
    for (SharedAddress place = ring; place != last; place += Layout::kBytes, coming += stride) fetch(coming, place);
    SharedAddress place = ring;
    SharedAddress free_place = last;
#pragma unroll 1
    for (; task < job.dense; task += stride, coming += stride) {
      fetch(coming, free_place);
      wait_for_copies<Ring::kEntries - 1>();
      __syncwarp();
      if (!update(task, Entry<Layout>{place})) break;
      __syncwarp();  // before others load into what this lane reads
      free_place = place;
      place = place == last ? ring : place + Layout::kBytes;
    }
    wait_for_copies<0>();
    __syncwarp();
    return task;
  }
};

// A call that failed has not kept everything: its group's averages stay as they are.
template <DType kDType, StateKind kState, int kAverages>
__global__ void __launch_bounds__(kUpdateWarps* kWarpLanes, kUpdateBlocks)
    update_kernel(const __grid_constant__ UpdateJob job) {
  if (job.group->fault_taken != 0) return;
  const UpdateTasks<kDType, kState, kAverages> tasks(job);
  auto task = static_cast<int32_t>(blockIdx.x) * kUpdateWarps + static_cast<int32_t>(threadIdx.x) / kWarpLanes;
#pragma unroll 1
  while (task < job.tasks) {
    task = tasks.run_quick(task);
    if (task >= job.tasks) return;
    update_task<kDType, kState>(job, task);
    task += tasks.stride;
  }
}

}  // namespace echo::cuda
