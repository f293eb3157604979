// The rotation of a group in registers on the way into the domain in which codes are made, and what is delivered; the
// way out is in exit_device.cuh.
#pragma once

#include "group_device.cuh"

namespace echo::cuda {

// Butterflies at a stride between elements of one lane.
static __device__ __forceinline__ void butterflies_inside(float (&x)[kLaneElems], int stride) {
#pragma unroll
  for (int e = 0; e < kLaneElems; ++e) {
    if ((e & stride) != 0) continue;
    const float u = x[e];
    const float v = x[e + stride];
    x[e] = u + v;
    x[e + stride] = u - v;
  }
}

// Butterflies at the strides between lanes 2^first, .. 2^(end - 1) apart.
template <Spread kSpread>
static __device__ __forceinline__ void butterflies_across(const Lane<kSpread>& lane, float (&x)[kLaneElems], int first,
                                                          int end) {
#pragma unroll 1
  for (int bit = first; bit < end; ++bit) {
    // The product with 1 or -1 is exact, so the fused form rounds once, as the sum or difference does.
    const float side = (lane.index >> bit & 1) == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) x[e] = __fmaf_rn(x[e], side, __shfl_xor_sync(kAllLanes, x[e], 1 << bit));
  }
}

// Pre: runs of at least 2. Ascending strides, as the contract has it: inside a chunk, then for kRuns across the chunks
// of a lane and across lanes, for kChunks across lanes and across the chunks of a lane.
template <Spread kSpread>
static __device__ __forceinline__ void butterflies(const Lane<kSpread>& lane, float (&x)[kLaneElems]) {
  constexpr int kInsideLog2 = kSpread == Spread::kRuns ? 5 : 3;
  const int run_log2 = lane.site.plan.codec.rotation_log2;
  butterflies_inside(x, 1);
  // The usual case apart: a branch around a stride takes as many copies as the stride has butterflies.
  if (run_log2 >= kInsideLog2) {
#pragma unroll
    for (int bit = 1; bit < kInsideLog2; ++bit) butterflies_inside(x, 1 << bit);
  } else {
#pragma unroll
    for (int bit = 1; bit < kInsideLog2 - 1; ++bit) {
      if (run_log2 > bit) butterflies_inside(x, 1 << bit);
    }
  }
  butterflies_across<kSpread>(lane, x, 0, min(run_log2 - kInsideLog2, lane.lanes_log2));
  if constexpr (kSpread == Spread::kChunks) {
#pragma unroll
    for (int stride = kChunkElems; stride < kLaneElems; stride *= 2) {
      if ((stride << lane.lanes_log2) < 1 << run_log2) butterflies_inside(x, stride);
    }
  }
}

// The signs as the elements are in memory, two per word where they have 16 bits.
template <DType kDType, Spread kSpread>
static __device__ __forceinline__ void flip_signs(const Lane<kSpread>& lane,
                                                  ChunkWords<kBytesOf<kDType>> (&words)[kLaneChunks]) {
  const uint32_t signs = recompute_here(lane.signs);
#pragma unroll
  for (int pair = 0; pair < kLaneElems / 2; ++pair) {
    if constexpr (kDType == DType::kFloat32) {
      uint32_t* two = words[2 * pair / kChunkElems].at + 2 * pair % kChunkElems;
      two[0] ^= signs << (16 + pair) & 0x80000000u;
      two[1] ^= signs << pair & 0x80000000u;
    } else {
      words[2 * pair / kChunkElems].at[pair % (kChunkElems / 2)] ^= signs << pair & 0x80008000u;
    }
  }
}

// What flip_signs leaves of rotate_entry.
template <Spread kSpread>
static __device__ __forceinline__ void rotate_entry(const Lane<kSpread>& lane, const GroupAt& at,
                                                    float (&x)[kLaneElems]) {
  if (!at.rotated) return;
  butterflies(lane, x);
  const float factor = rotation_entry_factor(lane.site.plan.codec);
  if (factor == 1.0f) return;
#pragma unroll
  for (int e = 0; e < kLaneElems; ++e) x[e] = x[e] * factor;
}

// Words of elements whose signs are flipped, every NaN canonical. Rare, so out of line; callers hand in copies, since
// what is passed this way has to lie in memory.
template <DType kDType>
static __device__ __noinline__ void narrow_with_nan(uint32_t signs, const float (&x)[kLaneElems],
                                                    ChunkWords<kBytesOf<kDType>> (&words)[kLaneChunks]) {
#pragma unroll
  for (int e = 0; e < kLaneElems; ++e) {
    const uint32_t sign = signs << (e % 2 * -16 + 16 + e / 2) & 0x80000000u;
    const float value = flip_sign(x[e], sign);
    uint32_t* at_chunk = words[e / kChunkElems].at;
    if constexpr (kDType == DType::kFloat32) {
      at_chunk[e % kChunkElems] = bits_of(canonical_nan(value));
    } else {
      const uint32_t half = kDType == DType::kBFloat16 ? to_bfloat16(value) : to_float16(value);
      uint32_t& word = at_chunk[e % kChunkElems / 2];
      word = e % 2 == 0 ? half : word | half << 16;
    }
  }
}

// Delivers decoded elements, of a rotated group after exit_elements; signs included. `may_be_nan`: one of them may be
// NaN.
template <DType kDType, Spread kSpread>
static __device__ __forceinline__ void store_elements(const Lane<kSpread>& lane, const GroupAt& at,
                                                      const float (&x)[kLaneElems], bool may_be_nan) {
  ChunkWords<kBytesOf<kDType>> words[kLaneChunks];
  if (may_be_nan && may_hold_nan(x)) {
    float copy[kLaneElems];
    ChunkWords<kBytesOf<kDType>> narrowed[kLaneChunks];
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) copy[e] = x[e];
    narrow_with_nan<kDType>(at.rotated ? lane.signs : 0u, copy, narrowed);
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) words[part] = narrowed[part];
  } else {
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) words[part] = narrow_numbers<kDType>(x + kChunkElems * part);
    if (at.rotated) flip_signs<kDType>(lane, words);
  }
  store_words(lane, at, static_cast<std::byte*>(lane.site.tensor), lane.tensor_aligned, words);
}

}  // namespace echo::cuda
