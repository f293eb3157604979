// The compensator's state of one group, and the contribution that it corrects; offsets come from core/tile.h.
#pragma once

#include "codec_device.cuh"
#include "int8_state_device.cuh"
#include "rotation_device.cuh"

namespace echo::cuda {

// What a kernel is made for: a plan without the compensator, or with int8 state, or with any other.
enum class StateKind { kNone, kInt8, kWide };

// ---- other formats ------------------------------------------------------------------------------------------------

template <DType kDType, Spread kSpread>
static __device__ __forceinline__ void load_wide_average(const Lane<kSpread>& lane, const GroupAt& at,
                                                         const std::byte* base, float (&out)[kLaneElems]) {
  ChunkWords<kBytesOf<kDType>> words[kLaneChunks];
  load_elements<kBytesOf<kDType>>(lane, at, base, true, words);
  widen_elements<kDType>(words, out);
}

// One stored average (0: c, 1: m1) that is not int8; absent slots are 0.
template <Spread kSpread>
static __device__ __forceinline__ void load_average(const Lane<kSpread>& lane, const GroupAt& at, int which,
                                                    float (&out)[kLaneElems]) {
  std::byte* base = average_base(lane, which);
  switch (lane.state) {
    case StateDType::kFloat32:
      return load_wide_average<DType::kFloat32>(lane, at, base, out);
    case StateDType::kFloat16:
      return load_wide_average<DType::kFloat16>(lane, at, base, out);
    default:
      return load_wide_average<DType::kBFloat16>(lane, at, base, out);
  }
}

template <DType kDType, Spread kSpread>
static __device__ __forceinline__ void store_wide_average(const Lane<kSpread>& lane, const GroupAt& at, std::byte* base,
                                                          const float (&values)[kLaneElems]) {
  ChunkWords<kBytesOf<kDType>> words[kLaneChunks];
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) words[part] = narrow_numbers<kDType>(values + kChunkElems * part);
  store_words(lane, at, base, true, words);
}

// The smallest magnitude that a format does not store but as 0: half a step above its largest value, Inf in fp32.
static __device__ __forceinline__ float state_limit(StateDType dtype) {
  return float_of(dtype == StateDType::kBFloat16  ? 0x7f7f8000u
                  : dtype == StateDType::kFloat16 ? 0x477ff000u
                                                  : kInfBits32);
}

static __device__ __forceinline__ float largest_magnitude(const float (&values)[kLaneElems]) {
  float largest = fabsf(values[0]);
#pragma unroll
  for (int e = 1; e < kLaneElems; ++e) largest = max_or_nan(largest, fabsf(values[e]));
  return largest;
}

// Values that the format cannot hold, NaN included, become 0. Pre: those of absent slots are 0.
template <StateKind kState, Spread kSpread>
static __device__ __forceinline__ void store_average(const Lane<kSpread>& lane, const GroupAt& at, int which,
                                                     float (&values)[kLaneElems]) {
  std::byte* base = average_base(lane, which);
  const StateDType dtype = kState == StateKind::kInt8 ? StateDType::kInt8 : lane.state;
  const float limit = state_limit(dtype);
  float largest = largest_magnitude(values);
  if (!(largest < limit)) {
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) values[e] = fabsf(values[e]) < limit ? values[e] : 0.0f;
    largest = largest_magnitude(values);
  }
  if constexpr (kState == StateKind::kInt8) return store_int8_average(lane, at, base, largest, values);
  switch (dtype) {
    case StateDType::kFloat32:
      return store_wide_average<DType::kFloat32>(lane, at, base, values);
    case StateDType::kFloat16:
      return store_wide_average<DType::kFloat16>(lane, at, base, values);
    default:
      return store_wide_average<DType::kBFloat16>(lane, at, base, values);
  }
}

// ---- contribution -------------------------------------------------------------------------------------------------

// What a group's update needs of the old state, if there is one: c, and of int8 state m1, asked for early because the
// update would have nothing to do while it waits. int8 stays as stored, which takes a quarter of the registers.
template <StateKind kState>
struct Correction {
  float c[kLaneElems];
};

template <>
struct Correction<StateKind::kInt8> {
  Int8Average c;
  Int8Average m1;
};

// A group of the tensor and of the state as stored: loading is kept apart from what comes next, so that one group can
// be on its way while another is worked on. State that is not int8 comes later: it would take too many registers.
template <DType kDType, StateKind kState>
struct Stored {
  ChunkWords<kBytesOf<kDType>> words[kLaneChunks];
  Correction<kState> correction;
};

template <DType kDType>
struct Stored<kDType, StateKind::kNone> {
  ChunkWords<kBytesOf<kDType>> words[kLaneChunks];
};

template <DType kDType, StateKind kState, Spread kSpread>
static __device__ __forceinline__ Stored<kDType, kState> load_stored(const Lane<kSpread>& lane, const GroupAt& at) {
  Stored<kDType, kState> stored;
  load_elements<kBytesOf<kDType>>(lane, at, static_cast<const std::byte*>(lane.site.tensor), lane.tensor_aligned,
                                  stored.words);
  if constexpr (kState == StateKind::kInt8) {
    if (lane.corrected) {
      load_int8_average(lane, at, 0, stored.correction.c);
      if (lane.site.plan.feedback.k2 != 0.0f) load_int8_average(lane, at, 1, stored.correction.m1);
    }
  }
  return stored;
}

// The contribution as sent: rotated, then compensated. kMeasured: the extremes too; overwrites absent slots of x then.
template <bool kMeasured, DType kDType, StateKind kState, Spread kSpread>
static __device__ __forceinline__ Extremes contribution(const Lane<kSpread>& lane, const GroupAt& at,
                                                        Stored<kDType, kState>& stored, float (&x)[kLaneElems]) {
  if constexpr (kMeasured && kState == StateKind::kNone && kDType != DType::kFloat32) {
    if (!at.rotated && at.dense) {
      widen_elements<kDType>(stored.words, x);
      return word_extremes<kDType>(lane, stored.words);
    }
  }
  if constexpr (kState == StateKind::kWide) {
    if (lane.corrected) load_average(lane, at, 0, stored.correction.c);
  }
  if (at.rotated) flip_signs<kDType>(lane, stored.words);
  widen_elements<kDType>(stored.words, x);
  rotate_entry(lane, at, x);
  if constexpr (kState != StateKind::kNone) {
    if (lane.corrected) {
      if constexpr (kState == StateKind::kInt8) {
        add_int8_average(stored.correction.c, x);
      } else {
#pragma unroll
        for (int e = 0; e < kLaneElems; ++e) x[e] = x[e] + stored.correction.c[e];
      }
    }
  }
  if constexpr (kMeasured) return group_extremes(lane, at, x);
  return Extremes{};
}

// ---- update -------------------------------------------------------------------------------------------------------

// residual_reference of the core, for a chunk; a residual that is not a number counts as 0 whatever its NaN.
template <DType kDType, Spread kSpread>
static __device__ __forceinline__ void to_residual_reference(const Lane<kSpread>& lane, float (&decoded)[kChunkElems]) {
  if (lane.site.plan.codec.rotation_log2 > 0) return;
  widen_chunk<kDType>(narrow_numbers<kDType>(decoded), decoded);
}

// A chunk of an old average, times 1 / factor: a power of two, which coefficients take over without rounding.
struct OldChunk {
  float values[kChunkElems];
  float factor;
};

static __device__ __forceinline__ OldChunk old_int8(const Int8Average& stored, int part) {
  const Int8Decoder decoder = make_int8_decoder(stored.scale_bits);
  OldChunk old;
  old.factor = decoder.factor;
  widen_int8_chunk(decoder, stored.words[part], old.values);
  return old;
}

static __device__ __forceinline__ OldChunk old_wide(const float (&average)[kLaneElems], int part) {
  OldChunk old;
  old.factor = 1.0f;
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) old.values[i] = average[kChunkElems * part + i];
  return old;
}

// update_element of the core for finite u, where there is an old state; what is not finite afterwards is left to
// store_average.
static __device__ __forceinline__ void next_two_averages(const Feedback& fb, const OldChunk& old_c,
                                                         const OldChunk& old_m1, const float* u, float* c, float* m1) {
  const float beta2 = fb.beta2 * old_c.factor;
  const float k2 = fb.k2 * old_m1.factor;
  const float beta1 = fb.beta1 * old_m1.factor;
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) {
    c[i] = (beta2 * old_c.values[i] + k2 * old_m1.values[i]) + fb.k3 * u[i];
    m1[i] = beta1 * old_m1.values[i] + fb.k1 * u[i];
  }
}

static __device__ __forceinline__ void next_one_average(const Feedback& fb, const OldChunk& old_c, const float* u,
                                                        float* c) {
  const float beta2 = fb.beta2 * old_c.factor;
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) c[i] = beta2 * old_c.values[i] + fb.k3 * u[i];
}

// Turns u into the new m1.
template <StateKind kState, Spread kSpread>
static __device__ __forceinline__ void update_two_averages(const Lane<kSpread>& lane, const GroupAt& at,
                                                           const Correction<kState>& correction, float (&u)[kLaneElems],
                                                           float (&c)[kLaneElems]) {
  const Feedback& fb = lane.site.plan.feedback;
  if (!lane.corrected) {
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) {
      c[e] = fb.k3 * u[e];
      u[e] = fb.k1 * u[e];
    }
  } else if constexpr (kState == StateKind::kInt8) {
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      const int first = kChunkElems * part;
      next_two_averages(fb, old_int8(correction.c, part), old_int8(correction.m1, part), u + first, c + first,
                        u + first);
    }
  } else {
    float m1[kLaneElems];
    load_average(lane, at, 1, m1);
#pragma unroll
    for (int part = 0; part < kLaneChunks; ++part) {
      const int first = kChunkElems * part;
      next_two_averages(fb, old_wide(correction.c, part), old_wide(m1, part), u + first, c + first, u + first);
    }
  }
}

template <StateKind kState, Spread kSpread>
static __device__ __forceinline__ void update_one_average(const Lane<kSpread>& lane,
                                                          const Correction<kState>& correction,
                                                          const float (&u)[kLaneElems], float (&c)[kLaneElems]) {
  const Feedback& fb = lane.site.plan.feedback;
  if (!lane.corrected || fb.beta2 == 0.0f) {
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) c[e] = fb.k3 * u[e];
    return;
  }
#pragma unroll
  for (int part = 0; part < kLaneChunks; ++part) {
    const int first = kChunkElems * part;
    if constexpr (kState == StateKind::kInt8) {
      next_one_average(fb, old_int8(correction.c, part), u + first, c + first);
    } else {
      next_one_average(fb, old_wide(correction.c, part), u + first, c + first);
    }
  }
}

// `u` holds the residual of each element as computed and is overwritten, `correction` what the contribution was
// corrected by.
template <StateKind kState, Spread kSpread>
static __device__ __forceinline__ void update_state(const Lane<kSpread>& lane, const GroupAt& at,
                                                    float (&u)[kLaneElems], const Correction<kState>& correction) {
  fill_absent(lane, at, 0.0f, u);
  if (may_hold_nan(u)) {
#pragma unroll
    for (int e = 0; e < kLaneElems; ++e) u[e] = finite_or_zero(u[e]);
  }
  float c[kLaneElems];
  if (lane.site.plan.feedback.k2 != 0.0f) {
    update_two_averages(lane, at, correction, u, c);
    store_average<kState>(lane, at, 1, u);
  } else {
    update_one_average(lane, correction, u, c);
  }
  store_average<kState>(lane, at, 0, c);
}

}  // namespace echo::cuda
