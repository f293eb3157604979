// Codes of one lane's elements: values to integers to packed words, and back.
//
// The arithmetic on integers rounds nowhere. Clamping after rounding gives what clamping before it would, because the
// limits are integers.
#pragma once

#include <cstdint>

#include "../core/quantizer.h"
#include "chunk_device.cuh"

namespace echo::cuda {

// Two's complement in b bits is the value plus 2^(b-1) with its highest bit flipped; unsigned codes are themselves.
struct CodeForm {
  uint32_t flip;  // the highest bit of every code of a word, 0 for unsigned codes
  float bias;     // 2^(b-1), 0 for unsigned codes
};

template <int kBits>
static __device__ __forceinline__ CodeForm code_form(bool is_signed) {
  if (!is_signed) return CodeForm{0u, 0.0f};
  return kBits == 4 ? CodeForm{0x88888888u, 8.0f} : CodeForm{0x80808080u, 128.0f};
}

// Both halves of a word hold the limit of a biased code.
struct CodeLimits {
  uint32_t low;
  uint32_t high;
};

constexpr float kIntegerShift = 12582912.0f;  // 1.5 * 2^23: an fp32 sum with it holds an integer in its low bits

// 16 bits each of two such sums.
static __device__ __forceinline__ uint32_t join_halves(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x5410);
}

// Pre: integers[i] has code i, biased, in its low 16 bits, as a signed number that may lie outside the limits. Without
// kLowLimit the low limit is 0.
template <int kBits, bool kLowLimit>
static __device__ __forceinline__ void pack_chunk(const uint32_t (&integers)[kChunkElems], const CodeLimits& limits,
                                                  const CodeForm& form, uint32_t* words) {
  constexpr int kApart = kBits == 4 ? 4 : 2;  // elements that share a word of halves: equal places, 16 bits apart
#pragma unroll
  for (int word = 0; word < kBits / 4; ++word) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = kApart - 1; i >= 0; --i) {
      const int first = 4 * word + i;
      uint32_t pair = join_halves(integers[first], integers[first + kApart]);
      pair = __vimin_s16x2_relu(pair, limits.high);
      if constexpr (kLowLimit) pair = __vmaxu2(pair, limits.low);
      packed = (packed << kBits) + pair;
    }
    words[word] = packed ^ form.flip;
  }
}

// Codes of a chunk whose first `remaining` elements exist; those of the others become 0.
template <int kBits>
static __device__ __forceinline__ void clear_absent_codes(int remaining, uint32_t* words) {
  constexpr int kPerWord = 32 / kBits;
#pragma unroll
  for (int word = 0; word < kBits / 4; ++word) {
    const int present = remaining - kPerWord * word;
    if (present < kPerWord) words[word] &= present <= 0 ? 0u : (1u << (kBits * present)) - 1u;
  }
}

// A code in the fraction bits of a power of two: kCodeBase + code, where the base leaves as many bits below the point
// as a byte-wise placement allows (16 for 4 bits, 8 for 8), so that a fractional zero-point can be added to it.
template <int kBits>
constexpr float kCodeBase = kBits == 4 ? 128.0f : 32768.0f;

static __device__ __forceinline__ float based_nibble(uint32_t bytes, int byte) {
  return float_of(__byte_perm(bytes, 0x43000000u, 0x7044u + (byte << 8)));
}
static __device__ __forceinline__ float based_byte(uint32_t bytes, int byte) {
  return float_of(__byte_perm(bytes, 0x47000000u, 0x7404u + (byte << 4)));
}

// kCodeBase + biased code of each element.
template <int kBits>
static __device__ __forceinline__ void unpack_chunk(const uint32_t* words, uint32_t flip, float* based) {
  if constexpr (kBits == 4) {
    const uint32_t even = (words[0] ^ flip) & 0x0f0f0f0fu;
    const uint32_t odd = ((words[0] ^ flip) >> 4) & 0x0f0f0f0fu;
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) based[i] = based_nibble(i % 2 == 0 ? even : odd, i / 2);
  } else {
    const uint32_t flipped[2] = {words[0] ^ flip, words[1] ^ flip};
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) based[i] = based_byte(flipped[i / 4], i % 4);
  }
}

// How a group's codes become values. Fused: scale * based + offset is scale * (code - zero) rounded once, which is what
// the contract's two roundings give where code - zero needs none.
struct Decoder {
  float scale;
  float offset;
  float zero;
  float base;
  bool fused;
};

static __device__ __forceinline__ Decoder make_decoder(float scale, float zero, float base) {
  Decoder decoder;
  decoder.scale = scale;
  decoder.zero = zero;
  decoder.base = base;
  const float from_zero = decoder.base + decoder.zero;
  decoder.offset = -decoder.scale * from_zero;
  // base + zero is exact, then so is code - zero, a multiple of the same power of two and smaller; and the product with
  // the scale is. A negative scale times a difference of 0 is -0, which the fused sum would not give.
  decoder.fused = from_zero - decoder.base == decoder.zero &&
                  __fmaf_rn(decoder.scale, from_zero, decoder.offset) == 0.0f &&
                  (decoder.scale >= 0.0f || decoder.zero != 0.0f);
  return decoder;
}

}  // namespace echo::cuda
