// The three quantizers: parameters of a group from its extremes, one element to a code and back [paper 4.3].
//
// Scalar on purpose: host loops and device threads differ in how they visit a group, not in what they compute. `s` and
// `z` are always the values as stored in 16 bits, widened: encoder and decoder use the same ones.
#pragma once

#include "config.h"
#include "hd.h"
#include "numeric.h"

namespace echo {

// What a group's values amount to before compression; the order in which they are visited does not matter.
struct GroupStats {
  float lo = 0.0f;             // smallest value
  float hi = 0.0f;             // largest value
  uint32_t max_magnitude = 0;  // bits of the largest |x|; at or above kInfBits32 if any value is not finite
};

struct GroupParams {
  uint16_t scale_bits = 0;
  uint16_t zero_bits = 0;
};

// What encode_element needs, widened once per group. A group without codes (bad, zero) has limits 0, 0.
struct GroupGrid {
  float scale = 0.0f;
  float inverse = 0.0f;
  float zero = 0.0f;
  float code_min = 0.0f;
  float code_max = 0.0f;
};

ECHO_HD float code_levels(const Codec& codec) { return codec.bits == 4 ? 15.0f : 255.0f; }
ECHO_HD float symmetric_levels(const Codec& codec) { return codec.bits == 4 ? 7.0f : 127.0f; }

ECHO_HD GroupParams bad_group(ScaleDType format) {
  return GroupParams{format == ScaleDType::kBFloat16 ? kNanBitsBFloat16 : kNanBitsFloat16, 0};
}

ECHO_HD uint16_t stored_scale(float step, ScaleDType format) {
  return ceil16(greater(step, smallest_scale(format)), format);
}

// Groups of one sign, given as 0 <= lo <= hi: the grid covers [lo', hi], lo' low enough that |z| stays within `z_limit`
// and so within 1/8 step of its 16-bit rounding.
ECHO_HD GroupParams one_sided_params(float lo, float hi, float levels, ScaleDType format) {
  const float z_limit = format == ScaleDType::kBFloat16 ? 64.0f : 512.0f;
  const float low = lesser(lo, hi * (z_limit / (levels + z_limit)));
  const uint16_t scale_bits = stored_scale((hi - low) / levels, format);
  const float z = (-low) / widen16(scale_bits, format);
  return GroupParams{scale_bits, round16(z + 0.0f, format)};
}

// Groups that straddle zero. zero_aware moves the zero-point to an integer as zero lies further inside the range.
ECHO_HD GroupParams straddling_params(float lo, float hi, float levels, const Codec& codec) {
  const float width = hi - lo;
  const uint16_t scale_bits = stored_scale(width / levels, codec.scale_dtype);
  const float z = (-lo) / widen16(scale_bits, codec.scale_dtype);
  if (codec.quantizer == Quantizer::kAsymmetric) {
    return GroupParams{scale_bits, round16(z + 0.0f, codec.scale_dtype)};
  }
  const float steps_inside = (lesser(-lo, hi) / width) * levels;
  const float weight = codec.tau > 0.0f ? lesser(steps_inside / codec.tau, 1.0f) : 1.0f;
  const float blended = weight * round_to_int(z) + (1.0f - weight) * z;
  return GroupParams{scale_bits, round16(blended + 0.0f, codec.scale_dtype)};
}

ECHO_HD GroupParams group_params(const GroupStats& stats, const Codec& codec) {
  const ScaleDType format = codec.scale_dtype;
  if (stats.max_magnitude >= kInfBits32) return bad_group(format);
  if (stats.max_magnitude == 0) return GroupParams{};
  const float lo = stats.lo * codec.clip + 0.0f;
  const float hi = stats.hi * codec.clip + 0.0f;
  if (!is_finite(hi - lo)) return bad_group(format);

  GroupParams params;
  if (codec.quantizer == Quantizer::kSymmetric) {
    params.scale_bits = stored_scale(greater(-lo, hi) / symmetric_levels(codec), format);
  } else if (lo >= 0.0f) {
    params = one_sided_params(lo, hi, code_levels(codec), format);
  } else if (hi <= 0.0f) {
    params = one_sided_params(-hi + 0.0f, -lo, code_levels(codec), format);
    params.scale_bits ^= 0x8000u;
  } else {
    params = straddling_params(lo, hi, code_levels(codec), codec);
  }
  return is_finite(widen16(params.scale_bits, format)) ? params : bad_group(format);
}

ECHO_HD GroupGrid group_grid(const GroupParams& params, const Codec& codec) {
  GroupGrid grid;
  grid.scale = widen16(params.scale_bits, codec.scale_dtype);
  grid.zero = codec.quantizer == Quantizer::kSymmetric ? 0.0f : widen16(params.zero_bits, codec.scale_dtype);
  if (grid.scale == 0.0f || is_nan(grid.scale)) return grid;
  grid.inverse = 1.0f / grid.scale;
  const bool symmetric = codec.quantizer == Quantizer::kSymmetric;
  grid.code_max = symmetric ? symmetric_levels(codec) : code_levels(codec);
  grid.code_min = symmetric ? -grid.code_max : 0.0f;
  return grid;
}

// The code as an integral float. The limits are integers, so clamping before rounding gives what clamping after it
// would.
ECHO_HD float encode_element(float x, const GroupGrid& grid) {
  const float position = x * grid.inverse + grid.zero;
  return round_to_int(lesser(greater(position, grid.code_min), grid.code_max));
}

ECHO_HD float decode_element(float code, const GroupGrid& grid) { return grid.scale * (code - grid.zero); }

// Codes of symmetric groups are two's complement in `bits` bits.
ECHO_HD float code_value(uint32_t code, const Codec& codec) {
  if (codec.quantizer != Quantizer::kSymmetric) return static_cast<float>(code);
  const uint32_t sign = codec.bits == 4 ? 0x8u : 0x80u;
  return static_cast<float>(static_cast<int32_t>(code ^ sign) - static_cast<int32_t>(sign));
}

}  // namespace echo
