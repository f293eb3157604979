// Loops over one group held in the registers of a power-of-two number of lanes: the device's way of visiting what core/
// defines.
//
//   chunk   8 consecutive elements; one lane holds chunks lane, lane + L, lane + 2L, ...
//   group   g / 8 chunks over L = 1, 2, .. 32 lanes; slots without a chunk are absent
//   warp    32 / L full groups side by side, or the one partial group
//
// Every lane of the warp executes every function here, so shuffles always name the whole warp: whatever steers a branch
// around one must be equal in all lanes. Idle lanes hold no element of any group; they neither read nor write memory.
#pragma once

#include "../core/feedback.h"
#include "../core/reduce.h"
#include "../core/rotation.h"
#include "../core/site.h"
#include "../core/tile.h"
#include "chunk_device.cuh"

namespace echo::cuda {

constexpr int kWarpLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

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
struct Lane {
  const Site& site;
  const StateLayout& state_layout;
  int64_t first_group;  // of the tile
  int64_t first_elem;   // of the tensor, where the tile's groups begin
  int32_t lanes_log2;   // L
  int32_t index;        // of this lane among the L
  uint32_t signs;       // bit e: the rotation negates this lane's element e
  float scale_up;       // 2^k, 2^-k of the rescale
  float scale_down;
  bool tensor_aligned;  // chunks of the tensor can be loaded whole
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

template <int kElems>
static __device__ __forceinline__ Lane make_lane(const Site& site, const StateLayout& state_layout, int64_t first_group,
                                                 int32_t rescale_log2) {
  const int32_t chunks = site.plan.codec.group_elems / kChunkElems;
  const int32_t lanes = (chunks + kElems / kChunkElems - 1) / (kElems / kChunkElems);
  const int32_t lanes_log2 = 32 - __clz(lanes - 1);
  const int32_t index = static_cast<int32_t>(threadIdx.x) & ((1 << lanes_log2) - 1);
  uint32_t signs = 0;
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    signs |= chunk_signs((part << lanes_log2) + index, site.plan.codec.rotation_log2) << (kChunkElems * part);
  }
  const bool aligned = reinterpret_cast<uintptr_t>(site.tensor) % 16 == 0;
  return Lane{.site = site,
              .state_layout = state_layout,
              .first_group = first_group,
              .first_elem = first_group * site.plan.codec.group_elems,
              .lanes_log2 = lanes_log2,
              .index = index,
              .signs = signs,
              .scale_up = power_of_two(rescale_log2),
              .scale_down = power_of_two(-rescale_log2),
              .tensor_aligned = aligned};
}

static __device__ __forceinline__ int32_t chunk_of(const Lane& lane, int part) {
  return (part << lane.lanes_log2) + lane.index;
}

// Elements of the group from this lane's chunk `part` on; not positive if the chunk is absent.
static __device__ __forceinline__ int32_t remaining_in(const Lane& lane, const GroupAt& at, int part) {
  return at.elems - kChunkElems * chunk_of(lane, part);
}

template <int kElems>
static __device__ __forceinline__ void fill_absent(const Lane& lane, const GroupAt& at, float value,
                                                   float (&x)[kElems]) {
  if (at.dense) return;
#pragma unroll
  for (int e = 0; e < kElems; ++e) {
    if (e % kChunkElems >= remaining_in(lane, at, e / kChunkElems)) x[e] = value;
  }
}

// ---- tensor -------------------------------------------------------------------------------------------------------

// Index in the tensor of the first element of this lane's chunk `part`.
static __device__ __forceinline__ int64_t elem_index(const Lane& lane, const GroupAt& at, int part) {
  return lane.first_elem + int64_t{at.slot} * lane.site.plan.codec.group_elems + kChunkElems * chunk_of(lane, part);
}

template <DType kDType, int kElems>
static __device__ __forceinline__ void store_elements(const Lane& lane, const GroupAt& at, const float (&x)[kElems]) {
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    std::byte* to = static_cast<std::byte*>(lane.site.tensor) + elem_index(lane, at, part) * kBytesOf<kDType>;
    store_chunk(narrow_chunk<kDType>(x + kChunkElems * part), to, remaining_in(lane, at, part), lane.tensor_aligned);
  }
}

// ---- rotation -----------------------------------------------------------------------------------------------------

// Butterflies at a stride between elements of one lane.
template <int kElems>
static __device__ __forceinline__ void butterflies_inside(float (&x)[kElems], int stride) {
#pragma unroll
  for (int e = 0; e < kElems; ++e) {
    if ((e & stride) != 0) continue;
    const float u = x[e];
    const float v = x[e + stride];
    x[e] = u + v;
    x[e + stride] = u - v;
  }
}

// Pre: runs of at least 2. Strides inside a chunk, then across lanes, then across the chunks of a lane: ascending, as
// the contract has it.
template <int kElems>
static __device__ __forceinline__ void butterflies(const Lane& lane, float (&x)[kElems]) {
  const int run_log2 = lane.site.plan.codec.rotation_log2;
  butterflies_inside(x, 1);
  if (run_log2 >= 3) {
    butterflies_inside(x, 2);
    butterflies_inside(x, 4);
  } else if (run_log2 == 2) {
    butterflies_inside(x, 2);
  }
#pragma unroll 1
  for (int bit = 0; bit < min(run_log2 - 3, lane.lanes_log2); ++bit) {
    // The product with 1 or -1 is exact, so the fused form rounds once, as the sum or difference does.
    const float side = (lane.index >> bit & 1) == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int e = 0; e < kElems; ++e) x[e] = __fmaf_rn(x[e], side, __shfl_xor_sync(kAllLanes, x[e], 1 << bit));
  }
#pragma unroll
  for (int stride = kChunkElems; stride < kElems; stride *= 2) {
    if ((stride << lane.lanes_log2) < 1 << run_log2) butterflies_inside(x, stride);
  }
}

template <int kElems>
static __device__ __forceinline__ void flip_signs(const Lane& lane, float (&x)[kElems]) {
  const uint32_t signs = recompute_here(lane.signs);
#pragma unroll
  for (int e = 0; e < kElems; ++e) x[e] = flip_sign(x[e], signs << (31 - e) & 0x80000000u);
}

template <int kElems>
static __device__ __forceinline__ void rotate_entry(const Lane& lane, const GroupAt& at, float (&x)[kElems]) {
  if (!at.rotated) return;
  flip_signs(lane, x);
  butterflies(lane, x);
  const float factor = rotation_entry_factor(lane.site.plan.codec);
  if (factor == 1.0f) return;
#pragma unroll
  for (int e = 0; e < kElems; ++e) x[e] = x[e] * factor;
}

template <int kElems>
static __device__ __forceinline__ void rotate_exit(const Lane& lane, const GroupAt& at, float (&x)[kElems]) {
  if (!at.rotated) return;
  butterflies(lane, x);
  const float factor = rotation_exit_factor(lane.site.plan.codec);
#pragma unroll
  for (int e = 0; e < kElems; ++e) x[e] = x[e] * factor;
  flip_signs(lane, x);
}

// ---- quantizer ----------------------------------------------------------------------------------------------------

// A tile in memory: codes and parameters of its groups (core/tile.h).
template <typename Byte>
struct TileView {
  Byte* codes;
  Byte* params;
};

template <typename Byte>
static __device__ __forceinline__ TileView<Byte> view_tile(const Codec& codec, int64_t tile_groups, Byte* tile) {
  return TileView<Byte>{tile, tile + params_offset(codec, tile_groups)};
}

static __device__ __forceinline__ CodeForm code_form(const Codec& codec) {
  return code_form(codec.bits, codec.quantizer == Quantizer::kSymmetric);
}

// Pre: absent slots hold copies of an element. A NaN anywhere makes both extremes NaN and so the magnitude too large.
template <int kElems>
static __device__ __forceinline__ GroupStats group_stats(const Lane& lane, const float (&x)[kElems]) {
  float lo = x[0];
  float hi = x[0];
#pragma unroll
  for (int e = 1; e < kElems; ++e) {
    lo = min_or_nan(lo, x[e]);
    hi = max_or_nan(hi, x[e]);
  }
#pragma unroll 1
  for (int stride = 1; stride < 1 << lane.lanes_log2; stride *= 2) {
    lo = min_or_nan(lo, __shfl_xor_sync(kAllLanes, lo, stride));
    hi = max_or_nan(hi, __shfl_xor_sync(kAllLanes, hi, stride));
  }
  // Rounding is monotonic: the extremes times 2^k are the extremes of the products.
  lo = lo * lane.scale_up;
  hi = hi * lane.scale_up;
  return GroupStats{lo, hi, max(bits_of(lo) & kAbsMask32, bits_of(hi) & kAbsMask32)};
}

// This lane's part of an encoded group, in registers: what it loaded, so that the next one can be on its way while this
// one is decoded, or what it is about to store, perhaps in several places.
template <int kElems>
struct Encoded {
  CodeWords codes[kElems / kChunkElems];
  GroupParams params;
};

// Encodes x and says what a receiver will decode, in the caller's units. Overwrites absent slots of x.
template <int kElems>
static __device__ __forceinline__ Encoded<kElems> encode_group(const Lane& lane, const GroupAt& at, float (&x)[kElems],
                                                               float (&decoded)[kElems]) {
  const Codec& codec = lane.site.plan.codec;
  if (!at.dense) {
    fill_absent(lane, at, __shfl_sync(kAllLanes, x[0], 0, 1 << lane.lanes_log2), x);
  }
  Encoded<kElems> encoded;
  encoded.params = group_params(group_stats(lane, x), codec);
  const GroupGrid grid = group_grid(encoded.params, codec);
  const CodeForm form = code_form(codec);
  // A group without codes has limits 0, 0, to which even NaN is clamped.
#pragma unroll
  for (int e = 0; e < kElems; ++e) decoded[e] = encode_element(x[e] * lane.scale_up, grid);
  fill_absent(lane, at, 0.0f, decoded);
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    encoded.codes[part] = pack_chunk(decoded + kChunkElems * part, codec.bits, form);
  }
#pragma unroll
  for (int e = 0; e < kElems; ++e) decoded[e] = decode_element(decoded[e], grid) * lane.scale_down;
  return encoded;
}

// Codes of absent elements of a partial group are written too, as zeros.
template <int kElems>
static __device__ __forceinline__ void store_encoded(const Lane& lane, const GroupAt& at,
                                                     const Encoded<kElems>& encoded, const TileView<std::byte>& tile) {
  const Codec& codec = lane.site.plan.codec;
  std::byte* codes = tile.codes + int64_t{at.slot} * static_cast<int32_t>(code_bytes(codec));
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    const int32_t chunk = chunk_of(lane, part);
    if (at.elems == 0 || chunk * kChunkElems >= codec.group_elems) continue;
    const CodeWords& words = encoded.codes[part];
    if (codec.bits == 4) {
      reinterpret_cast<uint32_t*>(codes)[chunk] = words.at[0];
    } else {
      reinterpret_cast<uint2*>(codes)[chunk] = make_uint2(words.at[0], words.at[1]);
    }
  }
  if (at.elems == 0 || lane.index != 0) return;
  const GroupParams& params = encoded.params;
  if (codec.quantizer == Quantizer::kSymmetric) {
    reinterpret_cast<uint16_t*>(tile.params)[at.slot] = params.scale_bits;
  } else {
    reinterpret_cast<uint32_t*>(tile.params)[at.slot] = params.scale_bits | static_cast<uint32_t>(params.zero_bits)
                                                                                << 16;
  }
}

template <int kElems>
static __device__ __forceinline__ Encoded<kElems> load_encoded(const Lane& lane, const GroupAt& at,
                                                               const TileView<const std::byte>& tile) {
  const Codec& codec = lane.site.plan.codec;
  Encoded<kElems> encoded = {};
  const std::byte* codes = tile.codes + int64_t{at.slot} * static_cast<int32_t>(code_bytes(codec));
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    if (remaining_in(lane, at, part) <= 0) continue;
    if (codec.bits == 4) {
      encoded.codes[part].at[0] = reinterpret_cast<const uint32_t*>(codes)[chunk_of(lane, part)];
    } else {
      const uint2 pair = reinterpret_cast<const uint2*>(codes)[chunk_of(lane, part)];
      encoded.codes[part] = CodeWords{{pair.x, pair.y}};
    }
  }
  if (at.elems == 0) return encoded;
  if (codec.quantizer == Quantizer::kSymmetric) {
    encoded.params.scale_bits = reinterpret_cast<const uint16_t*>(tile.params)[at.slot];
  } else {
    const uint32_t pair = reinterpret_cast<const uint32_t*>(tile.params)[at.slot];
    encoded.params = GroupParams{static_cast<uint16_t>(pair), static_cast<uint16_t>(pair >> 16)};
  }
  return encoded;
}

template <int kElems>
static __device__ __forceinline__ void decode_group(const Lane& lane, const Encoded<kElems>& encoded,
                                                    float (&decoded)[kElems]) {
  const Codec& codec = lane.site.plan.codec;
  const GroupGrid grid = group_grid(encoded.params, codec);
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    unpack_chunk(encoded.codes[part], codec.bits, code_form(codec), decoded + kChunkElems * part);
  }
#pragma unroll
  for (int e = 0; e < kElems; ++e) decoded[e] = decode_element(decoded[e], grid) * lane.scale_down;
}

}  // namespace echo::cuda
