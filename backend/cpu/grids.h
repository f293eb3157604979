// Parameters of all groups of a batch at once: group_params and group_grid of core/quantizer.h with a group in each
// element of a vector, every case computed and the right one selected.
#pragma once

#include "../core/quantizer.h"
#include "batch.h"

namespace echo::cpu {

constexpr float kShift = 12582912.0f;  // as in round_to_int; the low bits of a shifted value are the code

// Of each group: extremes as in GroupStats, and all bits set in `bad` where a value is not finite.
struct BatchStats {
  FloatVector lo;
  FloatVector hi;
  IntVector bad;
};

struct BatchGrid {
  PerGroup scale;
  PerGroup inverse;
  PerGroup zero;
  PerGroup code_min;  // limits as the encoder compares them: bits of the code plus kShift
  PerGroup code_max;
};

struct BatchParams {
  WordVector scale_bits;
  WordVector zero_bits;
};

static inline IntVector is_finite_of(FloatVector x) { return (IntVector)(((WordVector)x & kAbsMask32) < kInfBits32); }

static inline WordVector round16_of(FloatVector x, ScaleDType format) {
  return format == ScaleDType::kBFloat16 ? to_bfloat16_of(x) : to_float16_of(x);
}

static inline FloatVector widen16_of(WordVector h, ScaleDType format) {
  return format == ScaleDType::kBFloat16 ? from_bfloat16_of(h) : from_float16_of(h);
}

static inline WordVector ceil16_of(FloatVector x, ScaleDType format) {
  if (format == ScaleDType::kBFloat16) return ((WordVector)x + 0xffffu) >> 16;
  const WordVector nearest = to_float16_of(x);
  return from_float16_of(nearest) < x ? nearest + 1u : nearest;
}

static inline WordVector stored_scale_of(FloatVector step, ScaleDType format) {
  return ceil16_of(greater_of(step, all_of(smallest_scale(format))), format);
}

static inline FloatVector zero_aware_of(FloatVector lo, FloatVector hi, FloatVector z, const Codec& codec) {
  const FloatVector steps_inside = (lesser_of(-lo, hi) / (hi - lo)) * code_levels(codec);
  const FloatVector weight = codec.tau > 0.0f ? lesser_of(steps_inside / codec.tau, all_of(1.0f)) : all_of(1.0f);
  return weight * ((z + kShift) - kShift) + (1.0f - weight) * z;
}

static inline BatchParams batch_params(const BatchStats& stats, const Codec& codec) {
  const ScaleDType format = codec.scale_dtype;
  const IntVector empty = (IntVector)(stats.lo == 0.0f) & (IntVector)(stats.hi == 0.0f);
  const FloatVector lo = stats.lo * codec.clip + 0.0f;
  const FloatVector hi = stats.hi * codec.clip + 0.0f;
  const FloatVector width = hi - lo;
  IntVector bad = stats.bad | ~is_finite_of(width);

  BatchParams params{};
  if (codec.quantizer == Quantizer::kSymmetric) {
    params.scale_bits = stored_scale_of(greater_of(-lo, hi) / symmetric_levels(codec), format);
  } else {
    const float levels = code_levels(codec);
    const float z_limit = format == ScaleDType::kBFloat16 ? 64.0f : 512.0f;
    const IntVector positive = (IntVector)(lo >= 0.0f);
    const IntVector negative = ~positive & (IntVector)(hi <= 0.0f);
    const IntVector one_sided = positive | negative;
    const FloatVector far = negative ? -lo : hi;
    const FloatVector near = lesser_of(negative ? -hi + 0.0f : lo, far * (z_limit / (levels + z_limit)));
    const FloatVector low = one_sided ? near : lo;
    params.scale_bits = stored_scale_of((one_sided ? far - near : width) / levels, format);
    FloatVector z = (-low) / widen16_of(params.scale_bits, format);
    if (codec.quantizer == Quantizer::kZeroAware) z = one_sided ? z : zero_aware_of(lo, hi, z, codec);
    params.zero_bits = round16_of(z + 0.0f, format);
    params.scale_bits ^= (WordVector)negative & 0x8000u;
  }
  bad |= ~is_finite_of(widen16_of(params.scale_bits, format));
  const WordVector none = words_of(0);
  params.scale_bits = bad ? words_of(bad_group(format).scale_bits) : empty ? none : params.scale_bits;
  params.zero_bits = bad | empty ? none : params.zero_bits;
  return params;
}

static inline void batch_grid(const BatchParams& params, const Codec& codec, BatchGrid& grid) {
  const bool symmetric = codec.quantizer == Quantizer::kSymmetric;
  const FloatVector scale = widen16_of(params.scale_bits, codec.scale_dtype);
  const IntVector codes = (IntVector)(scale < 0.0f) | (IntVector)(scale > 0.0f);
  const FloatVector none = {};
  const FloatVector most = codes ? all_of(symmetric ? symmetric_levels(codec) : code_levels(codec)) : none;
  store_vector(scale, grid.scale.at);
  store_vector(codes ? 1.0f / scale : none, grid.inverse.at);
  store_vector(symmetric ? none : widen16_of(params.zero_bits, codec.scale_dtype), grid.zero.at);
  store_vector((symmetric ? -most : none) + kShift, grid.code_min.at);
  store_vector(most + kShift, grid.code_max.at);
}

// ---- parameters in a tile -----------------------------------------------------------------------------------------
ECHO_INLINE std::byte* params_at(std::byte* tile, const Codec& codec, int64_t tile_groups, int64_t slot) {
  return tile + params_offset(codec, tile_groups) + slot * param_bytes(codec);
}

static inline void store_params(const BatchParams& params, const Codec& codec, int groups, std::byte* at) {
  if (codec.quantizer == Quantizer::kSymmetric) {
    const HalfVector halves = narrow_to_halves((IntVector)params.scale_bits);
    std::memcpy(at, &halves, 2 * groups);
  } else {
    const WordVector words = params.scale_bits | (params.zero_bits << 16);
    std::memcpy(at, &words, 4 * groups);
  }
}

// What a decoder needs: scale and zero of the grid.
static inline void load_params(const std::byte* at, const Codec& codec, int groups, PerGroup& scale, PerGroup& zero) {
  const ScaleDType format = codec.scale_dtype;
  if (codec.quantizer == Quantizer::kSymmetric) {
    HalfVector halves = {};
    std::memcpy(&halves, at, 2 * groups);
    store_vector(widen16_of((WordVector)widen_halves(halves), format), scale.at);
    store_vector(FloatVector{}, zero.at);
  } else {
    WordVector words = {};
    std::memcpy(&words, at, 4 * groups);
    store_vector(widen16_of(words & 0xffffu, format), scale.at);
    store_vector(widen16_of(words >> 16, format), zero.at);
  }
}

}  // namespace echo::cpu
