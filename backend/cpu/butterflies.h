// The butterflies of the rotation, in vectors: for stride h, element i of a run becomes x[i^h] + x[i] where bit h of i
// is 0, x[i^h] - x[i] where it is 1.
//
// One addition per element and stride, as in the scalar form: x[i^h] + (-x[i]) is x[i^h] - x[i] to the bit.
#pragma once

#include "vectors.h"

namespace echo::cpu {

// Within a vector: partners by a shuffle, signs by flipping the top bit.
template <int kStride>
static inline FloatVector butterfly_inside(FloatVector x) {
  IntVector partner;
  IntVector sign;
  for (int i = 0; i < kVectorElems; ++i) {
    partner[i] = i ^ kStride;
    sign[i] = (i & kStride) ? INT32_MIN : 0;
  }
  FloatVector signed_x = (FloatVector)((IntVector)x ^ sign);
  return __builtin_shuffle(x, partner) + signed_x;
}

// Pre: elems is a multiple of run, run a power of two; x is an array of kMaxGroupElems.
static inline void butterflies(float* x, int elems, int run) {
  if (run < kVectorElems) {
    for (int stride = 1; stride < run; stride *= 2) {
      for (int base = 0; base < elems; base += 2 * stride) {
        for (int i = base; i < base + stride; ++i) {
          const float u = x[i];
          const float v = x[i + stride];
          x[i] = u + v;
          x[i + stride] = u - v;
        }
      }
    }
    return;
  }
  for (int i = 0; i < elems; i += kVectorElems) {
    FloatVector block = load_vector(x + i);
    block = butterfly_inside<1>(block);
    block = butterfly_inside<2>(block);
    if constexpr (kVectorElems > 4) block = butterfly_inside<4>(block);
    if constexpr (kVectorElems > 8) block = butterfly_inside<8>(block);
    store_vector(block, x + i);
  }
  for (int stride = kVectorElems; stride < run; stride *= 2) {
    for (int base = 0; base < elems; base += 2 * stride) {
      for (int i = base; i < base + stride; i += kVectorElems) {
        const FloatVector u = load_vector(x + i);
        const FloatVector v = load_vector(x + i + stride);
        store_vector(u + v, x + i);
        store_vector(u - v, x + i + stride);
      }
    }
  }
}

}  // namespace echo::cpu
