// The parameters of a group as the core computes them, by shorter ways where they provably give the same bits.
//
// Division by a number b of at most 11 significant bits (a stored scale, a number of levels). With y = fl(1/b),
// q = fl(a*y) is at most 1.5 ulp off, rem = a - b*q is exact, and q + rem*y is within 2^-23 ulp of a/b. No quotient by
// such a b lies closer than 2^-12 ulp to the middle of two neighbours without lying on it, which would take a of more
// than 24 bits: so fl(q + rem*y) is fl(a/b). The same holds for 1/b itself, from an approximation within an ulp. All
// this needs operands and results that stay away from the ends of the exponent range.
#pragma once

#include "../core/quantizer.h"
#include "ptx.cuh"

namespace echo::cuda {

static __device__ __forceinline__ float reciprocal_of_short(float b) {
  const float y = rough_reciprocal(b);
  return __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y);
}

// Pre: inverse == fl(1/b).
static __device__ __forceinline__ float divide_by_short(float a, float b, float inverse) {
  const float quotient = a * inverse;
  return __fmaf_rn(__fmaf_rn(-b, quotient, a), inverse, quotient);
}

// Smallest and largest value of a group.
struct Extremes {
  float lo;
  float hi;
};

struct Grid {
  GroupParams params;
  GroupGrid grid;
};

// Between these magnitudes of the clipped extremes no scale leaves its format and nothing underflows; NaN is outside.
static __device__ __forceinline__ bool is_moderate(float magnitude, ScaleDType format) {
  const bool brain = format == ScaleDType::kBFloat16;
  return magnitude >= (brain ? 0x1p-60f : 0x1p-6f) && magnitude <= (brain ? 0x1p100f : 0x1p14f);
}

// How far inside the range zero must lie, in steps, for zero_aware's weight to be 1 whatever is rounded on the way; and
// for quotients by the scale not to underflow.
static __host__ __device__ __forceinline__ float sure_steps_inside(const Codec& codec) {
  constexpr float kLeast = 0x1p-20f;
  return codec.quantizer == Quantizer::kZeroAware ? fmaxf(codec.tau * 1.001f, kLeast) : kLeast;
}

// The core's own way, for what is rare: out of line, so that it does not take up the caches of what is not.
static __device__ __noinline__ Grid exact_grid(Extremes extremes, const Codec& codec) {
  Grid exact;
  const uint32_t magnitude = max(bits_of(extremes.lo) & kAbsMask32, bits_of(extremes.hi) & kAbsMask32);
  exact.params = group_params(GroupStats{extremes.lo, extremes.hi, magnitude}, codec);
  exact.grid = group_grid(exact.params, codec);
  return exact;
}

// Extremes that are scaled already; `sure_steps` is sure_steps_inside(codec). What it gives counts only if it leaves
// `sure` as it is; a group that is rarer than that, exact_grid serves.
template <int kBits>
static __device__ __forceinline__ Grid quick_grid(const Extremes& extremes, const Codec& codec, bool symmetric,
                                                  float sure_steps, bool& sure) {
  constexpr float kLevels = kBits == 4 ? 15.0f : 255.0f;
  constexpr float kSymmetricLevels = kBits == 4 ? 7.0f : 127.0f;
  constexpr float kSharp = 0x1p-20f;  // a bound below which a quotient might underflow
  const bool brain = codec.scale_dtype == ScaleDType::kBFloat16;
  const float lo = extremes.lo * codec.clip + 0.0f;
  const float hi = extremes.hi * codec.clip + 0.0f;
  const float largest = max_or_nan(fabsf(lo), fabsf(hi));
  const bool empty = max_or_nan(fabsf(extremes.lo), fabsf(extremes.hi)) == 0.0f;

  bool here = is_moderate(largest, codec.scale_dtype);
  bool negated = false;
  bool whole_zero = false;
  float bottom = lo;
  float top = hi;
  if (!symmetric) {
    if (lo >= 0.0f || hi <= 0.0f) {
      negated = !(lo >= 0.0f);
      bottom = negated ? -hi + 0.0f : lo;
      top = negated ? -lo : hi;
      constexpr float kBrainShare = 64.0f / (kLevels + 64.0f);
      constexpr float kHalfShare = 512.0f / (kLevels + 512.0f);
      bottom = fminf(bottom, top * (brain ? kBrainShare : kHalfShare));
      here = here && (bottom == 0.0f || bottom >= top * kSharp);
    } else {
      here = here && fminf(-lo, hi) * kLevels >= sure_steps * (hi - lo);
      whole_zero = codec.quantizer == Quantizer::kZeroAware;
    }
  }
  sure = sure && (here || empty);
  const float step = symmetric ? divide_by_short(largest, kSymmetricLevels, 1.0f / kSymmetricLevels)
                               : divide_by_short(top - bottom, kLevels, 1.0f / kLevels);
  Grid result;
  float scale;
  if (brain) {
    const uint32_t bits = (bits_of(step) + 0xffffu) & 0xffff0000u;
    result.params.scale_bits = static_cast<uint16_t>(bits >> 16);
    scale = float_of(bits);
  } else {
    result.params.scale_bits = ceil_float16(step);
    scale = widen_low_float16(result.params.scale_bits);
  }
  const float inverse = reciprocal_of_short(scale);
  result.grid.zero = 0.0f;
  if (!symmetric) {
    float zero = divide_by_short(-bottom, scale, inverse);
    if (whole_zero) zero = round_to_int(zero);
    const uint32_t bits = brain ? round_pair_bfloat16(zero + 0.0f, 0.0f) : round_pair_float16(zero + 0.0f, 0.0f);
    result.params.zero_bits = static_cast<uint16_t>(bits);
    result.grid.zero = brain ? float_of(bits << 16) : widen_low_float16(bits);
  }
  if (negated) result.params.scale_bits ^= 0x8000u;
  result.grid.scale = negated ? -scale : scale;
  result.grid.inverse = negated ? -inverse : inverse;
  result.grid.code_max = symmetric ? kSymmetricLevels : kLevels;
  result.grid.code_min = symmetric ? -kSymmetricLevels : 0.0f;
  return empty ? Grid{} : result;
}

template <int kBits>
static __device__ __forceinline__ Grid make_grid(const Extremes& extremes, const Codec& codec, bool symmetric,
                                                 float sure_steps) {
  bool sure = true;
  const Grid grid = quick_grid<kBits>(extremes, codec, symmetric, sure_steps, sure);
  return sure ? grid : exact_grid(extremes, codec);
}

}  // namespace echo::cuda
