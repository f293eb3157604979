// A group to a tile and back.
#pragma once

#include "code_device.cuh"
#include "group_device.cuh"

namespace echo::cuda {

// A tile in memory: codes and parameters of its groups (core/tile.h).
template <typename Byte>
struct TileView {
  Byte* codes;
  Byte* params;
};

static __device__ __forceinline__ TileView<const std::byte> read_only(const TileView<std::byte>& tile) {
  return TileView<const std::byte>{tile.codes, tile.params};
}

template <typename Byte>
static __device__ __forceinline__ TileView<Byte> view_tile(const Codec& codec, int64_t tile_groups, Byte* tile) {
  return TileView<Byte>{tile, tile + params_offset(codec, tile_groups)};
}

// This lane's part of an encoded group: the words of its chunks one after another, and what all lanes of the group
// know.
template <int kBits>
struct Encoded {
  uint32_t codes[kBits];
  uint32_t params;  // as in memory: the scale, the zero-point above it. Taken apart where used, not where loaded
};

static __device__ __forceinline__ GroupParams unpack_params(uint32_t params) {
  return GroupParams{static_cast<uint16_t>(params), static_cast<uint16_t>(params >> 16)};
}

template <int kBits>
constexpr int kChunkCodeWords = kBits / kLaneChunks;

// ---- extremes -----------------------------------------------------------------------------------------------------

// Of the whole group, from those of this lane's elements.
template <Spread kSpread>
static __device__ __forceinline__ Extremes over_lanes(const Lane<kSpread>& lane, Extremes own) {
#pragma unroll 1
  for (int stride = 1; stride < 1 << lane.lanes_log2; stride *= 2) {
    own.lo = min_or_nan(own.lo, __shfl_xor_sync(kAllLanes, own.lo, stride));
    own.hi = max_or_nan(own.hi, __shfl_xor_sync(kAllLanes, own.hi, stride));
  }
  return own;
}

// A NaN anywhere makes both extremes NaN. Overwrites absent slots of x.
template <Spread kSpread>
static __device__ __forceinline__ Extremes group_extremes(const Lane<kSpread>& lane, const GroupAt& at,
                                                          float (&x)[kLaneElems]) {
  if (!at.dense) fill_absent(lane, at, __shfl_sync(kAllLanes, x[0], 0, 1 << lane.lanes_log2), x);
  Extremes own{x[0], x[0]};
#pragma unroll
  for (int e = 1; e < kLaneElems; ++e) {
    own.lo = min_or_nan(own.lo, x[e]);
    own.hi = max_or_nan(own.hi, x[e]);
  }
  return over_lanes(lane, own);
}

// The same of a dense group of 16-bit elements as loaded, two at a time.
template <DType kDType, Spread kSpread>
static __device__ __forceinline__ Extremes word_extremes(const Lane<kSpread>& lane,
                                                         const ChunkWords<2> (&words)[kLaneChunks]) {
  constexpr bool kBrain = kDType == DType::kBFloat16;
  const auto least = [](uint32_t a, uint32_t b) {
    return kBrain ? min_pair_or_nan_bfloat16(a, b) : min_pair_or_nan_float16(a, b);
  };
  const auto most = [](uint32_t a, uint32_t b) {
    return kBrain ? max_pair_or_nan_bfloat16(a, b) : max_pair_or_nan_float16(a, b);
  };
  uint32_t lo = words[0].at[0];
  uint32_t hi = words[0].at[0];
#pragma unroll
  for (int word = 1; word < kLaneElems / 2; ++word) {
    lo = least(lo, words[word / 4].at[word % 4]);
    hi = most(hi, words[word / 4].at[word % 4]);
  }
  // The negated smallest value and the largest go on as one word.
  lo ^= 0x80008000u;
  uint32_t both = most(__byte_perm(lo, hi, 0x5410), __byte_perm(lo, hi, 0x7632));
#pragma unroll 1
  for (int stride = 1; stride < 1 << lane.lanes_log2; stride *= 2) {
    both = most(both, __shfl_xor_sync(kAllLanes, both, stride));
  }
  if constexpr (kBrain) return Extremes{-float_of(both << 16), float_of(both & 0xffff0000u)};
  return Extremes{-widen_low_float16(both), widen_high_float16(both)};
}

// ---- encode -------------------------------------------------------------------------------------------------------

// kQuick: no rescale, clip not below kSmallestQuickClip, unsigned codes.
template <int kBits, bool kQuick>
static __device__ __forceinline__ void encode_chunk(const float* x, float scale_up, const GroupGrid& grid,
                                                    const CodeLimits& limits, const CodeForm& form, uint32_t* words) {
  uint32_t integers[kChunkElems];
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) {
    float position;
    if constexpr (kQuick) {
      position = x[i] * grid.inverse + grid.zero;
    } else {
      position = lesser(greater(x[i] * scale_up * grid.inverse + grid.zero, grid.code_min), grid.code_max);
    }
    // The bias is even, so that ties go where they would go without it.
    integers[i] = bits_of(position + (kIntegerShift + (kQuick ? 0.0f : form.bias)));
  }
  pack_chunk<kBits, !kQuick>(integers, limits, form, words);
}

template <int kBits, Spread kSpread>
static __device__ __forceinline__ void encode_elements(const Lane<kSpread>& lane, const float (&x)[kLaneElems],
                                                       const GroupGrid& grid, uint32_t (&words)[kBits]) {
  const bool is_signed = lane.is_signed;
  const CodeForm form = code_form<kBits>(is_signed);
  // A group without codes has limits 0, 0, to which even what a NaN leaves is clamped.
  const bool has_codes = grid.code_max != 0.0f;
  const uint32_t zero = is_signed ? (kBits == 4 ? 0x00080008u : 0x00800080u) : 0u;
  const uint32_t least = is_signed ? 0x00010001u : 0u;
  const uint32_t most = kBits == 4 ? 0x000f000fu : 0x00ff00ffu;
  const CodeLimits limits{has_codes ? least : zero, has_codes ? most : zero};
  const bool quick = !is_signed && lane.scale_up == 1.0f && lane.quick_clip;
  if (quick) {
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      encode_chunk<kBits, true>(x + kChunkElems * part, 1.0f, grid, limits, code_form<kBits>(false),
                                words + kChunkCodeWords<kBits> * part);
    }
  } else {
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      encode_chunk<kBits, false>(x + kChunkElems * part, lane.scale_up, grid, limits, form,
                                 words + kChunkCodeWords<kBits> * part);
    }
  }
}

// Codes of absent elements of a partial group are written too, as zeros; nothing is written beyond the group.
template <int kBits, Spread kSpread>
static __device__ __forceinline__ void store_encoded(const Lane<kSpread>& lane, const GroupAt& at,
                                                     const Encoded<kBits>& encoded, const TileView<std::byte>& tile) {
  constexpr int kWords = kChunkCodeWords<kBits>;
  const Codec& codec = lane.site.plan.codec;
  uint32_t* codes =
      reinterpret_cast<uint32_t*>(tile.codes) + int64_t{at.slot} * (codec.group_elems / kChunkElems) * kWords;
  if (kSpread == Spread::kRuns && at.dense) {
    uint4* to = reinterpret_cast<uint4*>(codes + kBits * lane.index);
#pragma unroll
    for (int i = 0; i < kBits / 4; ++i) {
      const uint32_t* quad = encoded.codes + 4 * i;
      to[i] = make_uint4(quad[0], quad[1], quad[2], quad[3]);
    }
  } else {
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      const int32_t chunk = chunk_of(lane, part);
      if (at.elems == 0 || chunk * kChunkElems >= codec.group_elems) continue;
#pragma unroll
      for (int word = 0; word < kWords; ++word) codes[kWords * chunk + word] = encoded.codes[kWords * part + word];
    }
  }
  if (at.elems == 0 || lane.index != 0) return;
  if (lane.is_signed) {
    reinterpret_cast<uint16_t*>(tile.params)[at.slot] = static_cast<uint16_t>(encoded.params);
  } else {
    reinterpret_cast<uint32_t*>(tile.params)[at.slot] = encoded.params;
  }
}

template <int kBits, Spread kSpread>
static __device__ __forceinline__ Encoded<kBits> encode_on(const Lane<kSpread>& lane, const float (&x)[kLaneElems],
                                                           const Grid& grid) {
  Encoded<kBits> encoded;
  encoded.params = grid.params.scale_bits | static_cast<uint32_t>(grid.params.zero_bits) << 16;
  encode_elements<kBits>(lane, x, grid.grid, encoded.codes);
  return encoded;
}

// Encodes x, whose extremes are given; codes of absent elements are 0.
template <int kBits, Spread kSpread>
static __device__ __forceinline__ Encoded<kBits> encode_group(const Lane<kSpread>& lane, const GroupAt& at,
                                                              const float (&x)[kLaneElems], const Extremes& extremes) {
  // Rounding is monotonic: the extremes times 2^k are the extremes of the products.
  const Extremes scaled{extremes.lo * lane.scale_up, extremes.hi * lane.scale_up};
  const Grid grid = make_grid<kBits>(scaled, lane.site.plan.codec, lane.is_signed, lane.sure_steps);
  Encoded<kBits> encoded = encode_on<kBits>(lane, x, grid);
  if (at.dense) return encoded;
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    clear_absent_codes<kBits>(remaining_in(lane, at, part), encoded.codes + kChunkCodeWords<kBits> * part);
  }
  return encoded;
}

// ---- decode -------------------------------------------------------------------------------------------------------

// Loading is kept apart from decoding so that the next group can be on its way.
template <int kBits, Spread kSpread>
static __device__ __forceinline__ Encoded<kBits> load_encoded(const Lane<kSpread>& lane, const GroupAt& at,
                                                              const TileView<const std::byte>& tile) {
  constexpr int kWords = kChunkCodeWords<kBits>;
  const Codec& codec = lane.site.plan.codec;
  Encoded<kBits> encoded = {};
  const uint32_t* codes =
      reinterpret_cast<const uint32_t*>(tile.codes) + int64_t{at.slot} * (codec.group_elems / kChunkElems) * kWords;
  if (kSpread == Spread::kRuns && at.dense) {
    const uint4* from = reinterpret_cast<const uint4*>(codes + kBits * lane.index);
#pragma unroll
    for (int i = 0; i < kBits / 4; ++i) {
      const uint4 quad = from[i];
      encoded.codes[4 * i] = quad.x;
      encoded.codes[4 * i + 1] = quad.y;
      encoded.codes[4 * i + 2] = quad.z;
      encoded.codes[4 * i + 3] = quad.w;
    }
  } else {
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      if (!at.dense && remaining_in(lane, at, part) <= 0) continue;
      if constexpr (kBits == 4) {
        encoded.codes[part] = codes[chunk_of(lane, part)];
      } else {
        const uint2 pair = reinterpret_cast<const uint2*>(codes)[chunk_of(lane, part)];
        encoded.codes[2 * part] = pair.x;
        encoded.codes[2 * part + 1] = pair.y;
      }
    }
  }
  if (!at.dense && at.elems == 0) return encoded;
  if (lane.is_signed) {
    encoded.params = reinterpret_cast<const uint16_t*>(tile.params)[at.slot];
  } else {
    encoded.params = reinterpret_cast<const uint32_t*>(tile.params)[at.slot];
  }
  return encoded;
}

// Calls body(part, values) with what receivers make of the codes of each chunk, in the caller's units: chunk by chunk,
// so that a body that uses a value up needs no registers for all of them.
template <int kBits, Spread kSpread, typename Body>
static __device__ __forceinline__ void for_each_decoded(const Lane<kSpread>& lane, const Encoded<kBits>& encoded,
                                                        Body body) {
  const Codec& codec = lane.site.plan.codec;
  const CodeForm form = code_form<kBits>(lane.is_signed);
  const GroupParams params = unpack_params(encoded.params);
  const Decoder decoder = make_decoder(widen16(params.scale_bits, codec.scale_dtype),
                                       widen16(params.zero_bits, codec.scale_dtype), kCodeBase<kBits> + form.bias);
  const auto decode = [&](auto element) {
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      float values[kChunkElems];
      unpack_chunk<kBits>(encoded.codes + kChunkCodeWords<kBits> * part, form.flip, values);
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) values[i] = element(values[i]);
      body(part, values);
    }
  };
  if (lane.scale_down == 1.0f && __all_sync(kAllLanes, decoder.fused)) {
    decode([&](float based) { return __fmaf_rn(decoder.scale, based, decoder.offset); });
  } else {
    decode([&](float based) { return decoder.scale * ((based - decoder.base) - decoder.zero) * lane.scale_down; });
  }
}

template <int kBits, Spread kSpread>
static __device__ __forceinline__ void decode_group(const Lane<kSpread>& lane, const Encoded<kBits>& encoded,
                                                    float (&decoded)[kLaneElems]) {
  for_each_decoded(lane, encoded, [&](int part, const float(&values)[kChunkElems]) {
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) decoded[kChunkElems * part + i] = values[i];
  });
}

// True if no element of a group with this scale can be NaN after decode_group or exit_elements: it is small enough for
// 2^10 times as many steps, 2^60 of the rescale and 2^10 elements added up.
static __device__ __forceinline__ bool cannot_decode_to_nan(float scale) { return fabsf(scale) < 0x1p40f; }

template <Spread kSpread>
static __device__ __forceinline__ bool may_decode_to_nan(const Lane<kSpread>& lane, uint32_t params) {
  return !cannot_decode_to_nan(widen16(unpack_params(params).scale_bits, lane.site.plan.codec.scale_dtype));
}

}  // namespace echo::cuda
