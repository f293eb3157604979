// A batch: the groups that the stages take through one phase at a time, so that the long chains of one group (extremes,
// divisions, roundings) overlap with those of the others, and parameters are computed for all of them in vectors.
#pragma once

#include "../core/site.h"
#include "../core/tile.h"
#include "blocks.h"

namespace echo::cpu {

// Elements of a batch where groups are small enough for several: three arrays of them leave room in a first-level cache
// of 32 KiB for what streams through.
static constexpr int kBatchElems = 2048;
static constexpr int kBatchGroups = kVectorElems;
static_assert(kBatchElems >= kMaxGroupElems && kMaxGroupElems % kBlockElems == 0);

struct Batch {
  int64_t first = 0;  // group of the tensor
  int groups = 0;     // 1 .. kBatchGroups
  int group_elems = 0;
  int last_elems = 0;  // of the last group, which may be partial
  int stride = 0;      // elements from group to group in the arrays: whole blocks

  int elems_of(int j) const { return j + 1 == groups ? last_elems : group_elems; }
  int64_t elem_of(int j) const { return (first + j) * group_elems; }
};

// One value per group of a batch.
struct alignas(64) PerGroup {
  float at[kBatchGroups];
};

// fp32 of a batch in blocks, group after group at `stride`.
struct alignas(64) BatchArray {
  float at[kBatchElems];
};

// Asks for the bytes of one group, long before they are used: hardware stops at the end of a page, which is about one
// batch of 16-bit elements, and starts anew behind it.
template <bool kWrite>
ECHO_INLINE void prefetch_group(const void* base, int64_t group, int64_t group_bytes) {
  const std::byte* from = static_cast<const std::byte*>(base) + group * group_bytes;
  for (int64_t at = 0; at < group_bytes; at += 64) __builtin_prefetch(from + at, kWrite ? 1 : 0);
}

// visit(batch) over consecutive batches of `groups`.
template <typename Visit>
ECHO_INLINE void for_batches(const Plan& plan, GroupRange groups, Visit&& visit) {
  Batch batch;
  batch.group_elems = plan.codec.group_elems;
  batch.stride = (batch.group_elems + kBlockElems - 1) / kBlockElems * kBlockElems;
  const int64_t most = min_i64(kBatchGroups, kBatchElems / batch.stride);
  for (batch.first = groups.begin; batch.first < groups.end; batch.first += batch.groups) {
    batch.groups = static_cast<int>(min_i64(most, groups.end - batch.first));
    batch.last_elems = group_elems_at(plan, batch.first + batch.groups - 1);
    visit(static_cast<const Batch&>(batch));
  }
}

template <typename Visit>
ECHO_INLINE void with_flag(bool flag, Visit&& visit) {
  if (flag) {
    visit(std::true_type{});
  } else {
    visit(std::false_type{});
  }
}

template <typename Visit>
ECHO_INLINE void with_bits(int bits, Visit&& visit) {
  if (bits == 4) {
    visit(std::integral_constant<int, 4>{});
  } else {
    visit(std::integral_constant<int, 8>{});
  }
}

template <typename Visit>
ECHO_INLINE void with_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(std::integral_constant<DType, DType::kFloat32>{});
    case DType::kBFloat16:
      return visit(std::integral_constant<DType, DType::kBFloat16>{});
    case DType::kFloat16:
      return visit(std::integral_constant<DType, DType::kFloat16>{});
  }
}

}  // namespace echo::cpu
