// Vectors as wide as the instruction set this file is compiled for, through the compiler's own vector types: arithmetic
// on them is arithmetic on their elements, rounding for rounding.
//
// Instructions are spelt out where compilers take the generic form apart; each such function names the generic form
// that it equals, and compiles to it elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

#include "../core/numeric.h"

#if defined(__SSE2__)
// GCC 12 takes the deliberately undefined operands inside these headers for mistakes of their callers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define ECHO_INLINE static inline __attribute__((always_inline))
#define ECHO_INLINE_MEMBER inline __attribute__((always_inline))

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
typedef uint16_t HalfVector __attribute__((vector_size(kVectorElems * sizeof(uint16_t))));
typedef uint8_t ByteVector __attribute__((vector_size(kVectorElems)));

ECHO_INLINE FloatVector load_vector(const float* from) {
  FloatVector x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
ECHO_INLINE void store_vector(FloatVector x, float* to) { std::memcpy(to, &x, sizeof(x)); }
// x - 0 is x, -0 and NaN too: no instruction but the broadcast.
ECHO_INLINE FloatVector all_of(float x) { return x - FloatVector{}; }
ECHO_INLINE WordVector words_of(uint32_t x) { return WordVector{} + x; }

// x < y ? x : y and x > y ? x : y: y where either is NaN.
#if defined(__AVX512F__)
ECHO_INLINE FloatVector lesser_of(FloatVector x, FloatVector y) { return (FloatVector)_mm512_min_ps(x, y); }
ECHO_INLINE FloatVector greater_of(FloatVector x, FloatVector y) { return (FloatVector)_mm512_max_ps(x, y); }
#elif defined(__AVX2__)
ECHO_INLINE FloatVector lesser_of(FloatVector x, FloatVector y) { return (FloatVector)_mm256_min_ps(x, y); }
ECHO_INLINE FloatVector greater_of(FloatVector x, FloatVector y) { return (FloatVector)_mm256_max_ps(x, y); }
#else
ECHO_INLINE FloatVector lesser_of(FloatVector x, FloatVector y) { return x < y ? x : y; }
ECHO_INLINE FloatVector greater_of(FloatVector x, FloatVector y) { return x > y ? x : y; }
#endif
ECHO_INLINE WordVector greater_of(WordVector x, WordVector y) { return x > y ? x : y; }
ECHO_INLINE IntVector lesser_of(IntVector x, IntVector y) { return x < y ? x : y; }
ECHO_INLINE IntVector greater_of(IntVector x, IntVector y) { return x > y ? x : y; }

// Integers in the order of the floats that they stand for, NaNs beyond the infinities of their sign; processors compare
// integers at twice the rate. Its own inverse.
ECHO_INLINE IntVector ordered(IntVector x) { return x ^ ((x >> 31) & static_cast<int32_t>(kAbsMask32)); }

// finite_or_zero of core/numeric.h.
#if defined(__AVX512F__)
ECHO_INLINE FloatVector finite_or_zero_of(FloatVector x) {
  // What becomes of each class of numbers, 4 bits each from the lowest: quiet NaN, signalling NaN, zero, one, -Inf,
  // +Inf, negative, positive; 0 keeps the first operand, 8 gives +0.
  return (FloatVector)_mm512_fixupimm_ps(x, x, _mm512_set1_epi32(0x00880088), 0);
}
#else
ECHO_INLINE FloatVector finite_or_zero_of(FloatVector x) {
  const WordVector magnitude = (WordVector)x & kAbsMask32;
  return magnitude < kInfBits32 ? x : FloatVector{};
}
#endif

// The larger of `most` and |x|; x is finite, `most` not negative.
#if defined(__AVX512F__)
ECHO_INLINE FloatVector greater_magnitude_of(FloatVector most, FloatVector x) {
  return (FloatVector)_mm512_range_ps(most, x, 0xb);
}
#else
ECHO_INLINE FloatVector greater_magnitude_of(FloatVector most, FloatVector x) {
  return greater_of((FloatVector)((WordVector)x & kAbsMask32), most);
}
#endif

// 32-bit elements from narrower ones and back; narrowing keeps the low bits.
#if defined(__AVX512F__)
ECHO_INLINE IntVector widen_bytes(ByteVector x) { return (IntVector)_mm512_cvtepu8_epi32((__m128i)x); }
ECHO_INLINE IntVector widen_halves(HalfVector x) { return (IntVector)_mm512_cvtepu16_epi32((__m256i)x); }
ECHO_INLINE IntVector widen_signed_halves(HalfVector x) { return (IntVector)_mm512_cvtepi16_epi32((__m256i)x); }
ECHO_INLINE ByteVector narrow_to_bytes(IntVector x) { return (ByteVector)_mm512_cvtepi32_epi8((__m512i)x); }
ECHO_INLINE HalfVector narrow_to_halves(IntVector x) { return (HalfVector)_mm512_cvtepi32_epi16((__m512i)x); }
#elif defined(__AVX2__)
ECHO_INLINE IntVector widen_bytes(ByteVector x) { return (IntVector)_mm256_cvtepu8_epi32(_mm_loadu_si64(&x)); }
ECHO_INLINE IntVector widen_halves(HalfVector x) { return (IntVector)_mm256_cvtepu16_epi32((__m128i)x); }
ECHO_INLINE IntVector widen_signed_halves(HalfVector x) { return (IntVector)_mm256_cvtepi16_epi32((__m128i)x); }
ECHO_INLINE HalfVector narrow_to_halves(IntVector x) {
  const __m256i low = (__m256i)(x & 0xffff);
  return (HalfVector)_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}
ECHO_INLINE ByteVector narrow_to_bytes(IntVector x) {
  const __m128i halves = (__m128i)narrow_to_halves(x & 0xff);
  ByteVector bytes;
  _mm_storeu_si64(&bytes, _mm_packus_epi16(halves, halves));
  return bytes;
}
#else
ECHO_INLINE IntVector widen_bytes(ByteVector x) { return __builtin_convertvector(x, IntVector); }
ECHO_INLINE IntVector widen_halves(HalfVector x) { return __builtin_convertvector(x, IntVector); }
ECHO_INLINE IntVector widen_signed_halves(HalfVector x) { return (widen_halves(x) << 16) >> 16; }
ECHO_INLINE ByteVector narrow_to_bytes(IntVector x) { return __builtin_convertvector(x, ByteVector); }
ECHO_INLINE HalfVector narrow_to_halves(IntVector x) { return __builtin_convertvector(x, HalfVector); }
#endif

// to_bfloat16 of core/numeric.h, in the low half of each element; `bfloat16_high` leaves it in the high half, what is
// below it undefined.
ECHO_INLINE WordVector bfloat16_high(FloatVector x) {
  const WordVector bits = (WordVector)x;
  const WordVector rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (IntVector)(x != x) ? words_of(kNanBits32) : rounded;
}
ECHO_INLINE WordVector to_bfloat16_of(FloatVector x) { return bfloat16_high(x) >> 16; }
ECHO_INLINE FloatVector from_bfloat16_of(WordVector h) { return (FloatVector)(h << 16); }

// from_float16 and to_float16 of core/numeric.h; halves are in the low bits of each element, the rest 0.
ECHO_INLINE FloatVector from_float16_of(WordVector h) {
  const WordVector magnitude = (h & 0x7fffu) << 13;
  const WordVector scaled = (WordVector)((FloatVector)magnitude * float_of(0x77800000u));
  const WordVector special = magnitude | kInfBits32;
  return (FloatVector)(((h & 0x7c00u) == 0x7c00u ? special : scaled) | ((h & 0x8000u) << 16));
}
ECHO_INLINE WordVector to_float16_of(FloatVector x) {
  const WordVector bits = (WordVector)x;
  const WordVector magnitude = bits & kAbsMask32;
  const WordVector normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const WordVector subnormal = (WordVector)((FloatVector)magnitude + 0.5f) - 0x3f000000u;
  WordVector half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? words_of(0x7c00u) : half;
  half |= (bits >> 16) & 0x8000u;
  return magnitude > kInfBits32 ? words_of(kNanBitsFloat16) : half;
}

// One vector from the elements of kVectorElems vectors: element j is all elements of x[j], combined. Halving in both
// directions at once: after stride h, vector j holds in element i what is left of x[j | (i & (2h-1))].
template <int kStride = 1, typename Vector, typename Combine>
ECHO_INLINE Vector fold_each(Vector* x, Combine combine) {
  if constexpr (kStride == kVectorElems) {
    return x[0];
  } else {
    IntVector own;
    IntVector other;
    for (int i = 0; i < kVectorElems; ++i) {
      const int source = (i & kStride) != 0 ? kVectorElems : 0;
      own[i] = source + i;
      other[i] = source + (i ^ kStride);
    }
    for (int j = 0; j < kVectorElems; j += 2 * kStride) {
      const Vector left = x[j];
      const Vector right = x[j + kStride];
      x[j] = combine(__builtin_shuffle(left, right, own), __builtin_shuffle(left, right, other));
    }
    return fold_each<2 * kStride>(x, combine);
  }
}

}  // namespace echo::cpu
