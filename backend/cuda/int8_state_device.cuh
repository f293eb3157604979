// int8 state of one group: codes of a byte and a bf16 scale for each average.
#pragma once

#include "../core/feedback.h"
#include "code_device.cuh"
#include "group_device.cuh"

namespace echo::cuda {

template <Spread kSpread>
static __device__ __forceinline__ std::byte* average_base(const Lane<kSpread>& lane, int which) {
  return static_cast<std::byte*>(lane.site.state) + which * lane.state_layout.average_bytes;
}

// Where this lane's group has its scale, in int8 state.
template <Spread kSpread>
static __device__ __forceinline__ uint16_t* scale_at(const Lane<kSpread>& lane, const GroupAt& at, std::byte* base) {
  return reinterpret_cast<uint16_t*>(base + lane.state_layout.scales_offset) + lane.first_group + at.slot;
}

// One average as stored.
struct Int8Average {
  ChunkWords<1> words[kLaneChunks];
  uint32_t scale_bits;
};

template <Spread kSpread>
static __device__ __forceinline__ void load_int8_average(const Lane<kSpread>& lane, const GroupAt& at, int which,
                                                         Int8Average& stored) {
  std::byte* base = average_base(lane, which);
  load_elements<1>(lane, at, base, true, stored.words);
  stored.scale_bits = 0;
  if (at.dense || at.elems > 0) stored.scale_bits = *scale_at(lane, at, base);
}

// Values are scale * code. 8 bits of the scale times 9 of the base: that product is exact, and so is the fused
// difference, unless it overflows; where it might, values come out times 1 / factor.
struct Int8Decoder {
  float scale;
  float offset;
  float factor;
};

static __device__ __forceinline__ Int8Decoder make_int8_decoder(uint32_t scale_bits) {
  constexpr float kBase = kCodeBase<8> + 128.0f;
  const float scale = from_bfloat16(static_cast<uint16_t>(scale_bits));
  const bool huge = scale >= 0x1p112f;
  const float safe = huge ? scale * 0x1p-32f : scale;
  return Int8Decoder{safe, -safe * kBase, huge ? 0x1p32f : 1.0f};
}

static __device__ __forceinline__ void widen_int8_chunk(const Int8Decoder& decoder, const ChunkWords<1>& words,
                                                        float* out) {
  unpack_chunk<8>(words.at, 0x80808080u, out);
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) out[i] = __fmaf_rn(decoder.scale, out[i], decoder.offset);
}

// x += the average; absent slots of it are 0.
static __device__ __forceinline__ void add_int8_average(const Int8Average& stored, float (&x)[kLaneElems]) {
  const Int8Decoder decoder = make_int8_decoder(stored.scale_bits);
  const auto add = [&](auto exact) {
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      float average[kChunkElems];
      widen_int8_chunk(decoder, stored.words[part], average);
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) x[kChunkElems * part + i] = x[kChunkElems * part + i] + exact(average[i]);
    }
  };
  if (decoder.factor == 1.0f) {
    add([](float value) { return value; });
  } else {
    add([&](float value) { return value * decoder.factor; });
  }
}

// Between these magnitudes, and for 0, the short way to a scale is exact.
constexpr float kLeastQuickInt8 = 0x1p-100f;
constexpr float kMostQuickInt8 = 0x1p120f;

// The bits of the scale, widened.
static __device__ __forceinline__ uint32_t quick_int8_scale(float largest) {
  return (bits_of(divide_by_short(largest, 127.0f, 1.0f / 127.0f)) + 0xffffu) & 0xffff0000u;
}

// The scale and its inverse, as int8_state_scale and int8_state_inverse have them.
static __device__ __forceinline__ uint16_t make_int8_scale(float largest, float& inverse) {
  if (largest >= kLeastQuickInt8 && largest <= kMostQuickInt8) {
    const uint32_t bits = quick_int8_scale(largest);
    inverse = reciprocal_of_short(float_of(bits));
    return static_cast<uint16_t>(bits >> 16);
  }
  const uint16_t scale_bits = int8_state_scale(bits_of(largest));
  inverse = int8_state_inverse(scale_bits);
  return scale_bits;
}

// The codes of this lane's values. No value needs clamping: the scale is at least fl(largest / 127), so that
// |value * inverse| stays below 127 * (1 + 2^-21) and rounds to 127 at most.
static __device__ __forceinline__ void encode_int8_elements(const float (&values)[kLaneElems], float inverse,
                                                            ChunkWords<1> (&words)[kLaneChunks]) {
#pragma unroll
  for (int word = 0; word < kLaneElems / 4; ++word) {
    uint32_t integers[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) integers[i] = bits_of(values[4 * word + i] * inverse + kIntegerShift);
    words[word / 2].at[word % 2] = __byte_perm(__byte_perm(integers[0], integers[1], 0x0040),
                                               __byte_perm(integers[2], integers[3], 0x0040), 0x5410);
  }
}

// The largest magnitude of a group, from that of this lane's values.
template <Spread kSpread>
static __device__ __forceinline__ float largest_over_lanes(const Lane<kSpread>& lane, float own) {
#pragma unroll 1
  for (int stride = 1; stride < 1 << lane.lanes_log2; stride *= 2) {
    own = max_or_nan(own, __shfl_xor_sync(kAllLanes, own, stride));
  }
  return own;
}

// `own` is the largest magnitude of this lane's values, which are finite.
template <Spread kSpread>
static __device__ __forceinline__ void store_int8_average(const Lane<kSpread>& lane, const GroupAt& at, std::byte* base,
                                                          float own, const float (&values)[kLaneElems]) {
  float inverse;
  const uint16_t scale_bits = make_int8_scale(largest_over_lanes(lane, own), inverse);
  if (at.elems > 0 && lane.index == 0) *scale_at(lane, at, base) = scale_bits;
  ChunkWords<1> words[kLaneChunks];
  encode_int8_elements(values, inverse, words);
  store_words(lane, at, base, true, words);
}

// The same where the scale's short way is exact; else, values that are not finite included, `sure` is cleared.
template <Spread kSpread>
static __device__ __forceinline__ Int8Average quick_int8_average(const Lane<kSpread>& lane, float own,
                                                                 const float (&values)[kLaneElems], bool& sure) {
  const float largest = largest_over_lanes(lane, own);
  const bool empty = largest == 0.0f;
  sure = sure && (empty || (largest >= kLeastQuickInt8 && largest <= kMostQuickInt8));
  const uint32_t bits = quick_int8_scale(largest);
  Int8Average stored;
  stored.scale_bits = bits >> 16;
  encode_int8_elements(values, empty ? 0.0f : reciprocal_of_short(float_of(bits)), stored.words);
  return stored;
}

}  // namespace echo::cuda
