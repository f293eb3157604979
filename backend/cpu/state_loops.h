// Reads and writes the compensator's state of one group in its storage format; offsets come from core/tile.h.
#pragma once

#include <cstring>

#include "../core/site.h"
#include "group_loops.h"

namespace echo::cpu {

// One stored average (c or m1): elements, and for int8 the scales behind them.
static inline std::byte* average_base(const Site& site, int which) {
  return static_cast<std::byte*>(site.state) + which * state_average_bytes(site.plan);
}

static inline void load_average(const Site& site, int which, int64_t group, int elems, float* out) {
  const StateDType dtype = site.plan.feedback.state_dtype;
  const std::byte* base = average_base(site, which);
  const int64_t first = group * site.plan.codec.group_elems;
  switch (dtype) {
    case StateDType::kFloat32:
      std::memcpy(out, base + 4 * first, sizeof(float) * elems);
      return;
    case StateDType::kBFloat16:
      load_group(base, DType::kBFloat16, first, elems, out);
      return;
    case StateDType::kFloat16:
      load_group(base, DType::kFloat16, first, elems, out);
      return;
    case StateDType::kInt8:
      break;
  }
  uint16_t scale_bits;
  std::memcpy(&scale_bits, base + state_scales_offset(site.plan) + 2 * group, 2);
  const float scale = from_bfloat16(scale_bits);
  int i = 0;
  for (; i + kVectorElems <= elems; i += kVectorElems) {
    const IntVector codes = (widen_bytes(base + first + i) ^ 0x80) - 0x80;
    store_vector(scale * __builtin_convertvector(codes, FloatVector), out + i);
  }
  for (; i < elems; ++i) out[i] = scale * static_cast<float>(static_cast<int8_t>(base[first + i]));
}

static inline void store_average(const Site& site, int which, int64_t group, int elems, const float* values) {
  const StateDType dtype = site.plan.feedback.state_dtype;
  std::byte* base = average_base(site, which);
  const int64_t first = group * site.plan.codec.group_elems;
  if (dtype == StateDType::kFloat32) {
    std::memcpy(base + 4 * first, values, sizeof(float) * elems);
    return;
  }
  if (dtype != StateDType::kInt8) {
    alignas(64) uint16_t raw[kMaxGroupElems];
    for (int i = 0; i < elems; ++i) raw[i] = store_state16(values[i], dtype);
    std::memcpy(base + 2 * first, raw, sizeof(uint16_t) * elems);
    return;
  }
  const uint16_t scale_bits = int8_state_scale(group_max_magnitude(values, elems));
  const float inverse = int8_state_inverse(scale_bits);
  constexpr float kShift = 12582912.0f;  // as in round_to_int; the low bits of the shifted value are the code
  const IntVector shift_bits = (IntVector)(FloatVector{} + kShift);
  const FloatVector most = FloatVector{} + 127.0f;
  int i = 0;
  for (; i + kVectorElems <= elems; i += kVectorElems) {
    const FloatVector position = load_vector(values + i) * inverse;
    const FloatVector shifted = lesser_of(greater_of(position, -most), most) + kShift;
    const ByteVector codes = __builtin_convertvector((IntVector)shifted - shift_bits, ByteVector);
    std::memcpy(base + first + i, &codes, sizeof(codes));
  }
  for (; i < elems; ++i) {
    base[first + i] = static_cast<std::byte>(static_cast<int32_t>(encode_int8_state(values[i], inverse)));
  }
  std::memcpy(base + state_scales_offset(site.plan) + 2 * group, &scale_bits, 2);
}

// x' = x + c, except at the first site of a pass.
static inline void apply_correction(const Site& site, int64_t group, int elems, float* x) {
  if (!site.plan.feedback.enabled || site.plan.first_site) return;
  GroupArray c;
  load_average(site, 0, group, elems, c.at);
  for (int i = 0; i < elems; ++i) x[i] = x[i] + c.at[i];
}

// `residual` holds u of each element as computed; values that are not finite count as 0.
static inline void update_state(const Site& site, int64_t group, int elems, const float* residual) {
  const Feedback fb = site.plan.feedback;
  const bool first = site.plan.first_site;
  const bool two = fb.k2 != 0.0f;
  GroupArray c;
  GroupArray m1;
  if (!first) {
    load_average(site, 0, group, elems, c.at);
    if (two) load_average(site, 1, group, elems, m1.at);
  }
  // One loop per case, so that none has a branch inside.
  if (first) {
    for (int i = 0; i < elems; ++i) {
      const StateElem next = start_element(residual[i], fb);
      c.at[i] = next.c;
      m1.at[i] = next.m1;
    }
  } else if (two) {
    int i = 0;
    for (; i + kVectorElems <= elems; i += kVectorElems) {
      const FloatVector u = finite_or_zero_of(load_vector(residual + i));
      const FloatVector old_m1 = load_vector(m1.at + i);
      const FloatVector next = (fb.beta2 * load_vector(c.at + i) + fb.k2 * old_m1) + fb.k3 * u;
      store_vector(finite_or_zero_of(next), c.at + i);
      store_vector(finite_or_zero_of(fb.beta1 * old_m1 + fb.k1 * u), m1.at + i);
    }
    for (; i < elems; ++i) {
      const StateElem next = update_two_averages(StateElem{c.at[i], m1.at[i]}, residual[i], fb);
      c.at[i] = next.c;
      m1.at[i] = next.m1;
    }
  } else {
    int i = 0;
    for (; i + kVectorElems <= elems; i += kVectorElems) {
      const FloatVector u = finite_or_zero_of(load_vector(residual + i));
      store_vector(finite_or_zero_of(fb.beta2 * load_vector(c.at + i) + fb.k3 * u), c.at + i);
    }
    for (; i < elems; ++i) c.at[i] = update_one_average(c.at[i], residual[i], fb);
  }
  store_average(site, 0, group, elems, c.at);
  if (two) store_average(site, 1, group, elems, m1.at);
}

}  // namespace echo::cpu
