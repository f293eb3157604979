// One group held in the registers of a power-of-two number of lanes: the device's way of visiting what core/ defines.
//
//   chunk   8 consecutive elements
//   lane    4 chunks: 4 in a row (Spread::kRuns), so that a lane's codes and its int8 state are whole 16-byte words, or
//           chunks lane, lane + L, lane + 2L, lane + 3L (Spread::kChunks), so that a warp's tensor stores are
//           contiguous
//   group   g / 8 chunks over L = 1, 2, .. 32 lanes; slots without a chunk are absent
//   warp    32 / L full groups side by side, or the one partial group
//
// Every lane of the warp executes every function here, so shuffles always name the whole warp: whatever steers a branch
// around one must be equal in all lanes. Idle lanes hold no element of any group; they neither read nor write memory.
#pragma once

#include "../core/rotation.h"
#include "../core/site.h"
#include "../core/tile.h"
#include "chunk_device.cuh"
#include "grid_device.cuh"

namespace echo::cuda {

constexpr int kWarpLanesLog2 = 5;
constexpr int kWarpLanes = 1 << kWarpLanesLog2;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kLaneChunks = 4;
constexpr int kLaneElems = kLaneChunks * kChunkElems;

enum class Spread { kRuns, kChunks };

// Below this factor on the extremes, elements may lie more than 2^15 steps away, too far for clamping 16-bit integers:
// one-sided groups put an element up to (levels + 512) / clip steps from the zero-point, 512 being the larger limit of
// |z|, and |z| comes on top: 1279 / clip < 2^15.
constexpr float kSmallestQuickClip = 0.0625f;

// Offsets in the compensator's state that core/tile.h computes with 64-bit divisions: done once, on the host.
struct StateLayout {
  int64_t average_bytes = 0;  // from c to m1
  int64_t scales_offset = 0;  // of int8 state, in either
};

static inline StateLayout make_state_layout(const Plan& plan) {
  if (!plan.feedback.enabled) return {};
  return StateLayout{state_average_bytes(plan), state_scales_offset(plan)};
}

// What stays the same for a thread over all groups of a tile. The references lead into the kernel's parameters.
template <Spread kSpread>
struct Lane {
  const Site& site;
  const StateLayout& state_layout;
  int64_t first_group;  // of the tile
  int64_t first_elem;   // of the tensor, where the tile's groups begin
  int32_t lanes_log2;   // L
  int32_t index;        // of this lane among the L
  uint32_t in_warp;     // of this lane in the warp
  uint32_t signs;       // bits 15 - k and 31 - k: the rotation negates this lane's elements 2k and 2k + 1
  float scale_up;       // 2^k, 2^-k of the rescale
  float scale_down;
  float sure_steps;     // sure_steps_inside of the codec
  bool tensor_aligned;  // chunks of the tensor can be loaded whole
  // What the plan says, kept here so that kernels made for plans of a kind can make constants of them.
  bool is_signed;    // the codes are
  bool quick_clip;   // clip is not below kSmallestQuickClip
  bool corrected;    // there is a correction to add
  StateDType state;  // its format
};

// One group as this lane sees it; `rotated` and `dense` are equal in all lanes of the warp.
struct GroupAt {
  int32_t slot = 0;   // its place in the tile, which holds fewer than 2^31 groups
  int32_t elems = 0;  // 0: no group for these lanes
  bool rotated = false;
  bool dense = false;  // no slot of any lane of the warp is absent
};

// Bit i of byte b: the rotation negates element 8b + i of a run.
struct SignBytes {
  uint8_t at[kMaxGroupElems / kChunkElems];
  constexpr SignBytes() : at() {
    for (uint32_t i = 0; i < kMaxGroupElems; ++i) {
      at[i / kChunkElems] = static_cast<uint8_t>(at[i / kChunkElems] | rotation_sign_bit(i) >> 31 << (i % kChunkElems));
    }
  }
};
static __device__ const SignBytes kSignBytes;

// Runs shorter than a chunk repeat in it, runs of whole chunks start anew every so many.
static __device__ __forceinline__ uint32_t chunk_signs(int32_t chunk, int32_t run_log2) {
  if (run_log2 >= 3) return kSignBytes.at[chunk & ((1 << (run_log2 - 3)) - 1)];
  const uint32_t pair = kSignBytes.at[0] & 0x3u;
  return run_log2 == 2 ? (kSignBytes.at[0] & 0xfu) * 0x11u : run_log2 == 1 ? pair * 0x55u : 0u;
}

// The signs of chunk `part` of a lane, moved to where Lane::signs has them.
static __device__ __forceinline__ uint32_t place_signs(uint32_t chunk, int part) {
  uint32_t placed = 0;
#pragma unroll
  for (int e = 0; e < kChunkElems; ++e) {
    placed |= (chunk >> e & 1u) << ((e % 2 == 0 ? 15 : 31) - e / 2 - kChunkElems / 2 * part);
  }
  return placed;
}

template <Spread kSpread>
static __device__ __forceinline__ int32_t chunk_at(int32_t lanes_log2, int32_t index, int part) {
  return kSpread == Spread::kRuns ? index * kLaneChunks + part : (part << lanes_log2) + index;
}

// The power of two of lanes that a group lies in.
static __device__ __forceinline__ int32_t lanes_log2_of(const Codec& codec) {
  return 32 - __clz((codec.group_elems + kLaneElems - 1) / kLaneElems - 1);
}

// How many groups a warp holds, and which of them this thread's is.
static __device__ __forceinline__ int32_t groups_side_by_side(int32_t lanes_log2) { return kWarpLanes >> lanes_log2; }
static __device__ __forceinline__ int32_t group_in_task(int32_t lanes_log2) {
  return (static_cast<int32_t>(threadIdx.x) % kWarpLanes) >> lanes_log2;
}

template <Spread kSpread>
static __device__ __forceinline__ Lane<kSpread> make_lane(const Site& site, const StateLayout& state_layout,
                                                          int64_t first_group, int32_t rescale_log2) {
  const Codec& codec = site.plan.codec;
  const int32_t lanes_log2 = lanes_log2_of(codec);
  const int32_t index = static_cast<int32_t>(recompute_here(threadIdx.x)) & ((1 << lanes_log2) - 1);
  uint32_t signs = 0;
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    signs |= place_signs(chunk_signs(chunk_at<kSpread>(lanes_log2, index, part), codec.rotation_log2), part);
  }
  const bool aligned = reinterpret_cast<uintptr_t>(site.tensor) % 16 == 0;
  return Lane<kSpread>{.site = site,
                       .state_layout = state_layout,
                       .first_group = first_group,
                       .first_elem = first_group * codec.group_elems,
                       .lanes_log2 = lanes_log2,
                       .index = index,
                       .in_warp = threadIdx.x % kWarpLanes,
                       .signs = signs,
                       .scale_up = power_of_two(rescale_log2),
                       .scale_down = power_of_two(-rescale_log2),
                       .sure_steps = sure_steps_inside(codec),
                       .tensor_aligned = aligned,
                       .is_signed = codec.quantizer == Quantizer::kSymmetric,
                       .quick_clip = codec.clip >= kSmallestQuickClip,
                       .corrected = site.plan.feedback.enabled && !site.plan.first_site,
                       .state = site.plan.feedback.state_dtype};
}

template <Spread kSpread>
static __device__ __forceinline__ int32_t chunk_of(const Lane<kSpread>& lane, int part) {
  return chunk_at<kSpread>(lane.lanes_log2, lane.index, part);
}

// Elements of the group from this lane's chunk `part` on; not positive if the chunk is absent.
template <Spread kSpread>
static __device__ __forceinline__ int32_t remaining_in(const Lane<kSpread>& lane, const GroupAt& at, int part) {
  return at.elems - kChunkElems * chunk_of(lane, part);
}

template <Spread kSpread>
static __device__ __forceinline__ void fill_absent(const Lane<kSpread>& lane, const GroupAt& at, float value,
                                                   float (&x)[kLaneElems]) {
  if (at.dense) return;
#pragma unroll
  for (int e = 0; e < kLaneElems; ++e) {
    if (e % kChunkElems >= remaining_in(lane, at, e / kChunkElems)) x[e] = value;
  }
}

// ---- memory -------------------------------------------------------------------------------------------------------

// Where this lane's chunk `part` begins in an array with kElemBytes per element of the tensor: one long product for the
// group, short offsets for its chunks.
template <int kElemBytes, Spread kSpread, typename Byte>
static __device__ __forceinline__ Byte* chunk_address(const Lane<kSpread>& lane, const GroupAt& at, Byte* array,
                                                      int part) {
  const int64_t group = lane.first_elem + int64_t{at.slot} * lane.site.plan.codec.group_elems;
  Byte* base = array + group * kElemBytes;
  return base + static_cast<uint32_t>(chunk_of(lane, part) * kChunkElems * kElemBytes);
}

// This lane's elements of an array with kElemBytes per element of the tensor; zeros where they are absent. `aligned`:
// the array is, to 16 bytes.
template <int kElemBytes, Spread kSpread>
static __device__ __forceinline__ void load_elements(const Lane<kSpread>& lane, const GroupAt& at,
                                                     const std::byte* array, bool aligned,
                                                     ChunkWords<kElemBytes> (&words)[kLaneChunks]) {
  if (at.dense && aligned) {
    if constexpr (kSpread == Spread::kRuns) {
      const uint4* from = reinterpret_cast<const uint4*>(chunk_address<kElemBytes>(lane, at, array, 0));
#pragma unroll
      for (int i = 0; i < 2 * kElemBytes; ++i) {
        const uint4 quad = from[i];
        uint32_t* to = words[4 * i / (2 * kElemBytes)].at + 4 * i % (2 * kElemBytes);
        // A chunk of single bytes is half of the quad.
        uint32_t* then = kElemBytes == 1 ? words[(4 * i / 2 + 1) % kLaneChunks].at : to + 2;
        to[0] = quad.x;
        to[1] = quad.y;
        then[0] = quad.z;
        then[1] = quad.w;
      }
    } else {
#pragma unroll
      for (int part = 0; part < kLaneChunks; ++part) {
        words[part] = load_chunk<kElemBytes>(chunk_address<kElemBytes>(lane, at, array, part), kChunkElems, true);
      }
    }
    return;
  }
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    words[part] =
        load_chunk<kElemBytes>(chunk_address<kElemBytes>(lane, at, array, part), remaining_in(lane, at, part), aligned);
  }
}

template <int kElemBytes, Spread kSpread>
static __device__ __forceinline__ void store_words(const Lane<kSpread>& lane, const GroupAt& at, std::byte* array,
                                                   bool aligned, const ChunkWords<kElemBytes> (&words)[kLaneChunks]) {
  if (at.dense && aligned) {
    if constexpr (kSpread == Spread::kRuns && kElemBytes == 1) {
      uint4* to = reinterpret_cast<uint4*>(chunk_address<kElemBytes>(lane, at, array, 0));
#pragma unroll
      for (int i = 0; i < kLaneChunks / 2; ++i) {
        to[i] = make_uint4(words[2 * i].at[0], words[2 * i].at[1], words[2 * i + 1].at[0], words[2 * i + 1].at[1]);
      }
    } else {
#pragma unroll
      for (int part = 0; part < kLaneChunks; ++part) {
        store_chunk(words[part], chunk_address<kElemBytes>(lane, at, array, part), kChunkElems, true);
      }
    }
    return;
  }
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    store_chunk(words[part], chunk_address<kElemBytes>(lane, at, array, part), remaining_in(lane, at, part), aligned);
  }
}

template <DType kDType>
static __device__ __forceinline__ void widen_elements(const ChunkWords<kBytesOf<kDType>> (&words)[kLaneChunks],
                                                      float (&x)[kLaneElems]) {
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) widen_chunk<kDType>(words[part], x + kChunkElems * part);
}

// True if a value is NaN, and perhaps if one is Inf: x * 0 is then NaN and stays in the sum.
static __device__ __forceinline__ bool may_hold_nan(const float (&x)[kLaneElems]) {
  float probe = 0.0f;
#pragma unroll
  for (int e = 0; e < kLaneElems; ++e) probe = __fmaf_rn(x[e], 0.0f, probe);
  return probe != 0.0f;
}

}  // namespace echo::cuda
