// What the loops of the peer kernel have loaded ahead of a task, and the state that they read and write: groups as
// quick_device.cuh handles them.
#pragma once

#include "ahead_device.cuh"

namespace echo::cuda {

// ---- what was loaded ahead ------------------------------------------------------------------------------------------

// An entry of a warp's ring: this rank's part of the groups, their old averages c and m1 as far as loaded, and codes.
template <typename Layout>
struct Entry {
  SharedAddress at;

  __device__ __forceinline__ SharedAddress average(int which) const {
    return at + Layout::kAveragesAt + which * Layout::kAverageBytes;
  }
  __device__ __forceinline__ SharedAddress scales(int which) const {
    return at + Layout::kScalesAt + which * Layout::kScaleBytes;
  }
  __device__ __forceinline__ SharedAddress codes() const { return at + Layout::kCodesAt; }
  __device__ __forceinline__ SharedAddress params() const { return at + Layout::kParamsAt; }
};

// Of the groups that a warp has side by side, this lane's.
static __device__ __forceinline__ uint32_t group_in_warp(const Lane<Spread::kRuns>& lane) {
  return lane.in_warp >> lane.lanes_log2;
}

// Place of the scale of the first group of a task in int8 state. `first`: the task's first element; groups fill their
// lanes.
static __device__ __forceinline__ int64_t first_scale(const Lane<Spread::kRuns>& lane, int64_t first) {
  constexpr int kLaneElemsLog2 = 5;
  return first >> (kLaneElemsLog2 + lane.lanes_log2);
}

// Starts loading the elements of a task, which begin at `first` in the tensor, and kAverages of their averages.
template <int kAverages, typename Layout>
static __device__ __forceinline__ void start_stored_copies(const Lane<Spread::kRuns>& lane, const Entry<Layout>& entry,
                                                           int64_t first) {
  const uint32_t unit = kUnitBytes * lane.in_warp;
  start_copies<4>(entry.at, lane.in_warp, static_cast<const std::byte*>(lane.site.tensor) + 2 * first + unit);
  if constexpr (Layout::kState != StateKind::kNone) {
#pragma unroll
    for (int which = 0; which < kAverages; ++which) {
      constexpr int kElemBytes = Layout::kAverageElemBytes;
      const std::byte* base = average_base(lane, which);
      start_copies<2 * kElemBytes>(entry.average(which), lane.in_warp, base + kElemBytes * first + unit);
      if constexpr (Layout::kState == StateKind::kInt8) {
        // Two bytes each, as the aligned words that they lie in, since copies have four bytes. The state has room for
        // the last one.
        if (lane.in_warp < static_cast<uint32_t>(groups_side_by_side(lane.lanes_log2))) {
          const int64_t scale = first_scale(lane, first) + lane.in_warp;
          start_copy<4>(entry.scales(which) + 4 * lane.in_warp,
                        base + lane.state_layout.scales_offset + 2 * (scale & ~1));
        }
      }
    }
  }
}

// The codes and parameters of task `task` of a tile.
template <int kBits, typename Layout>
static __device__ __forceinline__ void start_code_copies(const Lane<Spread::kRuns>& lane, const Entry<Layout>& entry,
                                                         const TileView<const std::byte>& tile, int32_t task) {
  // Codes of a tile take less than 4 GiB: of a call far less, of an update because can_keep sees to it.
  const auto before = static_cast<uint32_t>(task);
  start_copies<kBits / 4>(entry.codes(), lane.in_warp,
                          tile.codes + (before * (kTaskElems * kBits / 8) + kUnitBytes * lane.in_warp));
  const auto side = static_cast<uint32_t>(groups_side_by_side(lane.lanes_log2));
  if (lane.in_warp < side) {
    start_copy<4>(entry.params() + 4 * lane.in_warp, tile.params + 4 * (before * side + lane.in_warp));
  }
}

template <int kBits, typename Layout>
static __device__ __forceinline__ Encoded<kBits> read_encoded(const Lane<Spread::kRuns>& lane,
                                                              const Entry<Layout>& entry) {
  Encoded<kBits> encoded;
  read_run<kBits / 4>(entry.codes(), lane.in_warp, encoded.codes);
  encoded.params = load_shared_word(entry.params() + 4 * group_in_warp(lane));
  return encoded;
}

// ---- state --------------------------------------------------------------------------------------------------------

// One average of a group as stored.
template <StateKind kState>
struct Average;

template <>
struct Average<StateKind::kInt8> {
  Int8Average stored;
};

template <>
struct Average<StateKind::kWide> {
  ChunkWords<2> words[kLaneChunks];
};

template <typename Layout>
static __device__ __forceinline__ Average<Layout::kState> read_average(const Lane<Spread::kRuns>& lane,
                                                                       const Entry<Layout>& entry, int64_t first,
                                                                       int which) {
  Average<Layout::kState> average;
  if constexpr (Layout::kState == StateKind::kInt8) {
    read_elements<1>(entry.average(which), lane.in_warp, average.stored.words);
    const uint32_t group = group_in_warp(lane);
    const uint32_t word = load_shared_word(entry.scales(which) + 4 * group);
    const bool odd = ((static_cast<uint32_t>(first_scale(lane, first)) + group) & 1) != 0;
    average.stored.scale_bits = odd ? word >> 16 : word & 0xffffu;
  } else {
    read_elements<2>(entry.average(which), lane.in_warp, average.words);
  }
  return average;
}

template <typename Layout>
static __device__ __forceinline__ void store_average(const Lane<Spread::kRuns>& lane, const Entry<Layout>& entry,
                                                     int64_t first, int which, const Average<Layout::kState>& average) {
  constexpr int kElemBytes = Layout::kAverageElemBytes;
  std::byte* base = average_base(lane, which);
  std::byte* to = base + kElemBytes * first + kUnitBytes * lane.in_warp;
  if constexpr (Layout::kState == StateKind::kInt8) {
    store_elements_by<kElemBytes>(entry.average(which), lane.in_warp, to, average.stored.words);
    if (lane.index == 0) {
      auto* scales = reinterpret_cast<uint16_t*>(base + lane.state_layout.scales_offset);
      scales[first_scale(lane, first) + group_in_warp(lane)] = static_cast<uint16_t>(average.stored.scale_bits);
    }
  } else {
    store_elements_by<kElemBytes>(entry.average(which), lane.in_warp, to, average.words);
  }
}

// A chunk of it.
template <StateKind kState>
static __device__ __forceinline__ void widen_average(const Average<kState>& average, int part,
                                                     float (&values)[kChunkElems], bool& sure) {
  if constexpr (kState == StateKind::kInt8) {
    const Int8Decoder decoder = make_int8_decoder(average.stored.scale_bits);
    sure = sure && decoder.factor == 1.0f;
    widen_int8_chunk(decoder, average.stored.words[part], values);
  } else {
    widen_chunk<DType::kBFloat16>(average.words[part], values);
  }
}

// `values` as stored. Not finite values, NaN included, leave `sure` false.
template <StateKind kState, Spread kSpread>
static __device__ __forceinline__ Average<kState> narrow_average(const Lane<kSpread>& lane,
                                                                 const float (&values)[kLaneElems], bool& sure) {
  Average<kState> average;
  const float largest = largest_magnitude(values);
  if constexpr (kState == StateKind::kInt8) {
    average.stored = quick_int8_average(lane, largest, values, sure);
  } else {
    sure = sure && largest < state_limit(StateDType::kBFloat16);
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      average.words[part] = narrow_numbers<DType::kBFloat16>(values + kChunkElems * part);
    }
  }
  return average;
}

// The averages that an update makes.
template <StateKind kState, int kAverages>
struct Averages {
  Average<kState> at[kAverages];
};

// By way of the arrays that they were read from: no lane may need those any more.
template <int kAverages, typename Layout>
static __device__ __forceinline__ void store_averages(const Lane<Spread::kRuns>& lane, const Entry<Layout>& entry,
                                                      int64_t first,
                                                      const Averages<Layout::kState, kAverages>& averages) {
#pragma unroll
  for (int which = 0; which < kAverages; ++which) store_average(lane, entry, first, which, averages.at[which]);
}

// The new c and, of two averages, m1, which takes the residual's place.
template <int kAverages, typename Layout>
static __device__ __forceinline__ void add_to_averages(const Lane<Spread::kRuns>& lane, const Entry<Layout>& entry,
                                                       int64_t first, float (&u)[kLaneElems], float (&c)[kLaneElems],
                                                       bool& sure) {
  const Feedback& fb = lane.site.plan.feedback;
  const Average<Layout::kState> c_before = read_average(lane, entry, first, 0);
  const Average<Layout::kState> m1_before = read_average(lane, entry, first, kAverages - 1);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float old_c[kChunkElems];
    widen_average(c_before, part, old_c, sure);
    float old_m1[kChunkElems];
    if constexpr (kAverages == 2) widen_average(m1_before, part, old_m1, sure);
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) {
      float& value = u[kChunkElems * part + i];
      if constexpr (kAverages == 2) {
        c[kChunkElems * part + i] = (fb.beta2 * old_c[i] + fb.k2 * old_m1[i]) + fb.k3 * value;
        value = fb.beta1 * old_m1[i] + fb.k1 * value;
      } else {
        c[kChunkElems * part + i] = fb.beta2 * old_c[i] + fb.k3 * value;
      }
    }
  }
}

// update_element of the core from the residual u, which is overwritten, and the old averages.
template <int kAverages, typename Layout>
static __device__ __forceinline__ Averages<Layout::kState, kAverages> quick_update(const Lane<Spread::kRuns>& lane,
                                                                                   const Entry<Layout>& entry,
                                                                                   int64_t first,
                                                                                   float (&u)[kLaneElems], bool& sure) {
  const Feedback& fb = lane.site.plan.feedback;
  float c[kLaneElems];
  if (kAverages == 1 && fb.beta2 == 0.0f) {
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) c[e] = fb.k3 * u[e];
  } else {
    add_to_averages<kAverages>(lane, entry, first, u, c, sure);
  }
  Averages<Layout::kState, kAverages> averages;
  averages.at[0] = narrow_average<Layout::kState>(lane, c, sure);
  if constexpr (kAverages == 2) averages.at[1] = narrow_average<Layout::kState>(lane, u, sure);
  return averages;
}

}  // namespace echo::cuda
