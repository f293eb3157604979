// Groups as the loops of the peer kernel handle them: every one whole and aligned, its values such that the short ways
// of the other headers give the contract's bits. Each step clears `sure` where that is not known. Nothing is stored
// before the end, so that a warp with a lane that is not sure can leave its groups to the exact way, which starts again
// from memory: what is rare then takes up no room in the loops' instructions, which have to fit the caches.
//
// Pre: 16-bit elements, unsigned codes, no rescale, clip >= kSmallestQuickClip, and an old state if there is a state.
#pragma once

#include "quick_state_device.cuh"

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

// ---- a group that this rank encodes -------------------------------------------------------------------------------

// This rank's contribution from its elements: rotated, then corrected.
template <DType kDType, typename Layout>
static __device__ __forceinline__ void quick_contribution(const Lane<Spread::kRuns>& lane, const GroupAt& at,
                                                          const Entry<Layout>& entry, int64_t first,
                                                          ChunkWords<2> (&words)[kLaneChunks], float (&x)[kLaneElems],
                                                          bool& sure) {
  if (at.rotated) flip_signs<kDType>(lane, words);
  widen_elements<kDType>(words, x);
  rotate_entry(lane, at, x);
  if constexpr (Layout::kState != StateKind::kNone) {
    const Average<Layout::kState> correction = read_average(lane, entry, first, 0);
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

// What is delivered, in words of the tensor; `decoder` is sure, or the group rotated.
template <DType kDType, int kBits>
static __device__ __forceinline__ void quick_result(const Lane<Spread::kRuns>& lane, const GroupAt& at,
                                                    const QuickDecoder& decoder, const Encoded<kBits>& encoded,
                                                    ChunkWords<2> (&words)[kLaneChunks], bool& sure) {
  if (at.rotated) {
    quick_exit<kDType>(lane, encoded, lane.site.plan.codec.rotation_log2, words, sure);
    return;
  }
  // Values of a group whose scale is moderate hold no NaN.
  sure = sure && cannot_decode_to_nan(decoder.scale);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float values[kChunkElems];
    quick_decode(decoder, encoded, part, values);
    words[part] = narrow_numbers<kDType>(values);
  }
}

// residual "group": u becomes this rank's contribution, which the entry has, without its share of the result.
template <DType kDType, int kBits, typename Layout>
static __device__ __forceinline__ void quick_group_residual(const Lane<Spread::kRuns>& lane, const GroupAt& at,
                                                            const Entry<Layout>& entry, int64_t first,
                                                            const QuickDecoder& decoder, const Encoded<kBits>& encoded,
                                                            float (&u)[kLaneElems], bool& sure) {
  const float inverse_world = 1.0f / static_cast<float>(lane.site.plan.world_size);
  ChunkWords<2> words[kLaneChunks];
  read_elements<2>(entry.at, lane.in_warp, words);
  quick_contribution<kDType>(lane, at, entry, first, words, u, sure);
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    float seen[kChunkElems];
    quick_decode(decoder, encoded, part, seen);
    if (!at.rotated) widen_chunk<kDType>(narrow_numbers<kDType>(seen), seen);
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) {
      u[kChunkElems * part + i] = u[kChunkElems * part + i] - seen[i] * inverse_world;
    }
  }
}

// True if the warp's groups, which begin at element `first`, were stored; by way of `array`, four units per lane, which
// may be the entry's elements. kUpdates: with the averages of the residual "group".
template <DType kDType, int kBits, bool kUpdates, int kAverages, typename Layout>
static __device__ __forceinline__ bool quick_tail(const Lane<Spread::kRuns>& lane, const GroupAt& at,
                                                  const Entry<Layout>& entry, SharedAddress array, int64_t first) {
  const auto encoded = read_encoded<kBits>(lane, entry);
  bool sure = true;
  bool decodes = true;
  const QuickDecoder decoder = quick_decoder<kBits>(encoded.params, lane.site.plan.codec, decodes);
  // A rotated group is decoded for its residual alone.
  if (kUpdates || !at.rotated) sure = decodes;
  ChunkWords<2> words[kLaneChunks];
  if constexpr (kUpdates) {
    float u[kLaneElems];
    quick_group_residual<kDType>(lane, at, entry, first, decoder, encoded, u, sure);
    const auto averages = quick_update<kAverages>(lane, entry, first, u, sure);
    quick_result<kDType>(lane, at, decoder, encoded, words, sure);
    if (!__all_sync(kAllLanes, sure)) return false;
    __syncwarp();
    store_averages(lane, entry, first, averages);
  } else {
    quick_result<kDType>(lane, at, decoder, encoded, words, sure);
    if (!__all_sync(kAllLanes, sure)) return false;
  }
  std::byte* tensor = static_cast<std::byte*>(lane.site.tensor);
  store_elements_by<2>(array, lane.in_warp, tensor + 2 * first + kUnitBytes * lane.in_warp, words);
  return true;
}

}  // namespace echo::cuda
