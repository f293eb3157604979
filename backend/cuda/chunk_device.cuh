// A chunk, eight consecutive elements of a group, as one lane handles it: words in memory, fp32 values, codes.
//
// Nothing here rounds but the conversions to 16 bits; the float arithmetic on codes is exact in any order because it
// stays below 2^24.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../core/quantizer.h"
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

// True if a value is NaN, and perhaps if one is Inf: x * 0 is then NaN and stays in the sum.
static __device__ __forceinline__ bool may_hold_nan(const float* x) {
  float probe = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) probe = __fmaf_rn(x[i], 0.0f, probe);
  return probe != 0.0f;
}

// As round_to_dtype, NaN canonical.
template <DType kDType>
static __device__ __forceinline__ ChunkWords<kBytesOf<kDType>> narrow_chunk(const float* x) {
  ChunkWords<kBytesOf<kDType>> words = narrow_numbers<kDType>(x);
  if (!may_hold_nan(x)) return words;
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) {
    if constexpr (kDType == DType::kFloat32) {
      words.at[i] = bits_of(canonical_nan(x[i]));
    } else if (i % 2 == 0) {
      constexpr bool kBrain = kDType == DType::kBFloat16;
      const uint32_t low = kBrain ? to_bfloat16(x[i]) : to_float16(x[i]);
      const uint32_t high = kBrain ? to_bfloat16(x[i + 1]) : to_float16(x[i + 1]);
      words.at[i / 2] = low | high << 16;
    }
  }
  return words;
}

// ---- codes --------------------------------------------------------------------------------------------------------

// Codes of a chunk: one word for 4 bits, two for 8.
struct CodeWords {
  uint32_t at[2];
};

// Two's complement in b bits is the value plus 2^(b-1) with its highest bit flipped; unsigned codes are themselves.
struct CodeForm {
  uint32_t flip;  // the highest bit of every code of a word, 0 for unsigned codes
  float bias;     // 2^(b-1), 0 for unsigned codes
};

static __device__ __forceinline__ CodeForm code_form(int bits, bool is_signed) {
  if (!is_signed) return CodeForm{0u, 0.0f};
  return bits == 4 ? CodeForm{0x88888888u, 8.0f} : CodeForm{0x80808080u, 128.0f};
}

constexpr float kIntegerShift = 12582912.0f;  // 1.5 * 2^23: an fp32 sum with it holds an integer in its low bits

// 16 bits of codes, given as integral floats: sum of code * kBase^i, each step exact.
template <int kCodes, int kBase>
static __device__ __forceinline__ uint32_t pack_half_word(const float* codes, const CodeForm& form) {
  float sum = kIntegerShift + static_cast<float>(form.flip & 0xffffu);
  float weight = 1.0f;
#pragma unroll
  for (int i = 0; i < kCodes; ++i) {
    sum = __fmaf_rn(codes[i], weight, sum);
    weight *= kBase;
  }
  return bits_of(sum);
}

static __device__ __forceinline__ uint32_t join_halves(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x5410);
}

static __device__ __forceinline__ CodeWords pack_chunk(const float* codes, int bits, const CodeForm& form) {
  CodeWords words = {};
  if (bits == 4) {
    words.at[0] = join_halves(pack_half_word<4, 16>(codes, form), pack_half_word<4, 16>(codes + 4, form)) ^ form.flip;
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* four = codes + 4 * half;
      words.at[half] =
          join_halves(pack_half_word<2, 256>(four, form), pack_half_word<2, 256>(four + 2, form)) ^ form.flip;
    }
  }
  return words;
}

// Byte `byte` of `bytes` as a float: its bits below those of 2^23, less 2^23.
static __device__ __forceinline__ float byte_value(uint32_t bytes, int byte, float bias) {
  return float_of(__byte_perm(bytes, 0x4b000000u, 0x7540u + byte)) - (8388608.0f + bias);
}

static __device__ __forceinline__ void unpack_chunk(const CodeWords& words, int bits, const CodeForm& form,
                                                    float* codes) {
  if (bits == 4) {
    const uint32_t even = (words.at[0] ^ form.flip) & 0x0f0f0f0fu;
    const uint32_t odd = ((words.at[0] ^ form.flip) >> 4) & 0x0f0f0f0fu;
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) codes[i] = byte_value(i % 2 == 0 ? even : odd, i / 2, form.bias);
  } else {
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) codes[i] = byte_value(words.at[i / 4] ^ form.flip, i % 4, form.bias);
  }
}

}  // namespace echo::cuda
