// The compensator's arithmetic per element, and its int8 storage per group [paper 5].
//
//   x' = x + c                 before quantizing, not at the first site of a pass
//   c  = b2*c + k2*m1 + k3*u   after it, from the old c and m1, each product and sum rounded on its own, left to right
//   m1 = b1*m1 + k1*u          only where k2 != 0
#pragma once

#include "config.h"
#include "hd.h"
#include "numeric.h"

namespace echo {

struct StateElem {
  float c = 0.0f;
  float m1 = 0.0f;
};

// First site of a pass: there is no old state.
ECHO_HD StateElem start_element(float residual, const Feedback& fb) {
  const float u = finite_or_zero(residual);
  return StateElem{finite_or_zero(fb.k3 * u), finite_or_zero(fb.k1 * u)};
}

ECHO_HD StateElem update_two_averages(StateElem old, float residual, const Feedback& fb) {
  const float u = finite_or_zero(residual);
  const float c = (fb.beta2 * old.c + fb.k2 * old.m1) + fb.k3 * u;
  const float m1 = fb.beta1 * old.m1 + fb.k1 * u;
  return StateElem{finite_or_zero(c), finite_or_zero(m1)};
}

ECHO_HD float update_one_average(float old_c, float residual, const Feedback& fb) {
  const float fresh = fb.k3 * finite_or_zero(residual);
  return finite_or_zero(fb.beta2 == 0.0f ? fresh : fb.beta2 * old_c + fresh);
}

ECHO_HD StateElem update_element(StateElem old, float residual, bool first_site, const Feedback& fb) {
  if (first_site) return start_element(residual, fb);
  if (fb.k2 != 0.0f) return update_two_averages(old, residual, fb);
  return StateElem{update_one_average(old.c, residual, fb), 0.0f};
}

// 16-bit storage; a value that rounds to Inf is stored as 0.
ECHO_HD uint16_t store_state16(float value, StateDType dtype) {
  const uint16_t stored = dtype == StateDType::kBFloat16 ? to_bfloat16(value) : to_float16(value);
  const uint16_t inf = dtype == StateDType::kBFloat16 ? 0x7f80u : 0x7c00u;
  return static_cast<uint16_t>((stored & 0x7fffu) == inf ? 0 : stored);
}

ECHO_HD float load_state16(uint16_t stored, StateDType dtype) {
  return dtype == StateDType::kBFloat16 ? from_bfloat16(stored) : from_float16(stored);
}

// int8: symmetric over the group with 127 levels and a bf16 scale; a group of zeros has scale 0 and codes 0.
ECHO_HD uint16_t int8_state_scale(uint32_t max_magnitude) {
  if (max_magnitude == 0) return 0;
  return ceil16(greater(float_of(max_magnitude) / 127.0f, smallest_scale(ScaleDType::kBFloat16)),
                ScaleDType::kBFloat16);
}

ECHO_HD float int8_state_inverse(uint16_t scale_bits) {
  return scale_bits == 0 ? 0.0f : 1.0f / from_bfloat16(scale_bits);
}

ECHO_HD float encode_int8_state(float value, float inverse) {
  return round_to_int(lesser(greater(value * inverse, -127.0f), 127.0f));
}

}  // namespace echo
