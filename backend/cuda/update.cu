#include "update.h"

#include "../core/tile.h"
#include "host.h"
#include "peer_tile.cuh"
#include "update_kernel.cuh"

namespace echo::cuda {
namespace {

struct UpdateKernel {
  void (*run)(UpdateJob) = nullptr;
  int shared_bytes = 0;
};

template <DType kDType, StateKind kState>
UpdateKernel with_averages(bool two) {
  if (two) return {update_kernel<kDType, kState, 2>, UpdateRing<kState, 2>::kBlockBytes};
  return {update_kernel<kDType, kState, 1>, UpdateRing<kState, 1>::kBlockBytes};
}

UpdateKernel kernel_for(DType dtype, StateKind state, bool two) {
  const bool brain = dtype == DType::kBFloat16;
  if (state == StateKind::kInt8) {
    return brain ? with_averages<DType::kBFloat16, StateKind::kInt8>(two)
                 : with_averages<DType::kFloat16, StateKind::kInt8>(two);
  }
  return brain ? with_averages<DType::kBFloat16, StateKind::kWide>(two)
               : with_averages<DType::kFloat16, StateKind::kWide>(two);
}

// Blocks that the current device holds at once: each then has its share of the tasks.
int64_t resident_blocks(const UpdateKernel& kernel) {
  constexpr int kReservedBytes = 1024;  // by the system, per block
  int device = 0;
  int multiprocessors = 0;
  int shared_bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
        "cudaDeviceGetAttribute");
  return multiprocessors * min_i64(kUpdateBlocks, shared_bytes / (kernel.shared_bytes + kReservedBytes));
}

}  // namespace

bool can_keep(const Plan& plan, bool rescale) {
  constexpr int64_t kMostElems = int64_t{1} << 33;  // start_code_copies has 32 bits for the place of a task's codes
  return plan.feedback.enabled && plan.feedback.residual == Residual::kGroup && plan.numel <= kMostElems &&
         kind_of(plan, rescale) != Kind::kAny;
}

void launch_update(const Site& site, std::byte* kept, const GroupState* group, cudaStream_t stream) {
  const Plan& plan = site.plan;
  const auto side = groups_per_task(plan.codec);
  const auto full = static_cast<int32_t>(plan.numel / plan.codec.group_elems);
  UpdateJob job{.site = site,
                .state_layout = make_state_layout(plan),
                .codes = {kept + kept_codes_offset(plan), kept + kept_params_offset(plan)},
                .full = full,
                .dense = full / side,
                .tasks = static_cast<int32_t>(ceil_div(full, side)) + (full < group_count(plan) ? 1 : 0),
                .group = group};
  job.site.tensor = kept;
  const UpdateKernel kernel = kernel_for(plan.dtype, state_kind(plan), plan.feedback.k2 != 0.0f);
  const auto blocks = static_cast<unsigned>(min_i64(resident_blocks(kernel), ceil_div(job.tasks, kUpdateWarps)));
  kernel.run<<<blocks, kUpdateWarps * kWarpLanes, kernel.shared_bytes, stream>>>(job);
  check(cudaGetLastError(), "echo update");
}

cudaError_t load_update_kernels() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const StateKind state : {StateKind::kInt8, StateKind::kWide}) {
      for (const bool two : {false, true}) {
        const UpdateKernel kernel = kernel_for(dtype, state, two);
        cudaFuncAttributes attributes;
        if (const cudaError_t result = cudaFuncGetAttributes(&attributes, kernel.run)) return result;
        if (const cudaError_t result =
                cudaFuncSetAttribute(kernel.run, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes)) {
          return result;
        }
        if (const cudaError_t result = cudaFuncSetAttribute(kernel.run, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                            cudaSharedmemCarveoutMaxShared)) {
          return result;
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace echo::cuda
