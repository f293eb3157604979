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
  static constexpr bool kKeeps = keeps_for_update(kState, kResidual, kAverages);
  static constexpr int kWarps = peer_warps(kState, kResidual, kAverages, kKind);
  static constexpr bool kStoresState = kState != StateKind::kNone && kResidual == Residual::kGroup && !kKeeps;
  using Encode = EntryLayout<kBits, kState, kResidual == Residual::kLocal ? kAverages : 1, true>;
  using Store = EntryLayout<kBits, kStoresState ? kState : StateKind::kNone, kAverages, kStoresState>;

  // What lanes store goes by way of an array; where elements are loaded for it, of theirs.
  static constexpr int kOutBytes = kUsed && !kStoresState ? 2 * kTaskElems : 0;

  static constexpr int kWarpBytes = kUsed ? kPeerDynamicBytes / peer_blocks(kState, kKind) / kWarps / 128 * 128 : 0;
  static constexpr int kEncodeEntries = kWarpBytes / Encode::kBytes < 4 ? kWarpBytes / Encode::kBytes : 4;
  static constexpr int kStoreRoom = kWarpBytes - kOutBytes;
  static constexpr int kStoreEntries = kStoreRoom / Store::kBytes < 6 ? kStoreRoom / Store::kBytes : 6;
  static_assert(!kUsed || (kEncodeEntries >= 2 && kStoreEntries >= 2));
  static constexpr int kEncodeBytes = kUsed ? kEncodeEntries * Encode::kBytes : 0;
  static constexpr int kStoreBytes = kUsed ? kOutBytes + kStoreEntries * Store::kBytes : 0;
  static constexpr int kRingBytes = kEncodeBytes > kStoreBytes ? kEncodeBytes : kStoreBytes;
};

// kResidual, kAverages: of the state, where there is one and the kernel is not for any plan; see keeps_for_update.
// kPair: of two ranks, where the sum needs no order kept.
template <DType kDType, int kBits, StateKind kState, Residual kResidual, int kAverages, bool kPair, Kind kKind>
struct LaneTasks : PeerLane {
  static constexpr bool kQuick = kKind != Kind::kAny;
  static constexpr bool kRotated = kKind == Kind::kHotRotated;
  static constexpr bool kUpdatesLocal = kState != StateKind::kNone && kResidual == Residual::kLocal;
  using Rings = Ahead<kBits, kState, kResidual, kAverages, kKind>;
  static_assert(!Rings::kKeeps || (kQuick && kBits == 4), "codes are kept as one lane has them, which are a unit");

  Lane<Spread::kRuns> whole;  // of groups that the quick loops take, at no place in particular
  SharedAddress ring;         // of this warp

  __device__ __forceinline__ explicit LaneTasks(const PeerLane& lane) : PeerLane(lane), whole(quick_lane()) {
    ring = dynamic_shared() + threadIdx.x / kWarpLanes * Rings::kRingBytes;
  }

  __device__ __forceinline__ Lane<Spread::kRuns> quick_lane() const {
    auto lane = make_lane<Spread::kRuns>(job.site, job.state_layout, 0, 0);
    if (!kRotated) lane.signs = 0;
    lane.scale_up = lane.scale_down = 1.0f;
    lane.sure_steps = job.sure_steps;
    lane.tensor_aligned = true;
    lane.is_signed = false;
    lane.quick_clip = true;
    lane.corrected = kState != StateKind::kNone;
    return lane;
  }

  // For one loop: what follows from it is computed there, not ahead of all steps and kept in local memory.
  __device__ __forceinline__ Lane<Spread::kRuns> lane_here() const {
    Lane<Spread::kRuns> lane = whole;
    lane.lanes_log2 = static_cast<int32_t>(recompute_here(static_cast<uint32_t>(lane.lanes_log2)));
    lane.index = static_cast<int32_t>(recompute_here(static_cast<uint32_t>(lane.index)));
    lane.in_warp = recompute_here(lane.in_warp);
    return lane;
  }

  __device__ __forceinline__ static constexpr GroupAt quick_group() {
    return GroupAt{.slot = 0, .elems = 0, .rotated = kRotated, .dense = true};
  }

  // A task of the parts of a step, the tasks of one part after those of another; the same for all lanes of a warp.
  struct Cursor {
    const PeerPart* part;
    int32_t turn;
    int32_t task;
    int32_t tasks;  // of the part
    int32_t dense;
    int64_t first;  // element of the task

    __device__ __forceinline__ void enter() {
      tasks = part->tasks;
      dense = part->dense;
      first = part->first_elem + int64_t{task} * kTaskElems;
    }
    __device__ __forceinline__ void advance() {
      task += Rings::kWarps;
      first += int64_t{Rings::kWarps} * kTaskElems;
    }
  };

  __device__ __forceinline__ static Cursor first_task(const PeerPart* parts) {
    Cursor cursor{parts, 0, static_cast<int32_t>(threadIdx.x) / kWarpLanes, 0, 0, 0};
    cursor.enter();
    return cursor;
  }

  // On to the part in which the task lies; false behind the last.
  __device__ __forceinline__ bool settle(Cursor& cursor) const {
    while (cursor.task >= cursor.tasks) {
      if (cursor.turn + 1 >= job.shape.world_size) {
        cursor.tasks = cursor.dense = cursor.task = 0;
        return false;
      }
      ++cursor.turn;
      ++cursor.part;
      cursor.task -= cursor.tasks;
      cursor.enter();
    }
    return true;
  }

  __device__ __forceinline__ static bool is_quick(const Cursor& cursor) { return kQuick && cursor.task < cursor.dense; }

  // Calls body(cursor, entry) for the quick tasks of this warp, once what fetch(cursor, entry) started is there, and
  // rest(cursor) for the others and where body returns false. The loop ends before rest and starts anew behind it: with
  // a call in it, it would keep in local memory what it works with.
  template <typename Layout, int kEntries, typename Fetch, typename Body, typename Rest>
  __device__ __forceinline__ void for_each_task(const PeerPart* parts, SharedAddress entries, Fetch fetch, Body body,
                                                Rest rest) const {
    Cursor cursor = first_task(parts);
    while (settle(cursor)) {
      if constexpr (kQuick) {
        if (is_quick(cursor)) run_quick<Layout, kEntries>(cursor, entries, fetch, body);
        if (!settle(cursor)) return;
      }
      rest(cursor);
      cursor.advance();
    }
  }

  // Stops at the first task that is not quick, or for which body returns false.
  template <typename Layout, int kEntries, typename Fetch, typename Body>
  __device__ __forceinline__ void run_quick(Cursor& cursor, SharedAddress entries, Fetch fetch, Body body) const {
    const SharedAddress last = entries + (kEntries - 1) * Layout::kBytes;
    Cursor coming = cursor;
#pragma unroll 1
    for (SharedAddress place = entries; place != last; place += Layout::kBytes) {
      fetch_next<Layout>(coming, place, fetch);
    }
    SharedAddress place = entries;
    SharedAddress free_place = last;
#pragma unroll 1
    do {
      fetch_next<Layout>(coming, free_place, fetch);
      wait_for_copies<kEntries - 1>();
      __syncwarp();
      if (!body(cursor, Entry<Layout>{place})) break;
      __syncwarp();  // before others load into what this lane reads
      cursor.advance();
      free_place = place;
      place = place == last ? entries : place + Layout::kBytes;
    } while (settle(cursor) && is_quick(cursor));
    wait_for_copies<0>();
    __syncwarp();
  }

  template <typename Layout, typename Fetch>
  __device__ __forceinline__ void fetch_next(Cursor& coming, SharedAddress place, Fetch fetch) const {
    if (settle(coming)) {
      if (is_quick(coming)) fetch(coming, Entry<Layout>{place});
      coming.advance();
    }
    close_copies();
  }

  // ---- push and reduce ----------------------------------------------------------------------------------------------

  __device__ __forceinline__ void fetch_for_encode(const Lane<Spread::kRuns>& runs, const Cursor& cursor,
                                                   const Entry<typename Rings::Encode>& entry) const {
    start_stored_copies<kUpdatesLocal ? kAverages : 1>(runs, entry, cursor.first);
    if (cursor.turn == 0) start_code_copies<kBits>(runs, entry, first_pushed(*cursor.part), cursor.task);
  }

  // sum += what ranks begin, begin + 1, ... end - 1 but this one pushed, in that order; `copy` is the first.
  __device__ __forceinline__ void add_copies(const Lane<Spread::kRuns>& runs, const Copies<kBits>& copies,
                                             const GroupAt& at, Encoded<kBits>& copy, int32_t begin, int32_t end,
                                             float (&sum)[kLaneElems], bool& sure) const {
#pragma unroll 1
    for (int32_t rank = begin; rank < end;) {
      const Encoded<kBits> here = copy;
      rank = copies.after(rank);
      if (rank < job.shape.world_size) copy = copies.load(runs, at, rank);
      quick_add(runs, here, sum, sure);
    }
  }

  // True if the warp's groups were encoded and handed on.
  __device__ __forceinline__ bool quick_encode_task(const Lane<Spread::kRuns>& runs, const Cursor& cursor,
                                                    const Entry<typename Rings::Encode>& entry) const {
    const bool owned = cursor.turn == 0;
    bool sure = true;
    if constexpr (Rings::kKeeps) keep_elements(runs, cursor, entry);
    ChunkWords<2> words[kLaneChunks];
    read_elements<2>(entry.at, runs.in_warp, words);
    float x[kLaneElems];
    quick_contribution<kDType>(runs, quick_group(), entry, cursor.first, words, x, sure);
    Extremes extremes;
    if (kState == StateKind::kNone && !kRotated && !owned) {
      extremes = word_extremes<kDType>(runs, words);
    } else {
      if (owned) {
        auto copy = read_encoded<kBits>(runs, entry);
        add_all(runs, cursor, copy, x, sure);
      }
      extremes = group_extremes(runs, quick_group(), x);
    }
    Encoded<kBits> encoded = quick_encode<kBits>(runs, x, extremes, sure);
    if constexpr (kUpdatesLocal) {
      quick_local_residual<kDType>(runs, owned, kRotated, encoded, x, sure);
      const auto averages = quick_update<kAverages>(runs, entry, cursor.first, x, sure);
      if (!__all_sync(kAllLanes, sure)) return false;
      __syncwarp();
      store_averages(runs, entry, cursor.first, averages);
    } else {
      if (!__all_sync(kAllLanes, sure)) return false;
      if constexpr (kBits == 8) __syncwarp();
    }
    exchange_run<kBits / 4>(entry.codes(), runs.in_warp, encoded.codes);
    if (!owned) {
      store_task(runs, cursor, encoded, own_view<std::byte>(*cursor.part));
      return true;
    }
    // What is kept of this rank's own segment is what its tail reads.
    if constexpr (Rings::kKeeps) store_task(runs, cursor, encoded, kept_view(job, *cursor.part));
#pragma unroll 1
    for (int32_t turn = Rings::kKeeps ? 1 : 0; turn < job.shape.world_size; ++turn) {
      store_task(runs, cursor, encoded, gathered_view(*cursor.part, turn));
    }
    return true;
  }

  // As loaded: a lane keeps the units that it copied itself.
  __device__ __forceinline__ void keep_elements(const Lane<Spread::kRuns>& runs, const Cursor& cursor,
                                                const Entry<typename Rings::Encode>& entry) const {
    uint32_t words[16];
    read_side<4>(entry.at, runs.in_warp, words);
    store_side<4>(job.kept + 2 * cursor.first + kUnitBytes * runs.in_warp, words);
  }

  // Codes side by side: what a warp stores at a time has no gaps, which links between devices would send along.
  __device__ __forceinline__ void store_task(const Lane<Spread::kRuns>& runs, const Cursor& cursor,
                                             const Encoded<kBits>& encoded, const TileView<std::byte>& tile) const {
    const auto task = static_cast<uint32_t>(cursor.task);
    store_side<kBits / 4>(tile.codes + (task * (kTaskElems * kBits / 8) + kUnitBytes * runs.in_warp), encoded.codes);
    if (runs.index == 0) {
      const uint32_t group = task * groups_side_by_side(runs.lanes_log2) + group_in_warp(runs);
      store_global_word(tile.params + 4 * group, encoded.params);
    }
  }

  // The sum over the ranks in rank order, from this rank's part of it.
  __device__ __forceinline__ void add_all(const Lane<Spread::kRuns>& runs, const Cursor& cursor, Encoded<kBits>& copy,
                                          float (&x)[kLaneElems], bool& sure) const {
    if constexpr (kPair) {
      quick_add(runs, copy, x, sure);
    } else {
      GroupAt at = quick_group();
      at.slot = cursor.task * groups_side_by_side(runs.lanes_log2) + static_cast<int32_t>(group_in_warp(runs));
      const auto copies = pushed_copies<kBits>(job, *cursor.part);
      float below[kLaneElems];
      // -0 + y is y for every y, -0 included: the sum starts from rank 0's value.
#pragma unroll
      for (int e = 0; e < kLaneElems; ++e) below[e] = -0.0f;
      add_copies(runs, copies, at, copy, copies.after(-1), job.site.plan.rank, below, sure);
#pragma unroll
      for (int e = 0; e < kLaneElems; ++e) x[e] = below[e] + x[e];
      add_copies(runs, copies, at, copy, job.site.plan.rank + 1, job.shape.world_size, x, sure);
    }
  }

  __device__ __forceinline__ void encode(int32_t step) const {
    const auto runs = lane_here();
    for_each_task<typename Rings::Encode, Rings::kEncodeEntries>(
        steps[step % 2].encoded, ring,
        [&](const auto& cursor, const auto& entry) { fetch_for_encode(runs, cursor, entry); },
        [&](const auto& cursor, const auto& entry) { return quick_encode_task(runs, cursor, entry); },
        [&](const Cursor& cursor) {
          if constexpr (Rings::kKeeps) {
            if (cursor.turn == 0) return reduce_kept_task<kDType, kBits, kState>(job, *cursor.part, cursor.task);
            return push_kept_task<kDType, kBits, kState>(job, *cursor.part, cursor.task);
          } else if (cursor.turn == 0) {
            reduce_task<kDType, kBits, kState>(job, *cursor.part, cursor.task, call.rescale_log2);
          } else {
            push_task<kDType, kBits, kState>(job, *cursor.part, cursor.task, call.rescale_log2);
          }
        });
  }

  // ---- tail ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void fetch_for_store(const Lane<Spread::kRuns>& runs, const Cursor& cursor,
                                                  const Entry<typename Rings::Store>& entry) const {
    auto view = own_view<const std::byte>(*cursor.part);
    if constexpr (Rings::kKeeps) {
      if (cursor.turn == 0) view = read_only(kept_view(job, *cursor.part));
    }
    start_code_copies<kBits>(runs, entry, view, cursor.task);
    if constexpr (Rings::kStoresState) start_stored_copies<kAverages>(runs, entry, cursor.first);
  }

  __device__ __forceinline__ void store(int32_t step) const {
    const auto runs = lane_here();
    for_each_task<typename Rings::Store, Rings::kStoreEntries>(
        steps[step % 2].stored, ring + Rings::kOutBytes,
        [&](const auto& cursor, const auto& entry) { fetch_for_store(runs, cursor, entry); },
        [&](const auto& cursor, const auto& entry) {
          const bool stored = quick_tail<kDType, kBits, Rings::kStoresState, kAverages>(
              runs, quick_group(), entry, Rings::kStoresState ? entry.at : ring, cursor.first);
          if constexpr (Rings::kKeeps) {
            if (stored && cursor.turn != 0) {
              store_task(runs, cursor, read_encoded<kBits>(runs, entry), kept_view(job, *cursor.part));
            }
          }
          return stored;
        },
        [&](const Cursor& cursor) {
          if constexpr (Rings::kKeeps) {
            tail_kept_task<kDType, kBits>(job, *cursor.part, cursor.task);
          } else {
            tail_task<kDType, kBits, kState>(job, *cursor.part, cursor.task, call.rescale_log2);
          }
        });
  }
};

}  // namespace echo::cuda
