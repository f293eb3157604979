// One group in each stage, whatever carries its codes: between the loads and the stores everything stays in registers.
#pragma once

#include "exit_device.cuh"
#include "residual_device.cuh"
#include "stages.h"

namespace echo::cuda {

// Groups that the lanes of a warp hold side by side.
inline int32_t groups_per_task(const Codec& codec) {
  int32_t lanes = 1;
  while (kLaneElems * lanes < codec.group_elems) lanes *= 2;
  return kWarpLanes / lanes;
}

// The groups of a task, so many of a tile side by side in a warp; `full` of the tile's groups are whole. The tensor's
// partial group, the last before `end`, is a task of its own, so that all lanes agree on whether to rotate.
template <Spread kSpread>
__device__ __forceinline__ GroupAt group_of_task(const Lane<kSpread>& lane, int32_t task, int32_t full, int64_t end) {
  const Plan& plan = lane.site.plan;
  const int32_t side = groups_side_by_side(lane.lanes_log2);
  const int32_t first = task * side;
  GroupAt at;
  if (first < full) {
    at.slot = first + group_in_task(lane.lanes_log2);
    at.elems = at.slot < full ? plan.codec.group_elems : 0;
    at.rotated = is_rotated(plan.codec, plan.codec.group_elems);
    at.dense = first + side <= full && plan.codec.group_elems == kLaneElems << lane.lanes_log2;
  } else {
    at.slot = full;
    at.elems = group_in_task(lane.lanes_log2) == 0 ? group_elems_at(plan, end - 1) : 0;
  }
  return at;
}

inline StateKind state_kind(const Plan& plan) {
  if (!plan.feedback.enabled) return StateKind::kNone;
  return plan.feedback.state_dtype == StateDType::kInt8 ? StateKind::kInt8 : StateKind::kWide;
}

// push: what this rank sends of a group that another owns.
template <int kBits, DType kDType, StateKind kState, Spread kSpread>
__device__ __forceinline__ void push_group(const Lane<kSpread>& lane, const GroupAt& at, Stored<kDType, kState>& stored,
                                           const TileView<std::byte>& tile) {
  float x[kLaneElems];
  const Extremes extremes = contribution<true>(lane, at, stored, x);
  const Encoded<kBits> encoded = encode_group<kBits>(lane, at, x, extremes);
  store_encoded(lane, at, encoded, tile);
  update_after_push(lane, at, x, stored, encoded);
}

// What the other ranks pushed of this rank's segment, one rank's copy at a time.
template <int kBits>
struct Copies {
  const Plan& plan;
  int64_t tile_groups;
  PeerTiles tiles;

  __device__ __forceinline__ int32_t after(int32_t rank) const { return rank + 1 == plan.rank ? rank + 2 : rank + 1; }
  template <Spread kSpread>
  __device__ __forceinline__ Encoded<kBits> load(const Lane<kSpread>& lane, const GroupAt& at, int32_t rank) const {
    return load_encoded<kBits>(lane, at, tile(rank));
  }
  __device__ __forceinline__ TileView<const std::byte> tile(int32_t rank) const {
    const int32_t place = rank > tiles.absent ? rank - 1 : rank;
    return view_tile(plan.codec, tile_groups, tiles.base + place * tiles.stride_bytes);
  }
};

// What reduce loads of a group before it starts: this rank's own part, and the copy of the first other rank.
template <DType kDType, int kBits, StateKind kState>
struct Addends {
  Stored<kDType, kState> own;
  Encoded<kBits> first;
};

template <DType kDType, StateKind kState, int kBits, Spread kSpread>
__device__ __forceinline__ Addends<kDType, kBits, kState> load_addends(const Copies<kBits>& copies,
                                                                       const Lane<kSpread>& lane, const GroupAt& at) {
  return {load_stored<kDType, kState>(lane, at), copies.load(lane, at, copies.after(-1))};
}

// sum += the copies of ranks begin, begin + 1, ... end - 1 but this one's, in that order; `arriving` is the first.
template <int kBits, Spread kSpread>
__device__ __forceinline__ void add_copies(const Copies<kBits>& copies, const Lane<kSpread>& lane, const GroupAt& at,
                                           Encoded<kBits>& arriving, int32_t begin, int32_t end,
                                           float (&sum)[kLaneElems]) {
#pragma unroll 1
  for (int32_t rank = begin; rank < end;) {
    const Encoded<kBits> copy = arriving;
    rank = copies.after(rank);
    if (rank < lane.site.plan.world_size) arriving = copies.load(lane, at, rank);
    for_each_decoded(lane, copy, [&](int part, const float(&term)[kChunkElems]) {
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) sum[kChunkElems * part + i] = sum[kChunkElems * part + i] + term[i];
    });
  }
}

// This rank's own contribution and what all others sent, added up in rank order. kLate: this rank is none of the first
// two. Those commute, so that elsewhere its own may come first, which needs no registers for a second sum.
template <bool kLate, DType kDType, int kBits, StateKind kState, Spread kSpread>
__device__ __forceinline__ void sum_ranks(const Copies<kBits>& copies, const Lane<kSpread>& lane, const GroupAt& at,
                                          Addends<kDType, kBits, kState>& addends, float (&sum)[kLaneElems]) {
  const Plan& plan = lane.site.plan;
  if constexpr (!kLate) {
    contribution<false>(lane, at, addends.own, sum);
    add_copies(copies, lane, at, addends.first, copies.after(-1), plan.world_size, sum);
  } else {
    float below[kLaneElems];
    // -0 + y is y for every y, -0 included: the sum starts from rank 0's value.
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) below[e] = -0.0f;
    add_copies(copies, lane, at, addends.first, 0, plan.rank, below);
    contribution<false>(lane, at, addends.own, sum);
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) sum[e] = below[e] + sum[e];
    add_copies(copies, lane, at, addends.first, plan.rank + 1, plan.world_size, sum);
  }
}

// reduce: the sum of a group that this rank owns, handed to store(const Encoded<kBits>&).
template <bool kLate, DType kDType, int kBits, StateKind kState, Spread kSpread, typename Store>
__device__ __forceinline__ void reduce_group(const Copies<kBits>& copies, const Lane<kSpread>& lane, const GroupAt& at,
                                             Addends<kDType, kBits, kState>& addends, Store store) {
  float sum[kLaneElems];
  sum_ranks<kLate>(copies, lane, at, addends, sum);
  const Extremes extremes = group_extremes(lane, at, sum);
  const Encoded<kBits> encoded = encode_group<kBits>(lane, at, sum, extremes);
  store(encoded);
  update_after_reduce(lane, at, sum, addends.own, encoded);
}

// What everyone decodes, delivered.
template <DType kDType, int kBits, Spread kSpread>
__device__ __forceinline__ void deliver(const Lane<kSpread>& lane, const GroupAt& at, const Encoded<kBits>& encoded) {
  float decoded[kLaneElems];
  if (at.rotated) {
    exit_elements(lane, encoded, decoded);
  } else {
    decode_group(lane, encoded, decoded);
  }
  store_elements<kDType>(lane, at, decoded, may_decode_to_nan(lane, encoded.params));
}

// tail. Pre: the tensor still holds this rank's contribution.
template <DType kDType, StateKind kState, int kBits, Spread kSpread>
__device__ __forceinline__ void tail_group(const Lane<kSpread>& lane, const GroupAt& at,
                                           const Encoded<kBits>& encoded) {
  update_from_result<kDType, kState>(lane, at, encoded);
  deliver<kDType>(lane, at, encoded);
}

// By `threads` threads, of which this is number `thread`: the elements of these groups become NaN.
template <DType kDType>
__device__ __forceinline__ void fill_with_nan(const Site& site, const GroupRange& groups, int64_t thread,
                                              int64_t threads) {
  const int64_t g = site.plan.codec.group_elems;
  const int64_t end = min_i64(site.plan.numel, groups.end * g);
#pragma unroll 1
  for (int64_t i = groups.begin * g + thread; i < end; i += threads) {
    if constexpr (kDType == DType::kFloat32) {
      static_cast<uint32_t*>(site.tensor)[i] = kNanBits32;
    } else {
      static_cast<uint16_t*>(site.tensor)[i] = kDType == DType::kBFloat16 ? kNanBitsBFloat16 : kNanBitsFloat16;
    }
  }
}

}  // namespace echo::cuda
