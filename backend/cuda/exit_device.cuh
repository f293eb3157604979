// The way out of the rotation, from the codes of a group to what is delivered (core/rotation.h): whole numbers, exact
// in whatever holds them, up to the last product.
#pragma once

#include "codec_device.cuh"
#include "rotation_device.cuh"

namespace echo::cuda {

// 2^m * z, where a chunk of this lane begins a run, else 0.
template <Spread kSpread>
static __device__ __forceinline__ float chunk_offset(const Lane<kSpread>& lane, int part, float offset) {
  const int32_t run_elems = 1 << lane.site.plan.codec.rotation_log2;
  return (chunk_of(lane, part) * kChunkElems & (run_elems - 1)) == 0 ? offset : 0.0f;
}

// Calls body(i) for the elements of a chunk that begin runs for certain, its first one not among them.
template <typename Body>
static __device__ __forceinline__ void for_inner_runs(int32_t run_log2, Body body) {
  if (run_log2 >= 3) return;
  body(4);
  if (run_log2 >= 2) return;
  body(2);
  body(6);
}

// What is delivered of a rotated group in fp32, but the signs, which store_elements flips.
template <int kBits, Spread kSpread>
static __device__ __forceinline__ void exit_elements(const Lane<kSpread>& lane, const Encoded<kBits>& encoded,
                                                     float (&x)[kLaneElems]) {
  const Codec& codec = lane.site.plan.codec;
  const CodeForm form = code_form<kBits>(lane.is_signed);
  const GroupParams params = unpack_params(encoded.params);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float* values = x + kChunkElems * part;
    unpack_chunk<kBits>(encoded.codes + kChunkCodeWords<kBits> * part, form.flip, values);
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) values[i] = values[i] - (kCodeBase<kBits> + form.bias);
  }
  butterflies(lane, x);
  const float scale = exit_scale(widen16(params.scale_bits, codec.scale_dtype), lane.scale_down, codec);
  const float offset = exit_offset(widen16(params.zero_bits, codec.scale_dtype), codec);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float* values = x + kChunkElems * part;
    // Without an offset the element loses 0, which changes no bit: sums and differences of codes are never -0.
    values[0] = values[0] - chunk_offset(lane, part, offset);
    for_inner_runs(codec.rotation_log2, [&](int i) { values[i] = values[i] - offset; });
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) values[i] = scale * values[i];
  }
}

}  // namespace echo::cuda
