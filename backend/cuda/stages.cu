// What opens a call on the device, and the launches of all stages.
#include "stages.h"

#include <cuda_runtime.h>

#include <stdexcept>

#include "../core/reduce.h"
#include "host.h"
#include "stage_kernels.cuh"

namespace echo::cuda {
namespace {

// Of the kernels that only look at elements: enough that an uneven end costs little.
constexpr int kBlocksPerMultiprocessor = 16;

// ---- the call's opening -------------------------------------------------------------------------------------------

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

// One warp. Every rank sees every record, so either all ranks find a disagreement or none does.
__global__ void open_call_kernel(const CallRecord* records, int32_t rank, int32_t world_size, CallState* agreed,
                                 Disagreement* disagreement) {
  const CallRecord mine = records[rank];
  uint32_t largest = 0;
  uint32_t first_foreign = static_cast<uint32_t>(world_size);
  for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < world_size; peer += kWarpLanes) {
    largest = max(largest, records[peer].max_magnitude);
    if (!same_call(mine, records[peer])) first_foreign = min(first_foreign, static_cast<uint32_t>(peer));
  }
  largest = __reduce_max_sync(kAllLanes, largest);
  first_foreign = __reduce_min_sync(kAllLanes, first_foreign);
  if (threadIdx.x != 0) return;
  const bool faulted_before = load_acquire_sys(&disagreement->is_set) != 0;
  const bool disagree = first_foreign < static_cast<uint32_t>(world_size);
  if (disagree && !faulted_before) {
    disagreement->rank = rank;
    disagreement->peer = static_cast<int32_t>(first_foreign);
    disagreement->mine = mine;
    disagreement->theirs = records[first_foreign];
    store_release_sys(&disagreement->is_set, 1);
  }
  *agreed = CallState{rescale_exponent(largest), disagree || faulted_before ? 1u : 0u};
}

// ---- host ---------------------------------------------------------------------------------------------------------

unsigned grid_blocks(int64_t wanted, int per_multiprocessor) {
  int device = 0;
  int multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const int64_t most = static_cast<int64_t>(multiprocessors) * per_multiprocessor;
  return static_cast<unsigned>(wanted < 1 ? 1 : min_i64(wanted, most));
}

// One wave: a block's set-up and its last groups cost once, and the groups go evenly over warps.
unsigned stage_blocks(const Job& job, int resident) {
  return grid_blocks(ceil_div(job.list.tasks, kWarpsPerBlock), resident);
}

cudaStream_t stream_of(const Call& call) { return static_cast<cudaStream_t>(call.stream); }

TaskList list_tasks(const Plan& plan, const GroupRange& groups, int32_t groups_per_task) {
  TaskList list;
  const bool partial = groups.begin < groups.end && group_elems_at(plan, groups.end - 1) < plan.codec.group_elems;
  list.full_groups = static_cast<int32_t>(groups.end - groups.begin) - (partial ? 1 : 0);
  list.tasks = static_cast<int32_t>(ceil_div(list.full_groups, groups_per_task)) + (partial ? 1 : 0);
  return list;
}

// Calls body<kDType, kBits, kState>(job) for a plan and what a stage needs of its state.
template <typename Body>
void with_shape(const Call& call, const GroupRange& groups, int64_t tile_groups, StateKind state, Body body) {
  const Plan& plan = call.site.plan;
  const Job job{.site = call.site,
                .state_layout = make_state_layout(plan),
                .groups = groups,
                .tile_groups = tile_groups,
                .agreed = call.agreed,
                .list = list_tasks(plan, groups, groups_per_task(plan.codec))};
  with_dtype(plan.dtype, [&]<DType kDType>() {
    const auto with_state = [&]<int kBits>() {
      switch (state) {
        case StateKind::kNone:
          return body.template operator()<kDType, kBits, StateKind::kNone>(job);
        case StateKind::kInt8:
          return body.template operator()<kDType, kBits, StateKind::kInt8>(job);
        case StateKind::kWide:
          return body.template operator()<kDType, kBits, StateKind::kWide>(job);
      }
    };
    if (plan.codec.bits == 8) return with_state.template operator()<8>();
    with_state.template operator()<4>();
  });
}

}  // namespace

Disagreement* create_disagreement() { return new_pinned<Disagreement>(); }

bool read_disagreement(const Disagreement* disagreement, Disagreement* out) {
  if (__atomic_load_n(&disagreement->is_set, __ATOMIC_ACQUIRE) == 0) return false;
  *out = *disagreement;
  return true;
}

std::string describe_disagreement(const Disagreement* disagreement) {
  Disagreement seen;
  if (!read_disagreement(disagreement, &seen)) return {};
  return describe_mismatch(seen.mine, seen.rank, seen.theirs, seen.peer);
}

void write_record(const Call& call, const CallRecord& record, bool rescale, CallRecord* out) {
  write_record_kernel<<<1, 1, 0, stream_of(call)>>>(record, out);
  check(cudaGetLastError(), "echo write_record");
  if (!rescale) return;
  const Plan& plan = call.site.plan;
  const unsigned blocks = grid_blocks(ceil_div(plan.numel, kThreads * kChunkElems), kBlocksPerMultiprocessor);
  with_dtype(plan.dtype, [&]<DType kDType>() {
    max_magnitude_kernel<kDType>
        <<<blocks, kThreads, 0, stream_of(call)>>>(call.site.tensor, plan.numel, &out->max_magnitude);
  });
  check(cudaGetLastError(), "echo max_magnitude");
}

std::string missing_code() {
  cudaFuncAttributes attributes;
  const cudaError_t result = cudaFuncGetAttributes(&attributes, write_record_kernel);
  switch (result) {
    case cudaSuccess:
      return {};
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
      cudaGetLastError();
      return cudaGetErrorString(result);
    default:
      fail(result, "loading the kernels of echo");
  }
}

void load_opening_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, write_record_kernel), "loading the kernels of echo");
  check(cudaFuncGetAttributes(&attributes, max_magnitude_kernel<DType::kFloat32>), "loading the kernels of echo");
  check(cudaFuncGetAttributes(&attributes, max_magnitude_kernel<DType::kBFloat16>), "loading the kernels of echo");
  check(cudaFuncGetAttributes(&attributes, max_magnitude_kernel<DType::kFloat16>), "loading the kernels of echo");
}

void open_call(const Call& call, const CallRecord* records, CallState* agreed, Disagreement* disagreement) {
  const Plan& plan = call.site.plan;
  open_call_kernel<<<1, kWarpLanes, 0, stream_of(call)>>>(records, plan.rank, plan.world_size, agreed, disagreement);
  check(cudaGetLastError(), "echo open_call");
}

void push(const Call& call, GroupRange groups, int64_t tile_groups, std::byte* tile) {
  with_shape(call, groups, tile_groups, state_kind(call.site.plan),
             [&]<DType kDType, int kBits, StateKind kState>(const Job& job) {
               push_kernel<kDType, kBits, kState>
                   <<<stage_blocks(job, push_blocks(kState)), kThreads, 0, stream_of(call)>>>(job, tile);
             });
  check(cudaGetLastError(), "echo push");
}

void reduce(const Call& call, GroupRange groups, int64_t tile_groups, PeerTiles peers, std::byte* tile) {
  if (call.site.plan.world_size < 2) throw std::invalid_argument("echo reduce: a rank alone has nothing to reduce");
  with_shape(call, groups, tile_groups, state_kind(call.site.plan),
             [&]<DType kDType, int kBits, StateKind kState>(const Job& job) {
               auto* kernel = call.site.plan.rank < 2 ? reduce_kernel<kDType, kBits, kState, false>
                                                      : reduce_kernel<kDType, kBits, kState, true>;
               const int resident = reduce_blocks(kState, call.site.plan.rank >= 2);
               kernel<<<stage_blocks(job, resident), kThreads, 0, stream_of(call)>>>(job, peers, tile);
             });
  check(cudaGetLastError(), "echo reduce");
}

void tail(const Call& call, GroupRange groups, int64_t tile_groups, const std::byte* tile) {
  if (groups.begin >= groups.end) return;
  const Plan& plan = call.site.plan;
  const StateKind state = plan.feedback.residual == Residual::kGroup ? state_kind(plan) : StateKind::kNone;
  with_shape(call, groups, tile_groups, state, [&]<DType kDType, int kBits, StateKind kState>(const Job& job) {
    tail_kernel<kDType, kBits, kState>
        <<<stage_blocks(job, tail_blocks(kState)), kThreads, 0, stream_of(call)>>>(job, tile);
  });
  check(cudaGetLastError(), "echo tail");
}

}  // namespace echo::cuda
