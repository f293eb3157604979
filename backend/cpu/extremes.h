// Passes that bring the values of a batch together in an array, and the extremes that its parameters come from.
#pragma once

#include <limits>

#include "code_loops.h"

namespace echo::cpu {

// Extremes of the groups as they are met. A NaN may be missing from them and an Inf is not looked for; both make the
// sum of all values other than finite, and then the groups are searched. A sum that overflows costs the search, no
// more.
struct Extremes {
  FloatVector lo[kBatchGroups];
  FloatVector hi[kBatchGroups];
  FloatVector sum;
};

// x = source [+ correction], added to what x holds with kAdd; extremes of the result with kStats.
template <bool kCorrect, bool kAdd, bool kStats, typename Source>
static inline void accumulate(const Batch& batch, Source source, const float* correction, float* x,
                              Extremes* extremes) {
  const FloatVector infinity = all_of(std::numeric_limits<float>::infinity());
  Block sum = {};
  for (int j = 0; j < batch.groups; ++j) {
    const int base = j * batch.stride;
    source.open(j);
    Block lo{infinity, infinity};
    Block hi{-infinity, -infinity};
    for_blocks(batch.elems_of(j), [&](int at, auto extent) {
      Block value = source.load(at, extent);
      if constexpr (kCorrect) value = sum_of(value, load_block(correction + base + at));
      if constexpr (kAdd) value = sum_of(load_block(x + base + at), value);
      if constexpr (kStats) {
        value = present_or(value, extent, all_of(value.even[0]));
        lo = Block{lesser_of(value.even, lo.even), lesser_of(value.odd, lo.odd)};
        hi = Block{greater_of(value.even, hi.even), greater_of(value.odd, hi.odd)};
        sum = sum_of(sum, value);
      }
      store_block(value, x + base + at);
    });
    if constexpr (kStats) {
      extremes->lo[j] = lesser_of(lo.even, lo.odd);
      extremes->hi[j] = greater_of(hi.even, hi.odd);
    }
  }
  if constexpr (kStats) extremes->sum = sum.even + sum.odd;
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

// Pre: `x` is what `extremes` was taken of.
static inline BatchStats batch_stats(const Batch& batch, const float* x, Extremes& extremes) {
  BatchStats stats;
  stats.bad = IntVector{};
  const IntVector finite = is_finite_of(extremes.sum);
  bool search = false;
  for (int i = 0; i < kVectorElems; ++i) search = search || finite[i] == 0;
  for (int j = 0; search && j < batch.groups; ++j) {
    stats.bad[j] = max_magnitude_of(x + j * batch.stride, batch.elems_of(j)) >= kInfBits32 ? -1 : 0;
  }
  for (int j = batch.groups; j < kBatchGroups; ++j) extremes.lo[j] = extremes.hi[j] = FloatVector{};
  stats.lo = fold_each(extremes.lo, [](FloatVector p, FloatVector q) { return lesser_of(p, q); });
  stats.hi = fold_each(extremes.hi, [](FloatVector p, FloatVector q) { return greater_of(p, q); });
  return stats;
}

}  // namespace echo::cpu
