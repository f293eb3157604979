// What a warp loads ahead of its turn: the tasks to come wait in a ring of shared memory of its own. Loads on their way
// then take no registers, and several tasks can be under way, which a multiprocessor with few warps needs to keep its
// memory busy.
//
//   task      1024 consecutive elements: the groups that a warp has side by side, all whole; their codes are as
//             consecutive in a tile, their averages in the state
//   unit      16 bytes. Lanes load and store units side by side, unit i of a lane being 32 i + lane of the task's, so
//             that what a warp moves at a time has no gaps; and they work on runs, the units kUnits * lane + i
//   array     in shared memory, where the one becomes the other: units in order, but for a swap of neighbours that
//             makes eight lanes that read or write at a time meet eight different banks either way
//   entry     of the ring: arrays of elements, averages, codes; scales of an int8 state; parameters of codes. What a
//             task lacks is left as it was
#pragma once

#include "int8_state_device.cuh"
#include "stage_device.cuh"

namespace echo::cuda {

constexpr int kTaskElems = kWarpLanes * kLaneElems;
constexpr int kUnitBytes = 16;
constexpr int kRowBytes = kUnitBytes * kWarpLanes;  // a unit of every lane

// Where things lie in an entry, at multiples of 64 bytes, as run_place needs it. kAverages: of those that are loaded
// ahead.
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
  static_assert(kBytes % 64 == 0);
};

// In an array of kUnits units per lane: where this lane's first unit of those side by side lies, the others kRowBytes
// apart; and where the first of its run does, the i-th at that xor 16 i.
template <int kUnits>
static __device__ __forceinline__ uint32_t side_place(uint32_t lane) {
  return kUnitBytes * (lane ^ (lane / 8 & (kUnits - 1)));
}
template <int kUnits>
static __device__ __forceinline__ uint32_t run_place(uint32_t lane) {
  return kUnitBytes * (kUnits * lane + (kUnits * lane / 8 & (kUnits - 1)));
}

template <int kUnits>
static __device__ __forceinline__ void read_side(SharedAddress array, uint32_t lane, uint32_t (&words)[4 * kUnits]) {
  const SharedAddress first = array + side_place<kUnits>(lane);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const uint4 quad = load_shared_quad(first + i * kRowBytes);
    words[4 * i] = quad.x;
    words[4 * i + 1] = quad.y;
    words[4 * i + 2] = quad.z;
    words[4 * i + 3] = quad.w;
  }
}

template <int kUnits>
static __device__ __forceinline__ void read_run(SharedAddress array, uint32_t lane, uint32_t (&words)[4 * kUnits]) {
  const SharedAddress first = array + run_place<kUnits>(lane);
#pragma unroll
  for (uint32_t i = 0; i < kUnits; ++i) {
    const uint4 quad = load_shared_quad(first ^ kUnitBytes * i);
    words[4 * i] = quad.x;
    words[4 * i + 1] = quad.y;
    words[4 * i + 2] = quad.z;
    words[4 * i + 3] = quad.w;
  }
}

template <int kUnits>
static __device__ __forceinline__ void write_run(SharedAddress array, uint32_t lane,
                                                 const uint32_t (&words)[4 * kUnits]) {
  const SharedAddress first = array + run_place<kUnits>(lane);
#pragma unroll
  for (uint32_t i = 0; i < kUnits; ++i) {
    store_shared_quad(first ^ kUnitBytes * i,
                      make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]));
  }
}

// `from`, `to`: this lane's first unit of those side by side.
template <int kUnits>
static __device__ __forceinline__ void start_copies(SharedAddress array, uint32_t lane, const std::byte* from) {
  const SharedAddress first = array + side_place<kUnits>(lane);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) start_copy<kUnitBytes>(first + i * kRowBytes, from + i * kRowBytes);
}

// Units side by side to memory.
template <int kUnits>
static __device__ __forceinline__ void store_side(std::byte* to, const uint32_t (&words)[4 * kUnits]) {
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    store_global_quad(to + i * kRowBytes,
                      make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]));
  }
}

// Runs become units side by side, by way of an array that no lane needs any more.
template <int kUnits>
static __device__ __forceinline__ void exchange_run(SharedAddress array, uint32_t lane, uint32_t (&words)[4 * kUnits]) {
  if constexpr (kUnits == 1) return;
  write_run<kUnits>(array, lane, words);
  __syncwarp();
  read_side<kUnits>(array, lane, words);
}

// A lane's chunks as the words of its run, and the other way round.
template <int kElemBytes>
static __device__ __forceinline__ void flatten(const ChunkWords<kElemBytes> (&chunks)[kLaneChunks],
                                               uint32_t (&words)[8 * kElemBytes]) {
#pragma unroll
  for (int word = 0; word < 8 * kElemBytes; ++word) {
    words[word] = chunks[word / (2 * kElemBytes)].at[word % (2 * kElemBytes)];
  }
}

template <int kElemBytes>
static __device__ __forceinline__ void read_elements(SharedAddress array, uint32_t lane,
                                                     ChunkWords<kElemBytes> (&chunks)[kLaneChunks]) {
  uint32_t words[8 * kElemBytes];
  read_run<2 * kElemBytes>(array, lane, words);
#pragma unroll
  for (int word = 0; word < 8 * kElemBytes; ++word) {
    chunks[word / (2 * kElemBytes)].at[word % (2 * kElemBytes)] = words[word];
  }
}

// `to`: this lane's first unit of those side by side. By way of an array that no lane needs any more.
template <int kElemBytes>
static __device__ __forceinline__ void store_elements_by(SharedAddress array, uint32_t lane, std::byte* to,
                                                         const ChunkWords<kElemBytes> (&chunks)[kLaneChunks]) {
  uint32_t words[8 * kElemBytes];
  flatten<kElemBytes>(chunks, words);
  exchange_run<2 * kElemBytes>(array, lane, words);
  store_side<2 * kElemBytes>(to, words);
}

}  // namespace echo::cuda
