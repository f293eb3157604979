// A chunk, eight consecutive elements of a group, as one lane handles it: words in memory and fp32 values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../core/numeric.h"
#include "ptx.cuh"

namespace echo::cuda {

constexpr int kChunkElems = 8;

// kElemBytes * 8 bytes, the first element in the lowest bits.
template <int kElemBytes>
struct ChunkWords {
  uint32_t at[2 * kElemBytes];
};

// The elements at `from`, zeros behind the last: `remaining` of them exist from there on, none if it is negative. One
// or two wide loads if the chunk is whole and aligned to its size (32 bytes: to 16). `remaining` is not clamped to 0..8
// on purpose: ptxas 13.0 for sm_90 turns "clamped == 8" into the predicate of a VIMNMX.RELU, which says the opposite
// (seen on an H200, where absent chunks were then stored).
template <int kElemBytes>
static __device__ __forceinline__ ChunkWords<kElemBytes> load_chunk(const std::byte* from, int remaining,
                                                                    bool aligned) {
  ChunkWords<kElemBytes> words = {};
  if (remaining >= kChunkElems && aligned) {
    if constexpr (kElemBytes == 1) {
      const uint2 pair = *reinterpret_cast<const uint2*>(from);
      words.at[0] = pair.x;
      words.at[1] = pair.y;
    } else {
#pragma unroll
      for (int part = 0; part < kElemBytes / 2; ++part) {
        const uint4 quad = reinterpret_cast<const uint4*>(from)[part];
        words.at[4 * part] = quad.x;
        words.at[4 * part + 1] = quad.y;
        words.at[4 * part + 2] = quad.z;
        words.at[4 * part + 3] = quad.w;
      }
    }
    return words;
  }
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) {
    if (i >= remaining) continue;
    if constexpr (kElemBytes == 1) {
      words.at[i / 4] |= static_cast<uint32_t>(reinterpret_cast<const uint8_t*>(from)[i]) << (8 * (i % 4));
    } else if constexpr (kElemBytes == 2) {
      words.at[i / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(from)[i]) << (16 * (i % 2));
    } else {
      words.at[i] = reinterpret_cast<const uint32_t*>(from)[i];
    }
  }
  return words;
}

// Writes the elements that exist and nothing beyond them.
template <int kElemBytes>
static __device__ __forceinline__ void store_chunk(const ChunkWords<kElemBytes>& words, std::byte* to, int remaining,
                                                   bool aligned) {
  if (remaining >= kChunkElems && aligned) {
    if constexpr (kElemBytes == 1) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words.at[0], words.at[1]);
    } else {
#pragma unroll
      for (int part = 0; part < kElemBytes / 2; ++part) {
        reinterpret_cast<uint4*>(to)[part] =
            make_uint4(words.at[4 * part], words.at[4 * part + 1], words.at[4 * part + 2], words.at[4 * part + 3]);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) {
    if (i >= remaining) continue;
    if constexpr (kElemBytes == 1) {
      reinterpret_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(words.at[i / 4] >> (8 * (i % 4)));
    } else if constexpr (kElemBytes == 2) {
      reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(words.at[i / 2] >> (16 * (i % 2)));
    } else {
      reinterpret_cast<uint32_t*>(to)[i] = words.at[i];
    }
  }
}

template <DType kDType>
constexpr int kBytesOf = kDType == DType::kFloat32 ? 4 : 2;

template <DType kDType>
static __device__ __forceinline__ void widen_chunk(const ChunkWords<kBytesOf<kDType>>& words, float* x) {
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) {
    if constexpr (kDType == DType::kFloat32) {
      x[i] = float_of(words.at[i]);
    } else if constexpr (kDType == DType::kBFloat16) {
      x[i] = float_of(i % 2 == 0 ? words.at[i / 2] << 16 : words.at[i / 2] & 0xffff0000u);
    } else {
      x[i] = i % 2 == 0 ? widen_low_float16(words.at[i / 2]) : widen_high_float16(words.at[i / 2]);
    }
  }
}

// As round_to_dtype, but a NaN gives some NaN: for values whose NaNs do not matter.
template <DType kDType>
static __device__ __forceinline__ ChunkWords<kBytesOf<kDType>> narrow_numbers(const float* x) {
  ChunkWords<kBytesOf<kDType>> words;
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) {
    if constexpr (kDType == DType::kFloat32) {
      words.at[i] = bits_of(x[i]);
    } else if (i % 2 == 0) {
      words.at[i / 2] =
          kDType == DType::kBFloat16 ? round_pair_bfloat16(x[i], x[i + 1]) : round_pair_float16(x[i], x[i + 1]);
    }
  }
  return words;
}

}  // namespace echo::cuda
