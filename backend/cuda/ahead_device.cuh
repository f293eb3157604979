// What a warp loads ahead of its turn: the tasks to come wait in a ring of shared memory of its own. Loads on their way
// then take no registers, and several tasks can be under way, which a multiprocessor with few warps needs to keep its
// memory busy.
//
//   task      1024 consecutive elements: the groups that a warp has side by side, all whole; their codes are as
//             consecutive in a tile, their averages in the state
//   unit      16 bytes. What is read as kRuns, the lanes copy unit by unit side by side, and each reads its own few in
//             a row: they lie such that eight lanes that read at a time meet eight different banks. What is read as
//             kChunks, each lane copies itself
//   entry     of the ring: elements, averages, codes, scales of an int8 state, parameters of codes; what a task lacks
//             is left as it was
#pragma once

#include "int8_state_device.cuh"
#include "stage_device.cuh"

namespace echo::cuda {

constexpr int kTaskElems = kWarpLanes * kLaneElems;
constexpr int kUnitBytes = 16;

// Where things lie in an entry. kAverages: of those that are loaded ahead.
template <int kBits, StateKind kStateKind, int kAverages, bool kHasElements>
struct EntryLayout {
  static constexpr StateKind kState = kStateKind;
  static constexpr int kAverageElemBytes = kState == StateKind::kNone ? 0 : kState == StateKind::kInt8 ? 1 : 2;
  static constexpr int kAverageBytes = kTaskElems * kAverageElemBytes;
  static constexpr int kAveragesAt = kHasElements ? 2 * kTaskElems : 0;
  static constexpr int kCodesAt = kAveragesAt + kAverages * kAverageBytes;
  static constexpr int kScalesAt = kCodesAt + kTaskElems * kBits / 8;
  static constexpr int kScaleBytes = kState == StateKind::kInt8 ? 4 * kWarpLanes : 0;
  static constexpr int kParamsAt = kScalesAt + kAverages * kScaleBytes;
  static constexpr int kBytes = kParamsAt + 4 * kWarpLanes;
};

// Where the unit `i` of kUnits in a row, of lane `lane` of the warp, lies in an array of them.
template <int kUnits>
static __device__ __forceinline__ uint32_t unit_offset(uint32_t lane, uint32_t i) {
  const uint32_t first = kUnits * lane;
  return kUnitBytes * (first + (i ^ (first / 8 & (kUnits - 1))));
}

// The same for lane `lane` of what lies side by side: unit `lane` of 32.
template <int kUnits>
static __device__ __forceinline__ uint32_t side_offset(uint32_t lane) {
  return kUnitBytes * (lane ^ (lane / 8 & (kUnits - 1)));
}

// An array of kUnits units per lane.
template <int kUnits>
static __device__ __forceinline__ void start_run_copies(uint32_t lane, std::byte* to, const std::byte* from) {
  to += side_offset<kUnits>(lane);
  from += kUnitBytes * lane;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    start_copy<kUnitBytes>(to + i * kUnitBytes * kWarpLanes, from + i * kUnitBytes * kWarpLanes);
  }
}

template <int kUnits>
static __device__ __forceinline__ void read_run(uint32_t lane, const std::byte* array, uint32_t (&words)[4 * kUnits]) {
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const uint4 quad = *reinterpret_cast<const uint4*>(array + unit_offset<kUnits>(lane, i));
    words[4 * i] = quad.x;
    words[4 * i + 1] = quad.y;
    words[4 * i + 2] = quad.z;
    words[4 * i + 3] = quad.w;
  }
}

// What lanes have in a row, kUnits each, as units side by side: lane l gets units l, l + 32, .. By way of `array`,
// where nothing is on its way.
template <int kUnits>
static __device__ __forceinline__ void exchange_run(uint32_t lane, std::byte* array, uint32_t (&words)[4 * kUnits]) {
  if constexpr (kUnits == 1) return;
#pragma unroll
  for (uint32_t i = 0; i < kUnits; ++i) {
    *reinterpret_cast<uint4*>(array + unit_offset<kUnits>(lane, i)) =
        make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < kUnits; ++i) {
    const std::byte* place = array + side_offset<kUnits>(lane) + i * kUnitBytes * kWarpLanes;
    const uint4 quad = *reinterpret_cast<const uint4*>(place);
    words[4 * i] = quad.x;
    words[4 * i + 1] = quad.y;
    words[4 * i + 2] = quad.z;
    words[4 * i + 3] = quad.w;
  }
}

// Chunks between the first of a task and the first of this lane's, and between this lane's, of kChunks.
template <Spread kSpread>
static __device__ __forceinline__ uint32_t first_chunk_of_task(const Lane<kSpread>& lane) {
  return (lane.in_warp >> lane.lanes_log2 << (lane.lanes_log2 + 2)) + lane.index;
}
template <Spread kSpread>
static __device__ __forceinline__ uint32_t chunks_apart(const Lane<kSpread>& lane) {
  return 1u << lane.lanes_log2;
}

// `first`: of the task's elements, in the tensor or in an average.
template <Spread kSpread, int kElemBytes>
static __device__ __forceinline__ void start_element_copies(const Lane<kSpread>& lane, std::byte* to,
                                                            const std::byte* first) {
  if constexpr (kSpread == Spread::kRuns) {
    start_run_copies<2 * kElemBytes>(lane.in_warp, to, first);
  } else {
    constexpr int kChunkBytes = kChunkElems * kElemBytes;
    first += kChunkBytes * first_chunk_of_task(lane);
    to += kChunkBytes * lane.in_warp;
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      start_copy<kChunkBytes>(to + part * kChunkBytes * kWarpLanes, first + part * kChunkBytes * chunks_apart(lane));
    }
  }
}

// A lane's chunks of what start_element_copies brought.
template <int kElemBytes, Spread kSpread>
static __device__ __forceinline__ void read_elements(const Lane<kSpread>& lane, const std::byte* array,
                                                     ChunkWords<kElemBytes> (&words)[kLaneChunks]) {
  if constexpr (kSpread == Spread::kRuns) {
    uint32_t all[8 * kElemBytes];
    read_run<2 * kElemBytes>(lane.in_warp, array, all);
#pragma unroll
    for (int word = 0; word < 8 * kElemBytes; ++word) {
      words[word / (2 * kElemBytes)].at[word % (2 * kElemBytes)] = all[word];
    }
  } else {
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      const std::byte* place = array + kChunkElems * kElemBytes * (lane.in_warp + part * kWarpLanes);
      if constexpr (kElemBytes == 2) {
        const uint4 quad = *reinterpret_cast<const uint4*>(place);
        words[part] = ChunkWords<2>{{quad.x, quad.y, quad.z, quad.w}};
      } else {
        const uint2 pair = *reinterpret_cast<const uint2*>(place);
        words[part] = ChunkWords<1>{{pair.x, pair.y}};
      }
    }
  }
}

// The codes and parameters of task `task` of a tile.
template <int kBits, Spread kSpread>
static __device__ __forceinline__ void start_code_copies(const Lane<kSpread>& lane, int32_t task, std::byte* codes,
                                                         std::byte* params, const TileView<const std::byte>& tile) {
  // A tile is far smaller than 4 GiB.
  const auto before = static_cast<uint32_t>(task);
  const auto side = static_cast<uint32_t>(groups_side_by_side(lane.lanes_log2));
  start_run_copies<kBits / 4>(lane.in_warp, codes, tile.codes + before * (kTaskElems * kBits / 8));
  if (lane.in_warp < side) start_copy<4>(params + 4 * lane.in_warp, tile.params + 4 * (before * side + lane.in_warp));
}

template <int kBits, Spread kSpread>
static __device__ __forceinline__ Encoded<kBits> read_encoded(const Lane<kSpread>& lane, const std::byte* codes,
                                                              const std::byte* params) {
  Encoded<kBits> encoded;
  if constexpr (kSpread == Spread::kRuns) {
    read_run<kBits / 4>(lane.in_warp, codes, encoded.codes);
  } else {
    constexpr int kWords = kChunkCodeWords<kBits>;
    constexpr uint32_t kSwizzled = kBits / 4 - 1;
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      const uint32_t word = kWords * (first_chunk_of_task(lane) + part * chunks_apart(lane));
      const uint32_t place = 4 * (word ^ 4 * (word / 32 & kSwizzled));
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        encoded.codes[kWords * part + i] = *reinterpret_cast<const uint32_t*>(codes + place + 4 * i);
      }
    }
  }
  encoded.params = *reinterpret_cast<const uint32_t*>(params + 4 * (lane.in_warp >> lane.lanes_log2));
  return encoded;
}

// The scales of an int8 average, two bytes each, of task `task` of a tile: as the aligned words that they lie in, since
// copies have four bytes. The state has room for the last one.
template <Spread kSpread>
static __device__ __forceinline__ void start_scale_copies(const Lane<kSpread>& lane, int32_t task, int which,
                                                          std::byte* to) {
  const auto side = static_cast<uint32_t>(groups_side_by_side(lane.lanes_log2));
  if (lane.in_warp >= side) return;
  const int64_t group = lane.first_group + static_cast<uint32_t>(task) * side + lane.in_warp;
  start_copy<4>(to + 4 * lane.in_warp, average_base(lane, which) + lane.state_layout.scales_offset + (group & ~1) * 2);
}

template <Spread kSpread>
static __device__ __forceinline__ uint32_t read_scale(const Lane<kSpread>& lane, const GroupAt& at,
                                                      const std::byte* scales) {
  const auto word = *reinterpret_cast<const uint32_t*>(scales + 4 * (lane.in_warp >> lane.lanes_log2));
  return (lane.first_group + at.slot) % 2 == 0 ? word & 0xffffu : word >> 16;
}

}  // namespace echo::cuda
