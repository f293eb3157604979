// Groups as the loops of the peer kernel handle them: every one whole and aligned, its values such that the short ways
// of the other headers give the contract's bits. Each step clears `sure` where that is not known. Nothing is stored
// before the end, so that a warp with a lane that is not sure can leave its groups to the exact way, which starts again
// from memory: what is rare then takes up no room in the loops' instructions, which have to fit the caches.
//
// Pre: 16-bit elements, unsigned codes, no rescale, clip >= kSmallestQuickClip, and an old state if there is a state.
#pragma once

#include "stage_device.cuh"

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

// ---- state --------------------------------------------------------------------------------------------------------

// The compensator's averages of a group as stored: c, and m1 where there are two.
template <StateKind kState, int kAverages>
struct Averages;

template <int kAverages>
struct Averages<StateKind::kInt8, kAverages> {
  Int8Average at[kAverages];
};

template <int kAverages>
struct Averages<StateKind::kWide, kAverages> {
  ChunkWords<2> at[kAverages][kLaneChunks];
};

template <>
struct Averages<StateKind::kNone, 1> {};

template <StateKind kState, int kAverages, Spread kSpread>
static __device__ __forceinline__ Averages<kState, kAverages> load_averages(const Lane<kSpread>& lane,
                                                                            const GroupAt& at) {
  Averages<kState, kAverages> averages;
  if constexpr (kState != StateKind::kNone) {
#pragma unroll
    for (int which = 0; which < kAverages; ++which) {
      if constexpr (kState == StateKind::kInt8) {
        load_int8_average(lane, at, which, averages.at[which]);
      } else {
        load_elements<2>(lane, at, average_base(lane, which), true, averages.at[which]);
      }
    }
  }
  return averages;
}

template <StateKind kState, int kAverages, Spread kSpread>
static __device__ __forceinline__ void store_averages(const Lane<kSpread>& lane, const GroupAt& at,
                                                      const Averages<kState, kAverages>& averages) {
#pragma unroll
  for (int which = 0; which < kAverages; ++which) {
    std::byte* base = average_base(lane, which);
    if constexpr (kState == StateKind::kInt8) {
      store_words(lane, at, base, true, averages.at[which].words);
      if (lane.index == 0) *scale_at(lane, at, base) = static_cast<uint16_t>(averages.at[which].scale_bits);
    } else {
      store_words(lane, at, base, true, averages.at[which]);
    }
  }
}

// A chunk of one stored average.
template <StateKind kState, int kAverages>
static __device__ __forceinline__ void widen_average(const Averages<kState, kAverages>& averages, int which, int part,
                                                     float (&values)[kChunkElems], bool& sure) {
  if constexpr (kState == StateKind::kInt8) {
    const Int8Decoder decoder = make_int8_decoder(averages.at[which].scale_bits);
    sure = sure && decoder.factor == 1.0f;
    widen_int8_chunk(decoder, averages.at[which].words[part], values);
  } else {
    widen_chunk<DType::kBFloat16>(averages.at[which][part], values);
  }
}

// `values` become average `which` as stored. Not finite values, NaN included, leave `sure` false.
template <StateKind kState, int kAverages, Spread kSpread>
static __device__ __forceinline__ void narrow_average(const Lane<kSpread>& lane, const float (&values)[kLaneElems],
                                                      int which, Averages<kState, kAverages>& averages, bool& sure) {
  const float largest = largest_magnitude(values);
  if constexpr (kState == StateKind::kInt8) {
    averages.at[which] = quick_int8_average(lane, largest, values, sure);
  } else {
    sure = sure && largest < state_limit(StateDType::kBFloat16);
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      averages.at[which][part] = narrow_numbers<DType::kBFloat16>(values + kChunkElems * part);
    }
  }
}

// update_element of the core from the residual u, which is overwritten, and the old averages, which become the new.
template <StateKind kState, int kAverages, Spread kSpread>
static __device__ __forceinline__ void quick_update(const Lane<kSpread>& lane, float (&u)[kLaneElems],
                                                    Averages<kState, kAverages>& averages, bool& sure) {
  const Feedback& fb = lane.site.plan.feedback;
  float c[kLaneElems];
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float old_c[kChunkElems];
    widen_average(averages, 0, part, old_c, sure);
    float old_m1[kChunkElems];
    if constexpr (kAverages == 2) widen_average(averages, 1, part, old_m1, sure);
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
  narrow_average(lane, c, 0, averages, sure);
  if constexpr (kAverages == 2) narrow_average(lane, u, 1, averages, sure);
}

// ---- a group that this rank encodes -------------------------------------------------------------------------------

// What is loaded of it ahead of its turn: this rank's part, and of a group of its own segment the first other copy. A
// state that is not int8 comes at its turn: it would take too many registers.
template <DType kDType, int kBits, StateKind kState, int kAverages>
struct QuickStored {
  ChunkWords<2> words[kLaneChunks];
  Averages<kState, kAverages> averages;
  Encoded<kBits> copy;
};

// This rank's contribution: rotated, then corrected.
template <DType kDType, int kBits, StateKind kState, int kAverages, Spread kSpread>
static __device__ __forceinline__ void quick_contribution(const Lane<kSpread>& lane, const GroupAt& at,
                                                          QuickStored<kDType, kBits, kState, kAverages>& stored,
                                                          float (&x)[kLaneElems], bool& sure) {
  if (at.rotated) flip_signs<kDType>(lane, stored.words);
  widen_elements<kDType>(stored.words, x);
  rotate_entry(lane, at, x);
  if constexpr (kState != StateKind::kNone) {
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      float c[kChunkElems];
      widen_average(stored.averages, 0, part, c, sure);
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) x[kChunkElems * part + i] = x[kChunkElems * part + i] + c[i];
    }
  }
}

// residual "local": what the receivers do not see of x. `owned`: of the sum they see what is delivered.
template <DType kDType, int kBits, StateKind kState, int kAverages, Spread kSpread>
static __device__ __forceinline__ void quick_local_update(const Lane<kSpread>& lane, bool owned, bool rotated,
                                                          const Encoded<kBits>& encoded, float (&x)[kLaneElems],
                                                          Averages<kState, kAverages>& averages, bool& sure) {
  const QuickDecoder decoder = quick_decoder<kBits>(encoded.params, lane.site.plan.codec, sure);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float seen[kChunkElems];
    quick_decode(decoder, encoded, part, seen);
    if (owned && !rotated) widen_chunk<kDType>(narrow_numbers<kDType>(seen), seen);
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) x[kChunkElems * part + i] = x[kChunkElems * part + i] - seen[i];
  }
  quick_update(lane, x, averages, sure);
}

template <int kBits, Spread kSpread>
static __device__ __forceinline__ Encoded<kBits> quick_encode(const Lane<kSpread>& lane, const float (&x)[kLaneElems],
                                                              const Extremes& extremes, bool& sure) {
  return encode_on<kBits>(lane, x, quick_grid<kBits>(extremes, lane.site.plan.codec, false, lane.sure_steps, sure));
}

// ---- a group that this rank stores --------------------------------------------------------------------------------

template <DType kDType, int kBits, StateKind kState, int kAverages>
struct QuickGathered {
  Encoded<kBits> encoded;
  // residual "group" alone: this rank's part, which the result replaces
  ChunkWords<2> words[kLaneChunks];
  Averages<kState, kAverages> averages;
};

// What is delivered, in words of the tensor; values of a group whose scale is moderate hold no NaN.
template <DType kDType, Spread kSpread>
static __device__ __forceinline__ void quick_result(const Lane<kSpread>& lane, const GroupAt& at,
                                                    float (&decoded)[kLaneElems], ChunkWords<2> (&words)[kLaneChunks]) {
  rotate_exit(lane, at, decoded);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) words[part] = narrow_numbers<kDType>(decoded + kChunkElems * part);
  if (at.rotated) flip_signs<kDType>(lane, words);
}

// True if the warp's groups were stored.
template <Residual kResidual, DType kDType, int kBits, StateKind kState, int kAverages, Spread kSpread>
static __device__ __forceinline__ bool quick_tail(const Lane<kSpread>& lane, const GroupAt& at,
                                                  QuickGathered<kDType, kBits, kState, kAverages>& gathered) {
  bool sure = !may_decode_to_nan(lane, gathered.encoded.params);
  const QuickDecoder decoder = quick_decoder<kBits>(gathered.encoded.params, lane.site.plan.codec, sure);
  float decoded[kLaneElems];
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float values[kChunkElems];
    quick_decode(decoder, gathered.encoded, part, values);
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) decoded[kChunkElems * part + i] = values[i];
  }
  if constexpr (kState != StateKind::kNone && kResidual == Residual::kGroup) {
    if constexpr (kState == StateKind::kWide) gathered.averages = load_averages<kState, kAverages>(lane, at);
    const float inverse_world = 1.0f / static_cast<float>(lane.site.plan.world_size);
    QuickStored<kDType, kBits, kState, kAverages> stored;
    stored.averages = gathered.averages;
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) stored.words[part] = gathered.words[part];
    float u[kLaneElems];
    quick_contribution(lane, at, stored, u, sure);
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
    quick_update(lane, u, gathered.averages, sure);
  }
  ChunkWords<2> words[kLaneChunks];
  quick_result<kDType>(lane, at, decoded, words);
  if (!__all_sync(kAllLanes, sure)) return false;
  if constexpr (kState != StateKind::kNone && kResidual == Residual::kGroup) {
    store_averages(lane, at, gathered.averages);
  }
  store_words(lane, at, static_cast<std::byte*>(lane.site.tensor), true, words);
  return true;
}

}  // namespace echo::cuda
