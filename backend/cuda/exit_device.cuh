// The way out of the rotation, from the codes of a group to what is delivered (core/rotation.h): whole numbers, exact
// in whatever holds them, up to the last product.
//
// exit_elements does it in fp32 for every group. quick_exit is for groups whose lanes have runs of elements: as far as
// sums fit, it works on two elements at a time. A code masked in place in a word of two halves is a float16 subnormal,
// code * 2^-24 or 2^-20, so that nothing has to be unpacked; sums of these are exact up to 2048 * 2^-24, which is
// 2^7 4-bit codes or 2^3 8-bit codes added up. From there on it is fp32, still in units of 2^-24.
#pragma once

#include "codec_device.cuh"
#include "rotation_device.cuh"

namespace echo::cuda {

// ---- every group ----------------------------------------------------------------------------------------------------

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

// ---- groups in runs -------------------------------------------------------------------------------------------------

constexpr int kLanePairs = kLaneElems / 2;
constexpr uint32_t kPairOfOnes = 0x3c003c00u;
constexpr uint32_t kPairOfMinusTwos = 0xc000c000u;
constexpr uint32_t kPairSigns = 0x80008000u;

// Strides that pairs of halves are exact for.
template <int kBits>
constexpr int kPairStrides = kBits == 4 ? 7 : 3;

// Of the four pairs of a chunk: 4 bits, pair k has elements k and k + 4; 8 bits, elements k and k + 2 of the first four
// elements for k = 0, 1, of the others for k = 2, 3.
template <int kBits>
static __device__ __forceinline__ int low_element(int pair) {
  return kBits == 4 ? pair : pair + (pair & 2);
}
template <int kBits>
constexpr int kHighElement = kBits == 4 ? 4 : 2;

// The pairs of a chunk after the butterflies at stride 1.
template <int kBits>
static __device__ __forceinline__ void first_pairs(const uint32_t* words, uint32_t* pairs) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (kBits == 4) {
      // The odd nibble of each byte is 16 times as large where it is.
      constexpr uint32_t kSixteenths = 0x2c002c00u;
      const uint32_t bytes = half == 0 ? words[0] : words[0] >> 8;
      const uint32_t even = bytes & 0x000f000fu;
      const uint32_t odd = bytes & 0x00f000f0u;
      pairs[2 * half] = fma_pair_float16(odd, kSixteenths, even);
      pairs[2 * half + 1] = fma_pair_float16(odd, kSixteenths | kPairSigns, even);
    } else {
      const uint32_t even = words[half] & 0x00ff00ffu;
      const uint32_t odd = words[half] >> 8 & 0x00ff00ffu;
      pairs[2 * half] = add_pair_float16(even, odd);
      pairs[2 * half + 1] = subtract_pair_float16(even, odd);
    }
  }
}

// u + v, then u - v as (u + v) - 2v, exact too: in place, which spares the copies that a branch around it would need.
template <int kStride>
static __device__ __forceinline__ void between_pairs(uint32_t (&pairs)[kLanePairs]) {
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    if ((i & kStride) != 0) continue;
    pairs[i] = add_pair_float16(pairs[i], pairs[i + kStride]);
    pairs[i + kStride] = fma_pair_float16(pairs[i + kStride], kPairOfMinusTwos, pairs[i]);
  }
}

template <int kStride>
static __device__ __forceinline__ void between_elements(float (&x)[kLaneElems]) {
#pragma unroll
  for (int e = 0; e < kLaneElems; ++e) {
    if ((e & kStride) != 0) continue;
    x[e] = x[e] + x[e + kStride];
    x[e + kStride] = __fmaf_rn(x[e + kStride], -2.0f, x[e]);
  }
}

static __device__ __forceinline__ void within_pairs(uint32_t (&pairs)[kLanePairs]) {
#pragma unroll
  for (uint32_t& pair : pairs) pair = butterfly_float16(pair);
}

static __device__ __forceinline__ void pairs_across(const Lane<Spread::kRuns>& lane, uint32_t (&pairs)[kLanePairs],
                                                    int end) {
#pragma unroll 1
  for (int bit = 0; bit < end; ++bit) {
    const uint32_t side = (lane.index >> bit & 1) == 0 ? kPairOfOnes : kPairOfOnes | kPairSigns;
#pragma unroll
    for (uint32_t& pair : pairs) {
      pair = fma_pair_float16(pair, side, __shfl_xor_sync(kAllLanes, pair, 1 << bit));
    }
  }
}

// The butterflies at all strides that pairs are exact for, times 2^-24.
template <int kBits>
static __device__ __forceinline__ void pair_butterflies(const Lane<Spread::kRuns>& lane, const Encoded<kBits>& encoded,
                                                        int run_log2, uint32_t (&pairs)[kLanePairs]) {
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    first_pairs<kBits>(encoded.codes + kChunkCodeWords<kBits> * part, pairs + 4 * part);
  }
  if constexpr (kBits == 4) {
    if (run_log2 > 1) between_pairs<2>(pairs);
    if (run_log2 > 2) within_pairs(pairs);
    if (run_log2 > 3) between_pairs<4>(pairs);
    if (run_log2 > 4) between_pairs<8>(pairs);
    pairs_across(lane, pairs, min(run_log2, kPairStrides<kBits>) - 5);
  } else {
    if (run_log2 > 1) within_pairs(pairs);
    if (run_log2 > 2) between_pairs<2>(pairs);
  }
}

// The codes of a group to the butterflies of this lane's elements, times 2^-24.
template <int kBits>
static __device__ __forceinline__ void code_butterflies(const Lane<Spread::kRuns>& lane, const Encoded<kBits>& encoded,
                                                        int run_log2, float (&x)[kLaneElems]) {
  uint32_t pairs[kLanePairs];
  pair_butterflies(lane, encoded, run_log2, pairs);
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    float* low = x + kChunkElems * (i / 4) + low_element<kBits>(i % 4);
    low[0] = widen_low_float16(pairs[i]);
    low[kHighElement<kBits>] = widen_high_float16(pairs[i]);
  }
  if constexpr (kBits == 8) {
    if (run_log2 > 3) between_elements<8>(x);
    if (run_log2 > 4) between_elements<16>(x);
  }
  butterflies_across(lane, x, max(kPairStrides<kBits> - 5, 0), run_log2 - 5);
}

// What is delivered of a rotated group, in words of the tensor, signs included. `sure` is cleared where it might hold a
// NaN, or where scale or offset leave fp32 in units of 2^-24; the words are then worth nothing.
//
// Pre: all groups of the warp whole, 16-bit elements, unsigned codes, no rescale; `run_log2` is the codec's, handed in
// so that callers can make it a constant.
template <DType kDType, int kBits>
static __device__ __forceinline__ void quick_exit(const Lane<Spread::kRuns>& lane, const Encoded<kBits>& encoded,
                                                  int run_log2, ChunkWords<2> (&words)[kLaneChunks], bool& sure) {
  const Codec& codec = lane.site.plan.codec;
  const int32_t run_elems = 1 << run_log2;
  const bool brain = codec.scale_dtype == ScaleDType::kBFloat16;
  const float scale = brain ? float_of(encoded.params << 16) : widen_low_float16(encoded.params);
  const float zero = brain ? float_of(encoded.params & 0xffff0000u) : widen_high_float16(encoded.params);
  const float offset = exit_offset(zero, codec) * 0x1p-24f;
  // Exact: no 16-bit scale has a bit below 2^-133, the factor is 2^-10 or more.
  const float steps = exit_scale(scale, 0x1p24f, codec);
  sure = sure && cannot_decode_to_nan(scale) && offset * 0x1p24f == exit_offset(zero, codec);

  float x[kLaneElems];
  code_butterflies(lane, encoded, run_log2, x);
  // In other lanes the element loses 0, which changes no bit: sums and differences of codes are never -0.
  x[0] = x[0] - ((kLaneElems * lane.index & (run_elems - 1)) == 0 ? offset : 0.0f);
  if (run_elems < kLaneElems) {
#pragma unroll
    for (int e = 2; e < kLaneElems; e += 2) {
      if ((e & (run_elems - 1)) == 0) x[e] = x[e] - offset;
    }
  }
#pragma unroll
  for (float& value : x) value = steps * value;
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) words[part] = narrow_numbers<kDType>(x + kChunkElems * part);
  flip_signs<kDType>(lane, words);
}

}  // namespace echo::cuda
