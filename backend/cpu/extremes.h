// Passes that bring the values of a batch together in an array, and the extremes that its parameters come from.
#pragma once

#include "code_loops.h"

namespace echo::cpu {

// Extremes of the groups as they are met, as ordered integers: a NaN or an Inf of either sign shows in one of them.
struct Extremes {
  IntVector lo[kBatchGroups];
  IntVector hi[kBatchGroups];
};

// x = values [+ correction], added to what x holds with kAdd; extremes of the result with kStats.
template <bool kCorrect, bool kAdd, bool kStats, typename Source>
static inline void accumulate(const Batch& batch, const Source& values, const float* correction, float* x,
                              Extremes* extremes) {
  Source source = values;
  for (int j = 0; j < batch.groups; ++j) {
    const int base = j * batch.stride;
    source.open(j);
    IntVector lo[2] = {IntVector{} + INT32_MAX, IntVector{} + INT32_MAX};
    IntVector hi[2] = {IntVector{} + INT32_MIN, IntVector{} + INT32_MIN};
    for_blocks(batch.elems_of(j), [&](int at, auto extent) {
      Block value = source.load(at, extent);
      if constexpr (kCorrect) value = sum_of(value, load_block(correction + base + at));
      if constexpr (kAdd) value = sum_of(load_block(x + base + at), value);
      if constexpr (kStats) {
        value = present_or(value, extent, all_of(value.even[0]));
        const IntVector even = ordered((IntVector)value.even);
        const IntVector odd = ordered((IntVector)value.odd);
        lo[0] = lesser_of(even, lo[0]);
        lo[1] = lesser_of(odd, lo[1]);
        hi[0] = greater_of(even, hi[0]);
        hi[1] = greater_of(odd, hi[1]);
      }
      store_block(value, x + base + at);
    });
    if constexpr (kStats) {
      extremes->lo[j] = lesser_of(lo[0], lo[1]);
      extremes->hi[j] = greater_of(hi[0], hi[1]);
    }
  }
}

// Bits of the largest |x| of a group in an array.
static inline uint32_t max_magnitude_of(const float* x, int elems) {
  WordVector most = {};
  for_blocks(elems, [&](int at, auto extent) {
    const Block value = present_or(load_block(x + at), extent, FloatVector{});
    most = greater_of((WordVector)value.even & kAbsMask32, most);
    most = greater_of((WordVector)value.odd & kAbsMask32, most);
  });
  uint32_t largest = 0;
  for (int i = 0; i < kVectorElems; ++i) largest = largest < most[i] ? most[i] : largest;
  return largest;
}

static inline BatchStats batch_stats(const Batch& batch, Extremes& extremes) {
  for (int j = batch.groups; j < kBatchGroups; ++j) extremes.lo[j] = extremes.hi[j] = IntVector{};
  const IntVector lo = fold_each(extremes.lo, [](IntVector p, IntVector q) { return lesser_of(p, q); });
  const IntVector hi = fold_each(extremes.hi, [](IntVector p, IntVector q) { return greater_of(p, q); });
  constexpr auto kInf = static_cast<int32_t>(kInfBits32);
  return BatchStats{
      .lo = (FloatVector)ordered(lo), .hi = (FloatVector)ordered(hi), .bad = (lo <= ~kInf) | (hi >= kInf)};
}

}  // namespace echo::cpu
