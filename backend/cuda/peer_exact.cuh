// Tasks of a part done the exact way, whatever the plan and the values: all of them in kernels for any plan, and in the
// others what the quick loops leave. Out of line, and the same functions for all kernels of a type, so that they take
// no room among the loops' instructions.
#pragma once

#include "peer_tile.cuh"

namespace echo::cuda {

// To the part's owner.
template <DType kDType, int kBits, StateKind kState>
__device__ __noinline__ void push_task(const PeerJob& job, const PeerPart& part, int32_t task, int32_t rescale_log2) {
  const auto lane = make_lane<Spread::kRuns>(job.site, job.state_layout, part.groups.begin, rescale_log2);
  const GroupAt at = group_of_task(lane, task, part.full, part.groups.end);
  auto stored = load_stored<kDType, kState>(lane, at);
  push_group<kBits>(lane, at, stored, own_view<std::byte>(part));
}

// Of this rank's own segment, to everyone, itself included.
template <DType kDType, int kBits, StateKind kState>
__device__ __noinline__ void reduce_task(const PeerJob& job, const PeerPart& part, int32_t task, int32_t rescale_log2) {
  const auto lane = make_lane<Spread::kRuns>(job.site, job.state_layout, part.groups.begin, rescale_log2);
  const GroupAt at = group_of_task(lane, task, part.full, part.groups.end);
  const Copies<kBits> copies = pushed_copies<kBits>(job, part);
  auto addends = load_addends<kDType, kState>(copies, lane, at);
  reduce_group<true>(copies, lane, at, addends, [&](const Encoded<kBits>& encoded) {
#pragma unroll 1
    for (int32_t turn = 0; turn < job.shape.world_size; ++turn) {
      store_encoded(lane, at, encoded, gathered_view(part, turn));
    }
  });
}

template <DType kDType, int kBits, StateKind kState>
__device__ __noinline__ void tail_task(const PeerJob& job, const PeerPart& part, int32_t task, int32_t rescale_log2) {
  const auto lane = make_lane<Spread::kChunks>(job.site, job.state_layout, part.groups.begin, rescale_log2);
  const GroupAt at = group_of_task(lane, task, part.full, part.groups.end);
  tail_group<kDType, kState>(lane, at, load_encoded<kBits>(lane, at, own_view<const std::byte>(part)));
}

// ---- in kernels that keep what an update needs ----------------------------------------------------------------------

// push_task, and the contribution is kept.
template <DType kDType, int kBits, StateKind kState>
__device__ __noinline__ void push_kept_task(const PeerJob& job, const PeerPart& part, int32_t task) {
  const auto lane = make_lane<Spread::kRuns>(job.site, job.state_layout, part.groups.begin, 0);
  const GroupAt at = group_of_task(lane, task, part.full, part.groups.end);
  auto stored = load_stored<kDType, kState>(lane, at);
  store_words(lane, at, job.kept, true, stored.words);
  float x[kLaneElems];
  const Extremes extremes = contribution<true>(lane, at, stored, x);
  store_encoded(lane, at, encode_group<kBits>(lane, at, x, extremes), own_view<std::byte>(part));
}

// reduce_task, and contribution and codes are kept. The codes nowhere else on this rank: tail reads them there.
template <DType kDType, int kBits, StateKind kState>
__device__ __noinline__ void reduce_kept_task(const PeerJob& job, const PeerPart& part, int32_t task) {
  const auto lane = make_lane<Spread::kRuns>(job.site, job.state_layout, part.groups.begin, 0);
  const GroupAt at = group_of_task(lane, task, part.full, part.groups.end);
  const Copies<kBits> copies = pushed_copies<kBits>(job, part);
  auto addends = load_addends<kDType, kState>(copies, lane, at);
  store_words(lane, at, job.kept, true, addends.own.words);
  float sum[kLaneElems];
  sum_ranks<true>(copies, lane, at, addends, sum);
  const Encoded<kBits> encoded = encode_group<kBits>(lane, at, sum, group_extremes(lane, at, sum));
  store_encoded(lane, at, encoded, kept_view(job, part));
#pragma unroll 1
  for (int32_t turn = 1; turn < job.shape.world_size; ++turn) {
    store_encoded(lane, at, encoded, gathered_view(part, turn));
  }
}

// tail_task without an update, and the codes are kept.
template <DType kDType, int kBits>
__device__ __noinline__ void tail_kept_task(const PeerJob& job, const PeerPart& part, int32_t task) {
  const auto lane = make_lane<Spread::kChunks>(job.site, job.state_layout, part.groups.begin, 0);
  const GroupAt at = group_of_task(lane, task, part.full, part.groups.end);
  const TileView<std::byte> kept = kept_view(job, part);
  const bool owned = part.owner == job.site.plan.rank;
  const auto encoded = load_encoded<kBits>(lane, at, owned ? read_only(kept) : own_view<const std::byte>(part));
  if (!owned) store_encoded(lane, at, encoded, kept);
  deliver<kDType>(lane, at, encoded);
}

}  // namespace echo::cuda
