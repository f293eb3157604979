// Signs and scale factors of the rotation; the butterflies themselves are (u+v, u-v) at strides 1, 2, 4, ....
//
// A run of 2^m elements is multiplied by signs, then by the Walsh-Hadamard matrix in natural order, in fp32; the way
// back is butterflies, the exact factor 2^-m, signs. With fp16 scales the factor is split between the two ways, so that
// entry does not leave fp16's range.
//
// What is delivered goes the way back as codes q, not as decoded values s * (q - z): the butterflies are then whole
// numbers of at most 2^m * 255 < 2^24, exact in fp32 and in any order, and so in whatever arithmetic holds them. z is
// equal over the run, so that it reaches the first element alone.
//   t_0 = fl(h_0 - 2^m * z), t_j = h_j        h the butterflies of the codes
//   y_j = fl(fl(s * f) * t_j)                 f the exit factor times 2^-k of the rescale
#pragma once

#include "config.h"
#include "hd.h"
#include "numeric.h"

namespace echo {

// The 32-bit finalizer of MurmurHash3 (Appleby, public domain).
ECHO_HD constexpr uint32_t fmix32(uint32_t h) {
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  h ^= h >> 16;
  return h;
}

// Bit to xor into element `index` of a run, so that odd hashes negate.
ECHO_HD constexpr uint32_t rotation_sign_bit(uint32_t index) { return (fmix32(index + 1u) & 1u) << 31; }

static_assert(kMaxGroupElems * 255 < 1 << 24, "butterflies of codes are exact in fp32");

ECHO_HD float flip_sign(float x, uint32_t sign_bit) { return float_of(bits_of(x) ^ sign_bit); }

ECHO_HD float rotation_entry_factor(const Codec& codec) {
  return codec.scale_dtype == ScaleDType::kFloat16 ? power_of_two(-((codec.rotation_log2 + 1) / 2)) : 1.0f;
}

ECHO_HD float rotation_exit_factor(const Codec& codec) {
  const int32_t m = codec.rotation_log2;
  return power_of_two(codec.scale_dtype == ScaleDType::kFloat16 ? -(m / 2) : -m);
}

// fl(s * f); `rescale_down` is 2^-k.
ECHO_HD float exit_scale(float scale, float rescale_down, const Codec& codec) {
  return scale * (rotation_exit_factor(codec) * rescale_down);
}

// 2^m * z.
ECHO_HD float exit_offset(float zero, const Codec& codec) { return zero * power_of_two(codec.rotation_log2); }

// Partial groups are not rotated.
ECHO_HD bool is_rotated(const Codec& codec, int32_t elems) {
  return codec.rotation_log2 > 0 && elems == codec.group_elems;
}

}  // namespace echo
