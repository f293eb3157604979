// The kernels of the stages when they run apart, as between the exchanges of the wire composition, and what launches them.
//
// One warp takes the groups of one task after another; everything between a group's loads and its stores stays in registers. Kernels are made for each
// element type, for 16 or 32 elements per lane, and with and without the compensator, which costs registers; whatever else a plan says is a branch that
// all lanes take alike.
#include "stages.h"

#include <cuda_runtime.h>

#include <mutex>
#include <new>
#include <stdexcept>

#include "state_device.cuh"

namespace echo::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarpsPerBlock = kThreads / kWarpLanes;
// Enough blocks that an uneven end costs little, few enough that a thread's set-up serves several groups.
constexpr int kBlocksPerMultiprocessor = 16;

// Up to 512 elements a group leaves 16 per lane, which keeps shuffles and the parameters' divisions few per element.
constexpr int32_t kMostGroupElemsOf16 = 16 * kWarpLanes;

// Blocks of one multiprocessor that a kernel's registers must leave room for: as many as go without spills.
template <int kElems, bool kFeedback>
constexpr int kPushBlocks = kElems == 32 ? 3 : kFeedback ? 5 : 8;
template <int kElems, bool kFeedback>
constexpr int kReduceBlocks = kElems == 32 ? 2 : kFeedback ? 4 : 5;
template <int kElems, bool kFeedback>
constexpr int kTailBlocks = kElems == 32 ? 2 : kFeedback ? 4 : 8;

__device__ __forceinline__ int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * kThreads; }

// ---- tasks ----------------------------------------------------------------------------------------------------------------------------

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
    at.dense = plan.codec.group_elems == kElems << lane.lanes_log2 && (task + 1) * list.groups_per_task <= list.full_groups;
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

// Bytes of absent groups and of the padding, so that a tile never carries what memory happened to hold. All offsets are even.
__device__ __forceinline__ void clear_bytes(std::byte* tile, int64_t begin, int64_t end) {
#pragma unroll 1
  for (int64_t at = begin + 2 * thread_index(); at < end; at += 2 * thread_count()) *reinterpret_cast<uint16_t*>(tile + at) = 0;
}

__device__ __forceinline__ void clear_unused(const Job& job, std::byte* tile) {
  const Codec& codec = job.site.plan.codec;
  const int64_t used = job.groups.end - job.groups.begin;
  const int64_t params = params_offset(codec, job.tile_groups);
  clear_bytes(tile, used * code_bytes(codec), params);
  clear_bytes(tile, params + used * param_bytes(codec), tile_bytes(codec, job.tile_groups));
}

// ---- stages ---------------------------------------------------------------------------------------------------------------------------

template <DType kDType, int kElems, bool kFeedback>
__global__ void __launch_bounds__(kThreads, kPushBlocks<kElems, kFeedback>)
    push_kernel(const __grid_constant__ Job job, std::byte* tile) {
  const CallState agreed = *job.agreed;
  if (agreed.fault != 0) return;
  [[maybe_unused]] const Feedback& fb = job.site.plan.feedback;
  const Lane lane = make_lane<kElems>(job.site, job.state_layout, job.groups.begin, agreed.rescale_log2);
  const TileView<std::byte> view = view_tile(job.site.plan.codec, job.tile_groups, tile);
  clear_unused(job, tile);
  for_each_group<kElems>(job, lane, [&](const GroupAt& at) {
    float x[kElems];
    float c[kElems];
    float decoded[kElems];
    load_contribution<kDType, kFeedback>(lane, at, x, c);
    quantize_group(lane, at, x, view, decoded);
    if constexpr (kFeedback) {
      if (!fb.enabled || fb.residual != Residual::kLocal) return;
#pragma unroll
      for (int e = 0; e < kElems; ++e) x[e] = x[e] - decoded[e];
      update_state(lane, at, x, c);
    }
  });
}

// What the other ranks pushed of this rank's segment, one rank's copy at a time.
template <int kElems>
struct Copies {
  const Job& job;
  PeerTiles tiles;

  __device__ __forceinline__ int32_t after(int32_t rank) const { return rank + 1 == job.site.plan.rank ? rank + 2 : rank + 1; }
  __device__ __forceinline__ Encoded<kElems> load(const Lane& lane, const GroupAt& at, int32_t rank) const {
    return load_encoded<kElems>(lane, at, view_tile(job.site.plan.codec, job.tile_groups, tiles.base + rank * tiles.stride_bytes));
  }
};

// Adds up in rank order: this rank's own x and the copies of all others, of which `arriving` is the first.
template <int kElems>
__device__ __forceinline__ void sum_ranks(const Copies<kElems>& copies, const Lane& lane, const GroupAt& at, Encoded<kElems> arriving,
                                          const float (&x)[kElems], float (&sum)[kElems]) {
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
__global__ void __launch_bounds__(kThreads, kReduceBlocks<kElems, kFeedback>)
    reduce_kernel(const __grid_constant__ Job job, const PeerTiles peers, std::byte* tile) {
  const CallState agreed = *job.agreed;
  if (agreed.fault != 0) return;
  const Plan& plan = job.site.plan;
  [[maybe_unused]] const Feedback& fb = plan.feedback;
  const Lane lane = make_lane<kElems>(job.site, job.state_layout, job.groups.begin, agreed.rescale_log2);
  const TileView<std::byte> view = view_tile(plan.codec, job.tile_groups, tile);
  const Copies<kElems> copies{job, peers};
  clear_unused(job, tile);
  for_each_group<kElems>(job, lane, [&](const GroupAt& at) {
    float x[kElems];
    float c[kElems];
    float sum[kElems];
    const Encoded<kElems> first = copies.load(lane, at, copies.after(-1));
    load_contribution<kDType, kFeedback>(lane, at, x, c);
    sum_ranks(copies, lane, at, first, x, sum);
    quantize_group(lane, at, sum, view, x);
    if constexpr (kFeedback) {
      if (!fb.enabled || fb.residual != Residual::kLocal) return;
      to_residual_reference<kDType>(lane, x);
#pragma unroll
      for (int e = 0; e < kElems; ++e) sum[e] = sum[e] - x[e];
      update_state(lane, at, sum, c);
    }
  });
}

template <DType kDType>
__device__ void fill_nan(const Job& job) {
  const Plan& plan = job.site.plan;
  const int64_t end = min_i64(plan.numel, job.groups.end * plan.codec.group_elems);
#pragma unroll 1
  for (int64_t i = job.groups.begin * plan.codec.group_elems + thread_index(); i < end; i += thread_count()) {
    if constexpr (kDType == DType::kFloat32) {
      static_cast<uint32_t*>(job.site.tensor)[i] = kNanBits32;
    } else {
      static_cast<uint16_t*>(job.site.tensor)[i] = kDType == DType::kBFloat16 ? kNanBitsBFloat16 : kNanBitsFloat16;
    }
  }
}

template <DType kDType, int kElems, bool kFeedback>
__global__ void __launch_bounds__(kThreads, kTailBlocks<kElems, kFeedback>)
    tail_kernel(const __grid_constant__ Job job, const std::byte* tile) {
  const CallState agreed = *job.agreed;
  if (agreed.fault != 0) return fill_nan<kDType>(job);
  const Plan& plan = job.site.plan;
  [[maybe_unused]] const Feedback& fb = plan.feedback;
  const Lane lane = make_lane<kElems>(job.site, job.state_layout, job.groups.begin, agreed.rescale_log2);
  const TileView<const std::byte> view = view_tile(plan.codec, job.tile_groups, tile);
  const float inverse_world = 1.0f / static_cast<float>(plan.world_size);
  for_each_group<kElems>(job, lane, [&](const GroupAt& at) {
    float decoded[kElems];
    decode_group(lane, load_encoded<kElems>(lane, at, view), decoded);
    if (kFeedback && fb.enabled && fb.residual == Residual::kGroup) {
      float x[kElems];
      float c[kElems];
      load_contribution<kDType, kFeedback>(lane, at, x, c);
      float reference[kElems];
#pragma unroll
      for (int e = 0; e < kElems; ++e) reference[e] = decoded[e];
      to_residual_reference<kDType>(lane, reference);
#pragma unroll
      for (int e = 0; e < kElems; ++e) x[e] = x[e] - reference[e] * inverse_world;
      update_state(lane, at, x, c);
    }
    rotate_exit(lane, at, decoded);
    store_elements<kDType>(lane, at, decoded);
  });
}

// ---- the call's opening ---------------------------------------------------------------------------------------------------------------

__global__ void write_record_kernel(const __grid_constant__ CallRecord record, CallRecord* out) { *out = record; }

// Atomic maxima commute, so the result does not depend on their order.
template <DType kDType>
__global__ void __launch_bounds__(kThreads) max_magnitude_kernel(const void* tensor, int64_t numel, uint32_t* largest) {
  const bool aligned = reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
  uint32_t mine = 0;
  for (int64_t first = kChunkElems * thread_index(); first < numel; first += kChunkElems * thread_count()) {
    const std::byte* from = static_cast<const std::byte*>(tensor) + first * kBytesOf<kDType>;
    float x[kChunkElems];
    const int remaining = static_cast<int>(min_i64(INT32_MAX, numel - first));
    widen_chunk<kDType>(load_chunk<kBytesOf<kDType>>(from, remaining, aligned), x);
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) mine = max(mine, bits_of(x[i]) & kAbsMask32);
  }
  mine = __reduce_max_sync(kAllLanes, mine);
  if (threadIdx.x % kWarpLanes == 0) atomicMax(largest, mine);
}

__device__ bool records_agree(const CallRecord& a, const CallRecord& b) {
  return a.magic == b.magic && a.call_number == b.call_number && a.numel == b.numel && a.plan_hash == b.plan_hash && a.dtype == b.dtype &&
      a.bits == b.bits && a.direction == b.direction && a.first_site == b.first_site;
}

// One warp. Every rank sees every record, so either all ranks find a disagreement or none does.
__global__ void open_call_kernel(const CallRecord* records, int32_t rank, int32_t world_size, CallState* agreed, FaultRecord* fault) {
  const CallRecord mine = records[rank];
  uint32_t largest = 0;
  uint32_t first_foreign = static_cast<uint32_t>(world_size);
  for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < world_size; peer += kWarpLanes) {
    largest = max(largest, records[peer].max_magnitude);
    if (!records_agree(mine, records[peer])) first_foreign = min(first_foreign, static_cast<uint32_t>(peer));
  }
  largest = __reduce_max_sync(kAllLanes, largest);
  first_foreign = __reduce_min_sync(kAllLanes, first_foreign);
  if (threadIdx.x != 0) return;
  const bool faulted_before = load_acquire_sys(&fault->is_set) != 0;
  const bool disagree = first_foreign < static_cast<uint32_t>(world_size);
  if (disagree && !faulted_before) {
    fault->rank = rank;
    fault->peer = static_cast<int32_t>(first_foreign);
    fault->mine = mine;
    fault->theirs = records[first_foreign];
    store_release_sys(&fault->is_set, 1);
  }
  *agreed = CallState{rescale_exponent(largest), disagree || faulted_before ? 1u : 0u};
}

// ---- host -----------------------------------------------------------------------------------------------------------------------------

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

unsigned grid_blocks(int64_t wanted) {
  int device = 0;
  int multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const int64_t most = static_cast<int64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  return static_cast<unsigned>(wanted < 1 ? 1 : min_i64(wanted, most));
}

cudaStream_t stream_of(const Call& call) { return static_cast<cudaStream_t>(call.stream); }

template <typename Body>
void with_dtype(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat32:
      return body.template operator()<DType::kFloat32>();
    case DType::kBFloat16:
      return body.template operator()<DType::kBFloat16>();
    case DType::kFloat16:
      return body.template operator()<DType::kFloat16>();
  }
}

TaskList list_tasks(const Plan& plan, const GroupRange& groups, int32_t groups_per_task) {
  TaskList list;
  const bool partial = groups.begin < groups.end && group_elems_at(plan, groups.end - 1) < plan.codec.group_elems;
  list.groups_per_task = groups_per_task;
  list.full_groups = static_cast<int32_t>(groups.end - groups.begin) - (partial ? 1 : 0);
  list.full_tasks = static_cast<int32_t>(ceil_div(list.full_groups, groups_per_task));
  list.tasks = list.full_tasks + (partial ? 1 : 0);
  return list;
}

// Calls body<kDType, kElems, kFeedback>(blocks, job) with the kernel's shape for this plan.
template <typename Body>
void with_shape(const Call& call, const GroupRange& groups, int64_t tile_groups, bool feedback, Body body) {
  const Plan& plan = call.site.plan;
  const int32_t elems_per_lane = plan.codec.group_elems <= kMostGroupElemsOf16 ? 16 : 32;
  int32_t lanes = 1;
  while (elems_per_lane * lanes < plan.codec.group_elems) lanes *= 2;
  const Job job{.site = call.site,
                .state_layout = make_state_layout(plan),
                .groups = groups,
                .tile_groups = tile_groups,
                .agreed = call.agreed,
                .list = list_tasks(plan, groups, kWarpLanes / lanes)};
  const unsigned blocks = grid_blocks(ceil_div(job.list.tasks, kWarpsPerBlock));
  with_dtype(plan.dtype, [&]<DType kDType>() {
    if (elems_per_lane == 32 && feedback) return body.template operator()<kDType, 32, true>(blocks, job);
    if (elems_per_lane == 32) return body.template operator()<kDType, 32, false>(blocks, job);
    if (feedback) return body.template operator()<kDType, 16, true>(blocks, job);
    return body.template operator()<kDType, 16, false>(blocks, job);
  });
}

// Pinned memory is had in pages, so records are cut from blocks of many. Making one may fall into the capture of another stream of the process.
FaultRecord* new_fault_records(size_t count) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  void* block = nullptr;
  const cudaError_t result = cudaHostAlloc(&block, count * sizeof(FaultRecord), cudaHostAllocPortable | cudaHostAllocMapped);
  cudaThreadExchangeStreamCaptureMode(&mode);
  check(result, "cudaHostAlloc");
  FaultRecord* records = static_cast<FaultRecord*>(block);
  for (size_t i = 0; i < count; ++i) new (records + i) FaultRecord;
  return records;
}

}  // namespace

FaultRecord* create_fault_record() {
  constexpr size_t kRecordsPerBlock = 64;
  static std::mutex mutex;
  static FaultRecord* block = nullptr;
  static size_t used = kRecordsPerBlock;
  const std::lock_guard<std::mutex> lock(mutex);
  if (used == kRecordsPerBlock) {
    block = new_fault_records(kRecordsPerBlock);
    used = 0;
  }
  return block + used++;
}

bool read_fault(const FaultRecord* fault, FaultRecord* out) {
  if (__atomic_load_n(&fault->is_set, __ATOMIC_ACQUIRE) == 0) return false;
  *out = *fault;
  return true;
}

std::string describe_fault(const FaultRecord* fault) {
  FaultRecord seen;
  if (!read_fault(fault, &seen)) return {};
  return describe_mismatch(seen.mine, seen.rank, seen.theirs, seen.peer);
}

void write_record(const Call& call, const CallRecord& record, bool rescale, CallRecord* out) {
  write_record_kernel<<<1, 1, 0, stream_of(call)>>>(record, out);
  check(cudaGetLastError(), "echo write_record");
  if (!rescale) return;
  const Plan& plan = call.site.plan;
  const unsigned blocks = grid_blocks(ceil_div(plan.numel, kThreads * kChunkElems));
  with_dtype(plan.dtype, [&]<DType kDType>() {
    max_magnitude_kernel<kDType><<<blocks, kThreads, 0, stream_of(call)>>>(call.site.tensor, plan.numel, &out->max_magnitude);
  });
  check(cudaGetLastError(), "echo max_magnitude");
}

void open_call(const Call& call, const CallRecord* records, CallState* agreed, FaultRecord* fault) {
  const Plan& plan = call.site.plan;
  open_call_kernel<<<1, kWarpLanes, 0, stream_of(call)>>>(records, plan.rank, plan.world_size, agreed, fault);
  check(cudaGetLastError(), "echo open_call");
}

void push(const Call& call, GroupRange groups, int64_t tile_groups, std::byte* tile) {
  with_shape(call, groups, tile_groups, call.site.plan.feedback.enabled, [&]<DType kDType, int kElems, bool kFeedback>(unsigned blocks, const Job& job) {
    push_kernel<kDType, kElems, kFeedback><<<blocks, kThreads, 0, stream_of(call)>>>(job, tile);
  });
  check(cudaGetLastError(), "echo push");
}

void reduce(const Call& call, GroupRange groups, int64_t tile_groups, PeerTiles peers, std::byte* tile) {
  if (call.site.plan.world_size < 2) throw std::invalid_argument("echo reduce: a rank alone has nothing to reduce");
  with_shape(call, groups, tile_groups, call.site.plan.feedback.enabled, [&]<DType kDType, int kElems, bool kFeedback>(unsigned blocks, const Job& job) {
    reduce_kernel<kDType, kElems, kFeedback><<<blocks, kThreads, 0, stream_of(call)>>>(job, peers, tile);
  });
  check(cudaGetLastError(), "echo reduce");
}

void tail(const Call& call, GroupRange groups, int64_t tile_groups, const std::byte* tile) {
  if (groups.begin >= groups.end) return;
  const Feedback& fb = call.site.plan.feedback;
  with_shape(call, groups, tile_groups, fb.enabled && fb.residual == Residual::kGroup, [&]<DType kDType, int kElems, bool kFeedback>(unsigned blocks, const Job& job) {
    tail_kernel<kDType, kElems, kFeedback><<<blocks, kThreads, 0, stream_of(call)>>>(job, tile);
  });
  check(cudaGetLastError(), "echo tail");
}

}  // namespace echo::cuda
