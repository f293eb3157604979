// The tasks of a step, as the warps of a block take them: the quick loops, and what is left to the exact way. Push and
// reduce share one loop: apart from the copies that reduce adds they do the same, and one loop fits the instruction
// caches better.
#pragma once

#include "peer_exact.cuh"
#include "peer_lane.cuh"
#include "quick_device.cuh"

namespace echo::cuda {

// kResidual, kAverages: of the state, where there is one and the kernel is not for any plan. kPair: of two ranks, where
// the sum needs no order kept.
template <DType kDType, int kBits, StateKind kState, Residual kResidual, int kAverages, bool kPair, Kind kKind>
struct LaneTasks : PeerLane {
  static constexpr bool kQuick = kKind != Kind::kAny;
  static constexpr bool kRotated = kKind == Kind::kHotRotated;
  using Stored = QuickStored<kDType, kBits, kState, kAverages>;
  using Gathered = QuickGathered<kDType, kBits, kState, kAverages>;

  int32_t lanes_log2;  // threads that a group lies in
  int32_t index;       // of this thread among them
  uint32_t run_signs;  // Lane::signs, where groups lie in runs and in chunks
  uint32_t chunk_signs;

  __device__ __forceinline__ explicit LaneTasks(const PeerLane& lane) : PeerLane(lane) {
    const auto runs = make_lane<Spread::kRuns>(job.site, job.state_layout, 0, 0);
    lanes_log2 = runs.lanes_log2;
    index = runs.index;
    run_signs = kRotated ? runs.signs : 0;
    chunk_signs = kRotated ? make_lane<Spread::kChunks>(job.site, job.state_layout, 0, 0).signs : 0;
  }

  // A task of the parts of a step, the tasks of one part after those of another; the same for all lanes of a warp.
  struct Cursor {
    const PeerPart* part;
    int32_t turn;
    int32_t task;
  };

  // On to the part in which the task lies; false behind the last.
  __device__ __forceinline__ bool settle(Cursor& cursor) const {
    while (cursor.turn < job.shape.world_size) {
      if (cursor.task < cursor.part->tasks) return true;
      cursor.task -= cursor.part->tasks;
      ++cursor.part;
      ++cursor.turn;
    }
    return false;
  }

  __device__ __forceinline__ static bool is_quick(const Cursor& cursor) {
    return kQuick && cursor.task < cursor.part->dense;
  }

  // Calls body(cursor, what load(cursor) gave) for the quick tasks of this warp, the next one loaded while one is
  // worked on, and rest(cursor) for others and where body returns false. What was loaded ahead is loaded again after
  // rest: kept in registers over a call that is out of line, it would have to lie in memory all the time.
  template <typename Loaded, typename Load, typename Body, typename Rest>
  __device__ __forceinline__ void for_each_task(const PeerPart* parts, Load load, Body body, Rest rest) const {
    Cursor cursor{parts, 0, static_cast<int32_t>(threadIdx.x) / kWarpLanes};
    while (settle(cursor)) {
      if constexpr (kQuick) {
        if (is_quick(cursor)) run_quick<Loaded>(cursor, load, body);
        if (!settle(cursor)) return;
      }
      rest(cursor);
      cursor.task += kPeerWarps;
    }
  }

  // Stops at the first task that is not quick, or for which body returns false.
  template <typename Loaded, typename Load, typename Body>
  __device__ __forceinline__ void run_quick(Cursor& cursor, Load load, Body body) const {
    Loaded coming = load(cursor);
    bool ahead;
#pragma unroll 1
    do {
      Loaded now = coming;
      Cursor next = cursor;
      next.task += kPeerWarps;
      ahead = settle(next) && is_quick(next);
      if (ahead) coming = load(next);
      if (!body(cursor, now)) return;
      cursor = next;
    } while (ahead);
  }

  template <Spread kSpread>
  __device__ __forceinline__ Lane<kSpread> lane_of(const Cursor& cursor) const {
    return Lane<kSpread>{.site = job.site,
                         .state_layout = job.state_layout,
                         .first_group = cursor.part->groups.begin,
                         .first_elem = cursor.part->first_elem,
                         .lanes_log2 = lanes_log2,
                         .index = index,
                         .signs = kSpread == Spread::kRuns ? run_signs : chunk_signs,
                         .scale_up = 1.0f,
                         .scale_down = 1.0f,
                         .sure_steps = sure_steps_inside(job.site.plan.codec),
                         .tensor_aligned = true,
                         .is_signed = false,
                         .quick_clip = true,
                         .corrected = kState != StateKind::kNone,
                         .state = StateDType::kBFloat16};
  }

  __device__ __forceinline__ GroupAt quick_group(const Cursor& cursor) const {
    return GroupAt{.slot = cursor.task * groups_side_by_side(lanes_log2) + group_in_task(lanes_log2),
                   .elems = job.site.plan.codec.group_elems,
                   .rotated = kRotated,
                   .dense = true};
  }

  // ---- push and reduce ----------------------------------------------------------------------------------------------

  __device__ __forceinline__ Stored load_for_encode(const Cursor& cursor) const {
    const auto lane = lane_of<Spread::kRuns>(cursor);
    const GroupAt at = quick_group(cursor);
    Stored stored;
    load_elements<2>(lane, at, static_cast<const std::byte*>(job.site.tensor), true, stored.words);
    if constexpr (kState == StateKind::kInt8) stored.averages = load_averages<kState, kAverages>(lane, at);
    if (cursor.turn == 0) {
      const auto copies = pushed_copies<kBits>(job, *cursor.part);
      stored.copy = copies.load(lane, at, copies.after(-1));
    }
    return stored;
  }

  // sum += what ranks begin, begin + 1, ... end - 1 but this one pushed, in that order; `copy` is the first.
  __device__ __forceinline__ void add_copies(const Copies<kBits>& copies, const Lane<Spread::kRuns>& lane,
                                             const GroupAt& at, Encoded<kBits>& copy, int32_t begin, int32_t end,
                                             float (&sum)[kLaneElems], bool& sure) const {
#pragma unroll 1
    for (int32_t rank = begin; rank < end;) {
      const Encoded<kBits> here = copy;
      rank = copies.after(rank);
      if (rank < job.shape.world_size) copy = copies.load(lane, at, rank);
      quick_add(lane, here, sum, sure);
    }
  }

  // True if the warp's groups were encoded and handed on.
  __device__ __forceinline__ bool quick_encode_task(const Cursor& cursor, Stored& stored) const {
    const auto lane = lane_of<Spread::kRuns>(cursor);
    const GroupAt at = quick_group(cursor);
    const bool owned = cursor.turn == 0;
    bool sure = true;
    if constexpr (kState == StateKind::kWide) stored.averages = load_averages<kState, kAverages>(lane, at);
    float x[kLaneElems];
    quick_contribution(lane, at, stored, x, sure);
    Extremes extremes;
    if (kState == StateKind::kNone && !kRotated && !owned) {
      extremes = word_extremes<kDType>(lane, stored.words);
    } else {
      if (owned) add_all(lane, at, *cursor.part, stored.copy, x, sure);
      extremes = group_extremes(lane, at, x);
    }
    const Encoded<kBits> encoded = quick_encode<kBits>(lane, x, extremes, sure);
    if constexpr (kState != StateKind::kNone && kResidual == Residual::kLocal) {
      quick_local_update<kDType>(lane, owned, kRotated, encoded, x, stored.averages, sure);
    }
    if (!__all_sync(kAllLanes, sure)) return false;
    if constexpr (kState != StateKind::kNone && kResidual == Residual::kLocal) {
      store_averages(lane, at, stored.averages);
    }
    if (!owned) {
      store_encoded(lane, at, encoded, part_view(job.slabs[cursor.part->owner], *cursor.part));
      return true;
    }
#pragma unroll 1
    for (int32_t turn = 0; turn < job.shape.world_size; ++turn) {
      store_encoded(lane, at, encoded, part_view(job.slabs[rank_at(turn)], *cursor.part));
    }
    return true;
  }

  // The sum over the ranks in rank order, from this rank's part of it.
  __device__ __forceinline__ void add_all(const Lane<Spread::kRuns>& lane, const GroupAt& at, const PeerPart& part,
                                          Encoded<kBits>& copy, float (&x)[kLaneElems], bool& sure) const {
    if constexpr (kPair) {
      quick_add(lane, copy, x, sure);
    } else {
      const auto copies = pushed_copies<kBits>(job, part);
      float below[kLaneElems];
      // -0 + y is y for every y, -0 included: the sum starts from rank 0's value.
#pragma unroll
      for (int e = 0; e < kLaneElems; ++e) below[e] = -0.0f;
      add_copies(copies, lane, at, copy, copies.after(-1), job.site.plan.rank, below, sure);
#pragma unroll
      for (int e = 0; e < kLaneElems; ++e) x[e] = below[e] + x[e];
      add_copies(copies, lane, at, copy, job.site.plan.rank + 1, job.shape.world_size, x, sure);
    }
  }

  __device__ __forceinline__ void encode(int32_t step) const {
    for_each_task<Stored>(
        steps[step % 2].encoded, [&](const auto& cursor) { return load_for_encode(cursor); },
        [&](const auto& cursor, auto& stored) { return quick_encode_task(cursor, stored); },
        [&](const Cursor& cursor) {
          if (cursor.turn == 0) {
            reduce_task<kDType, kBits, kState>(job, *cursor.part, cursor.task, call.rescale_log2);
          } else {
            push_task<kDType, kBits, kState>(job, *cursor.part, cursor.task, call.rescale_log2);
          }
        });
  }

  // ---- tail ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ Gathered load_for_store(const Cursor& cursor) const {
    const auto lane = lane_of<Spread::kChunks>(cursor);
    const GroupAt at = quick_group(cursor);
    Gathered gathered;
    gathered.encoded =
        load_encoded<kBits>(lane, at, part_view<const std::byte>(job.slabs[job.site.plan.rank], *cursor.part));
    if constexpr (kState != StateKind::kNone && kResidual == Residual::kGroup) {
      load_elements<2>(lane, at, static_cast<const std::byte*>(job.site.tensor), true, gathered.words);
      if constexpr (kState == StateKind::kInt8) gathered.averages = load_averages<kState, kAverages>(lane, at);
    }
    return gathered;
  }

  __device__ __forceinline__ void store(int32_t step) const {
    for_each_task<Gathered>(
        steps[step % 2].stored, [&](const auto& cursor) { return load_for_store(cursor); },
        [&](const auto& cursor, auto& gathered) {
          const auto lane = lane_of<Spread::kChunks>(cursor);
          return quick_tail<kResidual>(lane, quick_group(cursor), gathered);
        },
        [&](const Cursor& cursor) {
          tail_task<kDType, kBits, kState>(job, *cursor.part, cursor.task, call.rescale_log2);
        });
  }
};

}  // namespace echo::cuda
