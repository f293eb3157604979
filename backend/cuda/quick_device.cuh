// Groups as the loops of the peer kernel handle them: every one whole and aligned, its values such that the short ways
// of the other headers give the contract's bits. Each step clears `sure` where that is not known. Nothing is stored
// before the end, so that a warp with a lane that is not sure can leave its groups to the exact way, which starts again
// from memory: what is rare then takes up no room in the loops' instructions, which have to fit the caches.
//
// Pre: 16-bit elements, unsigned codes, no rescale, clip >= kSmallestQuickClip, and an old state if there is a state.
#pragma once

#include "ahead_device.cuh"

namespace echo::cuda {

// ---- decode -------------------------------------------------------------------------------------------------------

struct QuickDecoder {
  float scale;
  float offset;
};

template <int kBits>
static __device__ __forceinline__ QuickDecoder quick_decoder(uint32_t params, const Codec& codec, bool& sure) {
  const bool brain = codec.scale_dtype == ScaleDType::kBFloat16;
  const float scale = brain ? float_of(params << 16) : widen_low_float16(params);
  const float zero = brain ? float_of(params & 0xffff0000u) : widen_high_float16(params);
  const Decoder decoder = make_decoder(scale, zero, kCodeBase<kBits>);
  sure = sure && decoder.fused;
  return QuickDecoder{decoder.scale, decoder.offset};
}

template <int kBits>
static __device__ __forceinline__ void quick_decode(const QuickDecoder& decoder, const Encoded<kBits>& encoded,
                                                    int part, float (&values)[kChunkElems]) {
  unpack_chunk<kBits>(encoded.codes + kChunkCodeWords<kBits> * part, 0u, values);
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) values[i] = __fmaf_rn(decoder.scale, values[i], decoder.offset);
}

// sum += what the codes say.
template <int kBits, Spread kSpread>
static __device__ __forceinline__ void quick_add(const Lane<kSpread>& lane, const Encoded<kBits>& encoded,
                                                 float (&sum)[kLaneElems], bool& sure) {
  const QuickDecoder decoder = quick_decoder<kBits>(encoded.params, lane.site.plan.codec, sure);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float term[kChunkElems];
    quick_decode(decoder, encoded, part, term);
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) sum[kChunkElems * part + i] = sum[kChunkElems * part + i] + term[i];
  }
}

// ---- what was loaded ahead ------------------------------------------------------------------------------------------

// An entry of a warp's ring: this rank's part of the groups, their old averages c and m1 as far as loaded, and codes.
template <typename Layout>
struct Entry {
  std::byte* at;

  __device__ __forceinline__ std::byte* average(int which) const {
    return at + Layout::kAveragesAt + which * Layout::kAverageBytes;
  }
  __device__ __forceinline__ std::byte* scales(int which) const {
    return at + Layout::kScalesAt + which * Layout::kScaleBytes;
  }
  __device__ __forceinline__ std::byte* codes() const { return at + Layout::kCodesAt; }
  __device__ __forceinline__ std::byte* params() const { return at + Layout::kParamsAt; }
};

// Starts loading the elements of task `task`, which begin at `first` in the tensor, and kAverages of their averages.
template <int kAverages, Spread kSpread, typename Layout>
static __device__ __forceinline__ void start_stored_copies(const Lane<kSpread>& lane, const Entry<Layout>& entry,
                                                           int32_t task, int64_t first) {
  start_element_copies<kSpread, 2>(lane, entry.at, static_cast<const std::byte*>(lane.site.tensor) + 2 * first);
  if constexpr (Layout::kState != StateKind::kNone) {
#pragma unroll
    for (int which = 0; which < kAverages; ++which) {
      constexpr int kElemBytes = Layout::kAverageElemBytes;
      start_element_copies<kSpread, kElemBytes>(lane, entry.average(which),
                                                average_base(lane, which) + kElemBytes * first);
      if constexpr (Layout::kState == StateKind::kInt8) start_scale_copies(lane, task, which, entry.scales(which));
    }
  }
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

template <Spread kSpread, typename Layout>
static __device__ __forceinline__ Average<Layout::kState> read_average(const Lane<kSpread>& lane, const GroupAt& at,
                                                                       const Entry<Layout>& entry, int which) {
  Average<Layout::kState> average;
  if constexpr (Layout::kState == StateKind::kInt8) {
    read_elements<1>(lane, entry.average(which), average.stored.words);
    average.stored.scale_bits = read_scale(lane, at, entry.scales(which));
  } else {
    read_elements<2>(lane, entry.average(which), average.words);
  }
  return average;
}

template <StateKind kState, Spread kSpread>
static __device__ __forceinline__ void store_average(const Lane<kSpread>& lane, const GroupAt& at, int which,
                                                     const Average<kState>& average) {
  std::byte* base = average_base(lane, which);
  if constexpr (kState == StateKind::kInt8) {
    store_words(lane, at, base, true, average.stored.words);
    if (lane.index == 0) *scale_at(lane, at, base) = static_cast<uint16_t>(average.stored.scale_bits);
  } else {
    store_words(lane, at, base, true, average.words);
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

template <StateKind kState, int kAverages, Spread kSpread>
static __device__ __forceinline__ void store_averages(const Lane<kSpread>& lane, const GroupAt& at,
                                                      const Averages<kState, kAverages>& averages) {
#pragma unroll
  for (int which = 0; which < kAverages; ++which) store_average(lane, at, which, averages.at[which]);
}

// update_element of the core from the residual u, which is overwritten, and the old averages.
template <int kAverages, Spread kSpread, typename Layout>
static __device__ __forceinline__ Averages<Layout::kState, kAverages> quick_update(const Lane<kSpread>& lane,
                                                                                   const GroupAt& at,
                                                                                   const Entry<Layout>& entry,
                                                                                   float (&u)[kLaneElems], bool& sure) {
  const Feedback& fb = lane.site.plan.feedback;
  float c[kLaneElems];
  const Average<Layout::kState> c_before = read_average(lane, at, entry, 0);
  const Average<Layout::kState> m1_before = read_average(lane, at, entry, kAverages - 1);
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
  Averages<Layout::kState, kAverages> averages;
  averages.at[0] = narrow_average<Layout::kState>(lane, c, sure);
  if constexpr (kAverages == 2) averages.at[1] = narrow_average<Layout::kState>(lane, u, sure);
  return averages;
}

// ---- a group that this rank encodes -------------------------------------------------------------------------------

// This rank's contribution from its elements: rotated, then corrected.
template <DType kDType, Spread kSpread, typename Layout>
static __device__ __forceinline__ void quick_contribution(const Lane<kSpread>& lane, const GroupAt& at,
                                                          const Entry<Layout>& entry,
                                                          ChunkWords<2> (&words)[kLaneChunks], float (&x)[kLaneElems],
                                                          bool& sure) {
  if (at.rotated) flip_signs<kDType>(lane, words);
  widen_elements<kDType>(words, x);
  rotate_entry(lane, at, x);
  if constexpr (Layout::kState != StateKind::kNone) {
    const Average<Layout::kState> correction = read_average(lane, at, entry, 0);
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      float c[kChunkElems];
      widen_average(correction, part, c, sure);
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) x[kChunkElems * part + i] = x[kChunkElems * part + i] + c[i];
    }
  }
}

// residual "local": x becomes what the receivers do not see of it. `owned`: of the sum they see what is delivered.
template <DType kDType, int kBits, Spread kSpread>
static __device__ __forceinline__ void quick_local_residual(const Lane<kSpread>& lane, bool owned, bool rotated,
                                                            const Encoded<kBits>& encoded, float (&x)[kLaneElems],
                                                            bool& sure) {
  const QuickDecoder decoder = quick_decoder<kBits>(encoded.params, lane.site.plan.codec, sure);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float seen[kChunkElems];
    quick_decode(decoder, encoded, part, seen);
    if (owned && !rotated) widen_chunk<kDType>(narrow_numbers<kDType>(seen), seen);
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) x[kChunkElems * part + i] = x[kChunkElems * part + i] - seen[i];
  }
}

template <int kBits, Spread kSpread>
static __device__ __forceinline__ Encoded<kBits> quick_encode(const Lane<kSpread>& lane, const float (&x)[kLaneElems],
                                                              const Extremes& extremes, bool& sure) {
  return encode_on<kBits>(lane, x, quick_grid<kBits>(extremes, lane.site.plan.codec, false, lane.sure_steps, sure));
}

// ---- a group that this rank stores --------------------------------------------------------------------------------

// What is delivered, in words of the tensor; values of a group whose scale is moderate hold no NaN.
template <DType kDType, Spread kSpread>
static __device__ __forceinline__ void quick_result(const Lane<kSpread>& lane, const GroupAt& at,
                                                    float (&decoded)[kLaneElems], ChunkWords<2> (&words)[kLaneChunks]) {
  rotate_exit(lane, at, decoded);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) words[part] = narrow_numbers<kDType>(decoded + kChunkElems * part);
  if (at.rotated) flip_signs<kDType>(lane, words);
}

// residual "group": u becomes this rank's contribution, which the entry has, without its share of the result.
template <DType kDType, Spread kSpread, typename Layout>
static __device__ __forceinline__ void quick_group_residual(const Lane<kSpread>& lane, const GroupAt& at,
                                                            const Entry<Layout>& entry,
                                                            const float (&decoded)[kLaneElems], float (&u)[kLaneElems],
                                                            bool& sure) {
  const float inverse_world = 1.0f / static_cast<float>(lane.site.plan.world_size);
  ChunkWords<2> words[kLaneChunks];
  read_elements<2>(lane, entry.at, words);
  quick_contribution<kDType>(lane, at, entry, words, u, sure);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float seen[kChunkElems];
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) seen[i] = decoded[kChunkElems * part + i];
    if (!at.rotated) widen_chunk<kDType>(narrow_numbers<kDType>(seen), seen);
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) {
      u[kChunkElems * part + i] = u[kChunkElems * part + i] - seen[i] * inverse_world;
    }
  }
}

// True if the warp's groups were stored. kUpdates: with the averages of the residual "group".
template <DType kDType, int kBits, bool kUpdates, int kAverages, Spread kSpread, typename Layout>
static __device__ __forceinline__ bool quick_tail(const Lane<kSpread>& lane, const GroupAt& at,
                                                  const Entry<Layout>& entry) {
  const auto encoded = read_encoded<kBits>(lane, entry.codes(), entry.params());
  bool sure = true;
  const QuickDecoder decoder = quick_decoder<kBits>(encoded.params, lane.site.plan.codec, sure);
  sure = sure && cannot_decode_to_nan(decoder.scale);
  float decoded[kLaneElems];
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float values[kChunkElems];
    quick_decode(decoder, encoded, part, values);
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) decoded[kChunkElems * part + i] = values[i];
  }
  ChunkWords<2> words[kLaneChunks];
  std::byte* tensor = static_cast<std::byte*>(lane.site.tensor);
  if constexpr (kUpdates) {
    float u[kLaneElems];
    quick_group_residual<kDType>(lane, at, entry, decoded, u, sure);
    const auto averages = quick_update<kAverages>(lane, at, entry, u, sure);
    quick_result<kDType>(lane, at, decoded, words);
    if (!__all_sync(kAllLanes, sure)) return false;
    store_averages(lane, at, averages);
  } else {
    quick_result<kDType>(lane, at, decoded, words);
    if (!__all_sync(kAllLanes, sure)) return false;
  }
  store_words(lane, at, tensor, true, words);
  return true;
}

}  // namespace echo::cuda
