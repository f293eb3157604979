// The tasks of a step, as the warps of a block take them: the quick loops, and what is left to the exact way. Push and
// reduce share one loop: apart from the copies that reduce adds they do the same, and one loop fits the instruction
// caches better.
#pragma once

#include "peer_exact.cuh"
#include "peer_lane.cuh"
#include "quick_device.cuh"

namespace echo::cuda {

// Where the entries of a warp's ring have what, and how many there are: as many as leave room for the blocks that a
// multiprocessor is to have.
template <int kBits, StateKind kState, Residual kResidual, int kAverages, Kind kKind>
struct Ahead {
  static constexpr bool kUsed = kKind != Kind::kAny;
  static constexpr bool kStoresState = kState != StateKind::kNone && kResidual == Residual::kGroup;
  using Encode = EntryLayout<kBits, kState, kResidual == Residual::kLocal ? kAverages : 1, true>;
  using Store = EntryLayout<kBits, kStoresState ? kState : StateKind::kNone, kAverages, kStoresState>;

  static constexpr int kWarpBytes = kUsed ? kPeerDynamicBytes / peer_blocks(kState, kKind) / kPeerWarps : 0;
  static constexpr int kEncodeEntries = kWarpBytes / Encode::kBytes < 4 ? kWarpBytes / Encode::kBytes : 4;
  static constexpr int kStoreEntries = kWarpBytes / Store::kBytes < 6 ? kWarpBytes / Store::kBytes : 6;
  static_assert(!kUsed || (kEncodeEntries >= 2 && kStoreEntries >= 2));
  static constexpr int kEncodeBytes = kUsed ? kEncodeEntries * Encode::kBytes : 0;
  static constexpr int kStoreBytes = kUsed ? kStoreEntries * Store::kBytes : 0;
  static constexpr int kRingBytes = kEncodeBytes > kStoreBytes ? kEncodeBytes : kStoreBytes;
};

// kResidual, kAverages: of the state, where there is one and the kernel is not for any plan. kPair: of two ranks, where
// the sum needs no order kept.
template <DType kDType, int kBits, StateKind kState, Residual kResidual, int kAverages, bool kPair, Kind kKind>
struct LaneTasks : PeerLane {
  static constexpr bool kQuick = kKind != Kind::kAny;
  static constexpr bool kRotated = kKind == Kind::kHotRotated;
  static constexpr bool kUpdatesLocal = kState != StateKind::kNone && kResidual == Residual::kLocal;
  using Rings = Ahead<kBits, kState, kResidual, kAverages, kKind>;

  int32_t lanes_log2;  // threads that a group lies in
  int32_t index;       // of this thread among them
  uint32_t in_warp;    // of this thread
  uint32_t run_signs;  // Lane::signs, where groups lie in runs and in chunks
  uint32_t chunk_signs;
  std::byte* ring;  // of this warp

  __device__ __forceinline__ explicit LaneTasks(const PeerLane& lane) : PeerLane(lane) {
    const auto runs = make_lane<Spread::kRuns>(job.site, job.state_layout, 0, 0);
    in_warp = threadIdx.x % kWarpLanes;
    ring = dynamic_shared() + threadIdx.x / kWarpLanes * Rings::kRingBytes;
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
    int32_t tasks;  // of the part
    int32_t dense;
  };

  __device__ __forceinline__ static Cursor first_task(const PeerPart* parts) {
    return Cursor{parts, 0, static_cast<int32_t>(threadIdx.x) / kWarpLanes, parts->tasks, parts->dense};
  }

  // On to the part in which the task lies; false behind the last.
  __device__ __forceinline__ bool settle(Cursor& cursor) const {
    while (cursor.task >= cursor.tasks) {
      if (++cursor.turn >= job.shape.world_size) {
        cursor.tasks = cursor.dense = 0;
        cursor.task = 0;
        --cursor.turn;
        return false;
      }
      cursor.task -= cursor.tasks;
      ++cursor.part;
      cursor.tasks = cursor.part->tasks;
      cursor.dense = cursor.part->dense;
    }
    return true;
  }

  __device__ __forceinline__ static bool is_quick(const Cursor& cursor) { return kQuick && cursor.task < cursor.dense; }

  // Calls body(cursor, entry) for the quick tasks of this warp, once what fetch(cursor, entry) started is there, and
  // rest(cursor) for the others and where body returns false. The loop ends before rest and starts anew behind it: with
  // a call in it, it would keep in local memory what it works with.
  template <typename Layout, int kEntries, typename Fetch, typename Body, typename Rest>
  __device__ __forceinline__ void for_each_task(const PeerPart* parts, Fetch fetch, Body body, Rest rest) const {
    Cursor cursor = first_task(parts);
    while (settle(cursor)) {
      if constexpr (kQuick) {
        if (is_quick(cursor)) run_quick<Layout, kEntries>(cursor, fetch, body);
        if (!settle(cursor)) return;
      }
      rest(cursor);
      cursor.task += kPeerWarps;
    }
  }

  // Stops at the first task that is not quick, or for which body returns false.
  template <typename Layout, int kEntries, typename Fetch, typename Body>
  __device__ __forceinline__ void run_quick(Cursor& cursor, Fetch fetch, Body body) const {
    constexpr uint32_t kLast = (kEntries - 1) * Layout::kBytes;
    Cursor coming = cursor;
#pragma unroll 1
    for (uint32_t place = 0; place < kLast; place += Layout::kBytes) fetch_next<Layout>(coming, place, fetch);
    uint32_t place = 0;
    uint32_t free_place = kLast;
#pragma unroll 1
    do {
      fetch_next<Layout>(coming, free_place, fetch);
      wait_for_copies<kEntries - 1>();
      __syncwarp();
      if (!body(cursor, Entry<Layout>{ring + place})) break;
      __syncwarp();  // before others load into what this lane reads
      cursor.task += kPeerWarps;
      free_place = place;
      place = place == kLast ? 0 : place + Layout::kBytes;
    } while (settle(cursor) && is_quick(cursor));
    wait_for_copies<0>();
    __syncwarp();
  }

  template <typename Layout, typename Fetch>
  __device__ __forceinline__ void fetch_next(Cursor& coming, uint32_t place, Fetch fetch) const {
    if (settle(coming)) {
      if (is_quick(coming)) fetch(coming, Entry<Layout>{ring + place});
      coming.task += kPeerWarps;
    }
    close_copies();
  }

  __device__ __forceinline__ static int64_t first_elem(const Cursor& cursor) {
    return cursor.part->first_elem + int64_t{cursor.task} * kTaskElems;
  }

  template <Spread kSpread>
  __device__ __forceinline__ Lane<kSpread> lane_of(const Cursor& cursor) const {
    return Lane<kSpread>{.site = job.site,
                         .state_layout = job.state_layout,
                         .first_group = cursor.part->groups.begin,
                         .first_elem = cursor.part->first_elem,
                         .lanes_log2 = static_cast<int32_t>(recompute_here(lanes_log2)),
                         .index = static_cast<int32_t>(recompute_here(index)),
                         .in_warp = recompute_here(in_warp),
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

  __device__ __forceinline__ void fetch_for_encode(const Cursor& cursor,
                                                   const Entry<typename Rings::Encode>& entry) const {
    const auto lane = lane_of<Spread::kRuns>(cursor);
    start_stored_copies<kUpdatesLocal ? kAverages : 1>(lane, entry, cursor.task, first_elem(cursor));
    if (cursor.turn != 0) return;
    const auto copies = pushed_copies<kBits>(job, *cursor.part);
    start_code_copies<kBits>(lane, cursor.task, entry.codes(), entry.params(), copies.tile(copies.after(-1)));
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
  __device__ __forceinline__ bool quick_encode_task(const Cursor& cursor,
                                                    const Entry<typename Rings::Encode>& entry) const {
    const auto lane = lane_of<Spread::kRuns>(cursor);
    const GroupAt at = quick_group(cursor);
    const bool owned = cursor.turn == 0;
    bool sure = true;
    ChunkWords<2> words[kLaneChunks];
    read_elements<2>(lane, entry.at, words);
    float x[kLaneElems];
    quick_contribution<kDType>(lane, at, entry, words, x, sure);
    Extremes extremes;
    if (kState == StateKind::kNone && !kRotated && !owned) {
      extremes = word_extremes<kDType>(lane, words);
    } else {
      if (owned) {
        Encoded<kBits> copy = read_encoded<kBits>(lane, entry.codes(), entry.params());
        add_all(lane, at, *cursor.part, copy, x, sure);
      }
      extremes = group_extremes(lane, at, x);
    }
    Encoded<kBits> encoded = quick_encode<kBits>(lane, x, extremes, sure);
    if constexpr (kUpdatesLocal) {
      quick_local_residual<kDType>(lane, owned, kRotated, encoded, x, sure);
      const auto averages = quick_update<kAverages>(lane, at, entry, x, sure);
      if (!__all_sync(kAllLanes, sure)) return false;
      store_averages(lane, at, averages);
    } else {
      if (!__all_sync(kAllLanes, sure)) return false;
    }
    exchange_run<kBits / 4>(lane.in_warp, entry.codes(), encoded.codes);
    if (!owned) {
      store_task(lane, cursor, encoded, job.slabs[cursor.part->owner]);
      return true;
    }
#pragma unroll 1
    for (int32_t turn = 0; turn < job.shape.world_size; ++turn) {
      store_task(lane, cursor, encoded, job.slabs[rank_at(turn)]);
    }
    return true;
  }

  // Codes as exchange_run leaves them: what a warp stores at a time has no gaps, which links between devices would send
  // along.
  __device__ __forceinline__ void store_task(const Lane<Spread::kRuns>& lane, const Cursor& cursor,
                                             const Encoded<kBits>& encoded, std::byte* slab) const {
    const TileView<std::byte> tile = part_view(slab, *cursor.part);
    const auto task = static_cast<uint32_t>(cursor.task);
    auto* to = reinterpret_cast<uint4*>(tile.codes + task * (kTaskElems * kBits / 8)) + lane.in_warp;
#pragma unroll
    for (int i = 0; i < kBits / 4; ++i) {
      const uint32_t* quad = encoded.codes + 4 * i;
      to[i * kWarpLanes] = make_uint4(quad[0], quad[1], quad[2], quad[3]);
    }
    if (lane.index == 0) {
      const uint32_t group = task * groups_side_by_side(lane.lanes_log2) + (lane.in_warp >> lane.lanes_log2);
      reinterpret_cast<uint32_t*>(tile.params)[group] = encoded.params;
    }
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
    for_each_task<typename Rings::Encode, Rings::kEncodeEntries>(
        steps[step % 2].encoded, [&](const auto& cursor, const auto& entry) { fetch_for_encode(cursor, entry); },
        [&](const auto& cursor, const auto& entry) { return quick_encode_task(cursor, entry); },
        [&](const Cursor& cursor) {
          if (cursor.turn == 0) {
            reduce_task<kDType, kBits, kState>(job, *cursor.part, cursor.task, call.rescale_log2);
          } else {
            push_task<kDType, kBits, kState>(job, *cursor.part, cursor.task, call.rescale_log2);
          }
        });
  }

  // ---- tail ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void fetch_for_store(const Cursor& cursor,
                                                  const Entry<typename Rings::Store>& entry) const {
    const auto lane = lane_of<Spread::kChunks>(cursor);
    const auto gathered = part_view<const std::byte>(job.slabs[job.site.plan.rank], *cursor.part);
    start_code_copies<kBits>(lane, cursor.task, entry.codes(), entry.params(), gathered);
    if constexpr (Rings::kStoresState) {
      start_stored_copies<kAverages>(lane, entry, cursor.task, first_elem(cursor));
    }
  }

  __device__ __forceinline__ void store(int32_t step) const {
    for_each_task<typename Rings::Store, Rings::kStoreEntries>(
        steps[step % 2].stored, [&](const auto& cursor, const auto& entry) { fetch_for_store(cursor, entry); },
        [&](const auto& cursor, const auto& entry) {
          const auto lane = lane_of<Spread::kChunks>(cursor);
          return quick_tail<kDType, kBits, Rings::kStoresState, kAverages>(lane, quick_group(cursor), entry);
        },
        [&](const Cursor& cursor) {
          tail_task<kDType, kBits, kState>(job, *cursor.part, cursor.task, call.rescale_log2);
        });
  }
};

}  // namespace echo::cuda
