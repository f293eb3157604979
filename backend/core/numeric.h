// Bit-level number formats: conversions that round to nearest even, directed rounding of scales, the canonical NaN.
//
// Invariants: every function is exact IEEE arithmetic written with integers or single fp32 operations, so that each
// compiler and device gives the same bits; branch-free where it runs per element, so that compilers vectorise it.
#pragma once

#include <cstdint>
#include <cstring>

#include "config.h"
#include "hd.h"

namespace echo {

constexpr uint32_t kNanBits32 = 0x7fc00000u;
constexpr uint16_t kNanBitsBFloat16 = 0x7fc0u;
constexpr uint16_t kNanBitsFloat16 = 0x7e00u;
constexpr uint32_t kInfBits32 = 0x7f800000u;
constexpr uint32_t kAbsMask32 = 0x7fffffffu;

ECHO_HD uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

ECHO_HD float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

ECHO_HD bool is_nan(float x) { return (bits_of(x) & kAbsMask32) > kInfBits32; }
ECHO_HD bool is_finite(float x) { return (bits_of(x) & kAbsMask32) < kInfBits32; }
ECHO_HD float finite_or_zero(float x) { return is_finite(x) ? x : 0.0f; }
ECHO_HD float canonical_nan(float x) { return is_nan(x) ? float_of(kNanBits32) : x; }

// Compares as x < y ? x : y, so a NaN is dropped: callers detect it from exponent bits.
ECHO_HD float lesser(float x, float y) { return x < y ? x : y; }
ECHO_HD float greater(float x, float y) { return x > y ? x : y; }

// Nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bits.
ECHO_HD float round_to_int(float x) {
  constexpr float kShift = 12582912.0f;
#if defined(__CUDA_ARCH__)
  return __fsub_rn(__fadd_rn(x, kShift), kShift);
#else
  return (x + kShift) - kShift;
#endif
}

ECHO_HD float from_bfloat16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

ECHO_HD uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(is_nan(x) ? kNanBitsBFloat16 : rounded);
}

// The fp16 exponent and fraction, moved into place, are 2^-112 too small as fp32; the product is exact, subnormals
// included.
ECHO_HD float from_float16(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const uint32_t scaled = bits_of(float_of(magnitude) * float_of(0x77800000u));
  const uint32_t special = magnitude | kInfBits32;
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  return float_of(((h & 0x7c00u) == 0x7c00u ? special : scaled) | sign);
}

ECHO_HD uint16_t to_float16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & kAbsMask32;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  // Below 2^-14 the sum with 0.5 has its last bit at 2^-24, the fp16 subnormal step: the addition itself rounds.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half |= (bits >> 16) & 0x8000u;
  return static_cast<uint16_t>(magnitude > kInfBits32 ? kNanBitsFloat16 : half);
}

ECHO_HD uint16_t round16(float x, ScaleDType format) {
  return format == ScaleDType::kBFloat16 ? to_bfloat16(x) : to_float16(x);
}

ECHO_HD float widen16(uint16_t h, ScaleDType format) {
  return format == ScaleDType::kBFloat16 ? from_bfloat16(h) : from_float16(h);
}

// Smallest value of the format that is not below x, for x >= 0; Inf where there is none.
ECHO_HD uint16_t ceil16(float x, ScaleDType format) {
  if (format == ScaleDType::kBFloat16) {
    return static_cast<uint16_t>((bits_of(x) + 0xffffu) >> 16);
  }
  const uint16_t nearest = to_float16(x);
  return static_cast<uint16_t>(from_float16(nearest) < x ? nearest + 1 : nearest);
}

ECHO_HD float smallest_scale(ScaleDType format) {
  return format == ScaleDType::kBFloat16 ? float_of(0x00800000u) : float_of(0x33800000u);
}

// 2^k as fp32 for -126 <= k <= 127.
ECHO_HD float power_of_two(int32_t k) { return float_of(static_cast<uint32_t>(k + 127) << 23); }

// floor(log2 |x|) of a finite non-zero fp32 given by its bits, subnormals included.
ECHO_HD int32_t floor_log2_bits(uint32_t magnitude) {
  if (magnitude >= 0x00800000u) return static_cast<int32_t>(magnitude >> 23) - 127;
  int32_t exponent = -150;
  while (magnitude != 0) {
    magnitude >>= 1;
    ++exponent;
  }
  return exponent;
}

}  // namespace echo
