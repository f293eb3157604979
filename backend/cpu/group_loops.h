// Loops over one group of at most kMaxGroupElems elements held in an aligned fp32 array: the host's way of visiting
// what core/ defines.
//
// Everything here has internal linkage (see core/hd.h) and is written so that compilers vectorise it without reordering
// any sum. `elems` is the number of elements present; nothing is read or written beyond it in caller memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../core/feedback.h"
#include "../core/quantizer.h"
#include "../core/rotation.h"
#include "../core/tile.h"
#include "butterflies.h"
#include "code_loops.h"

namespace echo::cpu {

struct alignas(64) GroupArray {
  float at[kMaxGroupElems];
};

struct SignTable {
  uint32_t at[kMaxGroupElems];
  constexpr SignTable() : at() {
    for (uint32_t i = 0; i < kMaxGroupElems; ++i) at[i] = rotation_sign_bit(i);
  }
};
static constexpr SignTable kSigns;

static inline void load_group(const void* tensor, DType dtype, int64_t first_elem, int elems, float* out) {
  const std::byte* source = static_cast<const std::byte*>(tensor) + first_elem * dtype_bytes(dtype);
  if (dtype == DType::kFloat32) {
    std::memcpy(out, source, sizeof(float) * elems);
    return;
  }
  if (dtype == DType::kBFloat16) {
    int i = 0;
    for (; i + kVectorElems <= elems; i += kVectorElems) {
      HalfVector half;
      std::memcpy(&half, source + 2 * i, sizeof(half));
      store_vector((FloatVector)(__builtin_convertvector(half, IntVector) << 16), out + i);
    }
    for (; i < elems; ++i) {
      uint16_t half;
      std::memcpy(&half, source + 2 * i, sizeof(half));
      out[i] = from_bfloat16(half);
    }
    return;
  }
  alignas(64) uint16_t raw[kMaxGroupElems];
  std::memcpy(raw, source, sizeof(uint16_t) * elems);
  for (int i = 0; i < elems; ++i) out[i] = from_float16(raw[i]);
}

static inline void store_group(const float* values, DType dtype, int64_t first_elem, int elems, void* tensor) {
  std::byte* target = static_cast<std::byte*>(tensor) + first_elem * dtype_bytes(dtype);
  if (dtype == DType::kFloat32) {
    GroupArray canonical;
    for (int i = 0; i < elems; ++i) canonical.at[i] = canonical_nan(values[i]);
    std::memcpy(target, canonical.at, sizeof(float) * elems);
    return;
  }
  if (dtype == DType::kBFloat16) {
    int i = 0;
    for (; i + kVectorElems <= elems; i += kVectorElems) {
      const HalfVector half = to_bfloat16_vector(load_vector(values + i));
      std::memcpy(target + 2 * i, &half, sizeof(half));
    }
    for (; i < elems; ++i) {
      const uint16_t half = to_bfloat16(values[i]);
      std::memcpy(target + 2 * i, &half, sizeof(half));
    }
    return;
  }
  alignas(64) uint16_t raw[kMaxGroupElems];
  for (int i = 0; i < elems; ++i) raw[i] = to_float16(values[i]);
  std::memcpy(target, raw, sizeof(uint16_t) * elems);
}

static inline void scale_group(float* x, int elems, float factor) {
  for (int i = 0; i < elems; ++i) x[i] = x[i] * factor;
}

static inline void flip_signs(float* x, int elems, int run) {
  for (int base = 0; base < elems; base += run) {
    for (int i = 0; i < run; ++i) x[base + i] = flip_sign(x[base + i], kSigns.at[i]);
  }
}

static inline void rotate_entry(float* x, int elems, const Codec& codec) {
  if (!is_rotated(codec, elems)) return;
  const int run = 1 << codec.rotation_log2;
  flip_signs(x, elems, run);
  butterflies(x, elems, run);
  const float factor = rotation_entry_factor(codec);
  if (factor != 1.0f) scale_group(x, elems, factor);
}

static inline void rotate_exit(float* x, int elems, const Codec& codec) {
  if (!is_rotated(codec, elems)) return;
  const int run = 1 << codec.rotation_log2;
  butterflies(x, elems, run);
  scale_group(x, elems, rotation_exit_factor(codec));
  flip_signs(x, elems, run);
}

static inline uint32_t group_max_magnitude(const float* x, int elems) {
  uint32_t largest = 0;
  int i = 0;
  if (elems >= kVectorElems) {
    IntVector most = {};
    for (; i + kVectorElems <= elems; i += kVectorElems) {
      most = greater_of((IntVector)load_vector(x + i) & static_cast<int32_t>(kAbsMask32), most);
    }
    largest = static_cast<uint32_t>(fold(most, [](IntVector p, IntVector q) { return greater_of(p, q); }));
  }
  for (; i < elems; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & kAbsMask32;
    largest = largest < magnitude ? magnitude : largest;
  }
  return largest;
}

// A NaN may be dropped from the extremes; max_magnitude tells. Several vectors at a time, so that no comparison waits
// for the one before.
static inline GroupStats group_stats(const float* x, int elems) {
  constexpr int kColumns = 2;
  constexpr int kBlock = kColumns * kVectorElems;
  GroupStats stats{x[0], x[0], 0};
  int i = 0;
  if (elems >= kBlock) {
    FloatVector lo[kColumns];
    FloatVector hi[kColumns];
    IntVector magnitude[kColumns];
    const auto visit = [&](int column, bool first) {
      const FloatVector v = load_vector(x + i + column * kVectorElems);
      const IntVector m = (IntVector)v & static_cast<int32_t>(kAbsMask32);
      lo[column] = first ? v : lesser_of(v, lo[column]);
      hi[column] = first ? v : greater_of(v, hi[column]);
      magnitude[column] = first ? m : greater_of(m, magnitude[column]);
    };
    for (int column = 0; column < kColumns; ++column) visit(column, true);
    for (i = kBlock; i + kBlock <= elems; i += kBlock) {
      for (int column = 0; column < kColumns; ++column) visit(column, false);
    }
    const FloatVector low = lesser_of(lo[0], lo[1]);
    const FloatVector high = greater_of(hi[0], hi[1]);
    const IntVector most = greater_of(magnitude[0], magnitude[1]);
    stats.lo = fold(low, [](FloatVector p, FloatVector q) { return lesser_of(p, q); });
    stats.hi = fold(high, [](FloatVector p, FloatVector q) { return greater_of(p, q); });
    stats.max_magnitude = static_cast<uint32_t>(fold(most, [](IntVector p, IntVector q) { return greater_of(p, q); }));
  }
  for (; i < elems; ++i) {
    stats.lo = lesser(x[i], stats.lo);
    stats.hi = greater(x[i], stats.hi);
    const uint32_t m = bits_of(x[i]) & kAbsMask32;
    stats.max_magnitude = stats.max_magnitude < m ? m : stats.max_magnitude;
  }
  return stats;
}

static inline GroupParams load_params(const std::byte* at, const Codec& codec) {
  GroupParams params;
  std::memcpy(&params.scale_bits, at, 2);
  if (codec.quantizer != Quantizer::kSymmetric) std::memcpy(&params.zero_bits, at + 2, 2);
  return params;
}

static inline void store_params(const GroupParams& params, const Codec& codec, std::byte* at) {
  std::memcpy(at, &params.scale_bits, 2);
  if (codec.quantizer != Quantizer::kSymmetric) std::memcpy(at + 2, &params.zero_bits, 2);
}

}  // namespace echo::cpu
