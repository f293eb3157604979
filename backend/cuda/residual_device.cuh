// What each stage gives back to the compensator [paper 5]: the residual of a group, right after it was encoded or
// decoded. Without kFeedback the plan has no compensator and nothing happens.
#pragma once

#include "state_device.cuh"

namespace echo::cuda {

static __device__ __forceinline__ bool updates_from(const Lane& lane, Residual residual) {
  const Feedback& fb = lane.site.plan.feedback;
  return fb.enabled && fb.residual == residual;
}

// `x` and `c` as load_contribution gave them, `decoded` what a receiver sees of x. Overwrites x and c.
template <bool kFeedback, int kElems>
static __device__ __forceinline__ void update_after_push(const Lane& lane, const GroupAt& at, float (&x)[kElems],
                                                         float (&c)[kElems], const float (&decoded)[kElems]) {
  if constexpr (kFeedback) {
    if (!updates_from(lane, Residual::kLocal)) return;
#pragma unroll
    for (int e = 0; e < kElems; ++e) x[e] = x[e] - decoded[e];
    update_state(lane, at, x, c);
  }
}

// `sum` was encoded, `decoded` is what everyone sees of it. Overwrites sum and c.
template <DType kDType, bool kFeedback, int kElems>
static __device__ __forceinline__ void update_after_reduce(const Lane& lane, const GroupAt& at, float (&sum)[kElems],
                                                           float (&c)[kElems], const float (&decoded)[kElems]) {
  if constexpr (kFeedback) {
    if (!updates_from(lane, Residual::kLocal)) return;
    float reference[kElems];
#pragma unroll
    for (int e = 0; e < kElems; ++e) reference[e] = decoded[e];
    to_residual_reference<kDType>(lane, reference);
#pragma unroll
    for (int e = 0; e < kElems; ++e) sum[e] = sum[e] - reference[e];
    update_state(lane, at, sum, c);
  }
}

// Pre: the tensor still holds this rank's contribution.
template <DType kDType, bool kFeedback, int kElems>
static __device__ __forceinline__ void update_from_result(const Lane& lane, const GroupAt& at,
                                                          const float (&decoded)[kElems]) {
  if constexpr (kFeedback) {
    if (!updates_from(lane, Residual::kGroup)) return;
    const float inverse_world = 1.0f / static_cast<float>(lane.site.plan.world_size);
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
}

}  // namespace echo::cuda
