// What each stage gives back to the compensator [paper 5]: the residual of a group, right after it was encoded or
// decoded. It is made from the codes, chunk by chunk, so that decoded values need no registers of their own.
#pragma once

#include "state_device.cuh"

namespace echo::cuda {

template <Spread kSpread>
static __device__ __forceinline__ bool updates_from(const Lane<kSpread>& lane, Residual residual) {
  const Feedback& fb = lane.site.plan.feedback;
  return fb.enabled && fb.residual == residual;
}

// `x` is the contribution, `encoded` what receivers see of x. Overwrites x.
template <DType kDType, int kBits, StateKind kState, Spread kSpread>
static __device__ __forceinline__ void update_after_push(const Lane<kSpread>& lane, const GroupAt& at,
                                                         float (&x)[kLaneElems], const Stored<kDType, kState>& stored,
                                                         const Encoded<kBits>& encoded) {
  if constexpr (kState != StateKind::kNone) {
    if (!updates_from(lane, Residual::kLocal)) return;
    for_each_decoded(lane, encoded, [&](int part, const float(&decoded)[kChunkElems]) {
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) x[kChunkElems * part + i] = x[kChunkElems * part + i] - decoded[i];
    });
    update_state(lane, at, x, stored.correction);
  }
}

// `encoded` is what everyone sees of `sum`. Overwrites sum.
template <DType kDType, int kBits, StateKind kState, Spread kSpread>
static __device__ __forceinline__ void update_after_reduce(const Lane<kSpread>& lane, const GroupAt& at,
                                                           float (&sum)[kLaneElems],
                                                           const Stored<kDType, kState>& stored,
                                                           const Encoded<kBits>& encoded) {
  if constexpr (kState != StateKind::kNone) {
    if (!updates_from(lane, Residual::kLocal)) return;
    for_each_decoded(lane, encoded, [&](int part, float(&reference)[kChunkElems]) {
      to_residual_reference<kDType>(lane, reference);
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) sum[kChunkElems * part + i] = sum[kChunkElems * part + i] - reference[i];
    });
    update_state(lane, at, sum, stored.correction);
  }
}

// Pre: the tensor still holds this rank's contribution.
template <DType kDType, StateKind kState, int kBits, Spread kSpread>
static __device__ __forceinline__ void update_from_result(const Lane<kSpread>& lane, const GroupAt& at,
                                                          const Encoded<kBits>& encoded) {
  if constexpr (kState != StateKind::kNone) {
    if (!updates_from(lane, Residual::kGroup)) return;
    const float inverse_world = 1.0f / static_cast<float>(lane.site.plan.world_size);
    float x[kLaneElems];
    auto stored = load_stored<kDType, kState>(lane, at);
    contribution<false>(lane, at, stored, x);
    for_each_decoded(lane, encoded, [&](int part, float(&reference)[kChunkElems]) {
      to_residual_reference<kDType>(lane, reference);
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) {
        x[kChunkElems * part + i] = x[kChunkElems * part + i] - reference[i] * inverse_world;
      }
    });
    update_state(lane, at, x, stored.correction);
  }
}

}  // namespace echo::cuda
