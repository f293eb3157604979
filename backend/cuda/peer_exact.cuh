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
  push_group<kBits>(lane, at, stored, part_view(job.slabs[part.owner], part));
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
    for (int32_t rank = 0; rank < job.shape.world_size; ++rank) {
      store_encoded(lane, at, encoded, part_view(job.slabs[rank], part));
    }
  });
}

template <DType kDType, int kBits, StateKind kState>
__device__ __noinline__ void tail_task(const PeerJob& job, const PeerPart& part, int32_t task, int32_t rescale_log2) {
  const auto lane = make_lane<Spread::kChunks>(job.site, job.state_layout, part.groups.begin, rescale_log2);
  const GroupAt at = group_of_task(lane, task, part.full, part.groups.end);
  const TileView<const std::byte> view = part_view<const std::byte>(job.slabs[job.site.plan.rank], part);
  tail_group<kDType, kState>(lane, at, load_encoded<kBits>(lane, at, view));
}

}  // namespace echo::cuda
