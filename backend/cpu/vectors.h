// Vectors as wide as the instruction set this file is compiled for, through the compiler's own vector types: arithmetic
// on them is arithmetic on their elements, rounding for rounding.
#pragma once

#include <cstdint>
#include <cstring>

#include "../core/numeric.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace echo::cpu {

#if defined(__AVX512F__)
static constexpr int kVectorElems = 16;
#elif defined(__AVX2__)
static constexpr int kVectorElems = 8;
#else
static constexpr int kVectorElems = 4;
#endif

typedef float FloatVector __attribute__((vector_size(kVectorElems * sizeof(float))));
typedef int32_t IntVector __attribute__((vector_size(kVectorElems * sizeof(int32_t))));

typedef uint32_t WordVector __attribute__((vector_size(kVectorElems * sizeof(uint32_t))));
typedef uint8_t ByteVector __attribute__((vector_size(kVectorElems)));
typedef uint16_t HalfVector __attribute__((vector_size(kVectorElems * sizeof(uint16_t))));

typedef uint8_t PairVector __attribute__((vector_size(kVectorElems / 2)));
typedef uint64_t LongVector __attribute__((vector_size(kVectorElems * sizeof(int32_t))));

// Bytes widened without sign, one per element or one per pair of elements. Spelt out, because compilers take the
// generic conversion apart.
#if defined(__AVX512F__)
static inline IntVector widen_bytes(const void* from) {
  return (IntVector)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
static inline LongVector widen_pairs(const void* from) {
  return (LongVector)_mm512_cvtepu8_epi64(_mm_loadu_si64(from));
}
#elif defined(__AVX2__)
static inline IntVector widen_bytes(const void* from) { return (IntVector)_mm256_cvtepu8_epi32(_mm_loadu_si64(from)); }
static inline LongVector widen_pairs(const void* from) {
  return (LongVector)_mm256_cvtepu8_epi64(_mm_loadu_si32(from));
}
#else
static inline IntVector widen_bytes(const void* from) {
  ByteVector bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, IntVector);
}
static inline LongVector widen_pairs(const void* from) {
  PairVector bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, LongVector);
}
#endif

static inline FloatVector load_vector(const float* from) {
  FloatVector x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

static inline void store_vector(FloatVector x, float* to) { std::memcpy(to, &x, sizeof(x)); }

static inline FloatVector lesser_of(FloatVector x, FloatVector y) { return x < y ? x : y; }
static inline FloatVector greater_of(FloatVector x, FloatVector y) { return x > y ? x : y; }
static inline IntVector greater_of(IntVector x, IntVector y) { return x > y ? x : y; }

// to_bfloat16 of core/numeric.h for a vector.
static inline HalfVector to_bfloat16_vector(FloatVector x) {
  const WordVector bits = (WordVector)x;
  const WordVector rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const WordVector magnitude = bits & kAbsMask32;
  const WordVector halves = magnitude > kInfBits32 ? WordVector{} + uint32_t{kNanBitsBFloat16} : rounded;
  return __builtin_convertvector(halves, HalfVector);
}

// finite_or_zero of core/numeric.h for a vector.
static inline FloatVector finite_or_zero_of(FloatVector x) {
  const WordVector magnitude = (WordVector)x & kAbsMask32;
  return magnitude < kInfBits32 ? x : FloatVector{};
}

// One value from all elements of a vector, by halves.
template <int kHalf = kVectorElems / 2, typename Vector, typename Combine>
static inline auto fold(Vector x, Combine combine) {
  if constexpr (kHalf == 0) {
    return x[0];
  } else {
    IntVector partner;
    for (int i = 0; i < kVectorElems; ++i) partner[i] = i ^ kHalf;
    return fold<kHalf / 2>(combine(x, __builtin_shuffle(x, partner)), combine);
  }
}

}  // namespace echo::cpu
