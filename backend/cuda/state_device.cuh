// The compensator's state of one group, and the contribution that it corrects; offsets come from core/tile.h.
#pragma once

#include "group_device.cuh"

namespace echo::cuda {

static __device__ __forceinline__ std::byte* average_base(const Lane& lane, int which) {
  return static_cast<std::byte*>(lane.site.state) + which * lane.state_layout.average_bytes;
}

// Where this lane's group has its scale, in int8 state.
static __device__ __forceinline__ uint16_t* scale_at(const Lane& lane, const GroupAt& at, std::byte* base) {
  return reinterpret_cast<uint16_t*>(base + lane.state_layout.scales_offset) + lane.first_group + at.slot;
}

template <DType kDType, int kElems>
static __device__ __forceinline__ void load_wide_average(const Lane& lane, const GroupAt& at, const std::byte* base,
                                                         float (&out)[kElems]) {
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    const std::byte* from = base + elem_index(lane, at, part) * kBytesOf<kDType>;
    widen_chunk<kDType>(load_chunk<kBytesOf<kDType>>(from, remaining_in(lane, at, part), true),
                        out + kChunkElems * part);
  }
}

// One stored average (0: c, 1: m1); absent slots are 0.
template <int kElems>
static __device__ __forceinline__ void load_average(const Lane& lane, const GroupAt& at, int which,
                                                    float (&out)[kElems]) {
  const Plan& plan = lane.site.plan;
  std::byte* base = average_base(lane, which);
  switch (plan.feedback.state_dtype) {
    case StateDType::kFloat32:
      return load_wide_average<DType::kFloat32>(lane, at, base, out);
    case StateDType::kBFloat16:
      return load_wide_average<DType::kBFloat16>(lane, at, base, out);
    case StateDType::kFloat16:
      return load_wide_average<DType::kFloat16>(lane, at, base, out);
    case StateDType::kInt8:
      break;
  }
  const float scale = from_bfloat16(at.elems > 0 ? *scale_at(lane, at, base) : uint16_t{0});
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    const ChunkWords<1> words = load_chunk<1>(base + elem_index(lane, at, part), remaining_in(lane, at, part), true);
    unpack_chunk(CodeWords{{words.at[0], words.at[1]}}, 8, code_form(8, true), out + kChunkElems * part);
  }
#pragma unroll
  for (int e = 0; e < kElems; ++e) out[e] = scale * out[e];
}

template <StateDType kState, int kElems>
static __device__ __forceinline__ void store_wide_average(const Lane& lane, const GroupAt& at, std::byte* base,
                                                          const float (&values)[kElems]) {
  constexpr int kBytes = kState == StateDType::kFloat32 ? 4 : 2;
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    const float* x = values + kChunkElems * part;
    ChunkWords<kBytes> words;
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) {
      if constexpr (kState == StateDType::kFloat32) {
        words.at[i] = bits_of(x[i]);
      } else if (i % 2 == 0) {
        words.at[i / 2] = store_state16(x[i], kState) | static_cast<uint32_t>(store_state16(x[i + 1], kState)) << 16;
      }
    }
    store_chunk(words, base + elem_index(lane, at, part) * kBytes, remaining_in(lane, at, part), true);
  }
}

template <int kElems>
static __device__ __forceinline__ void store_int8_average(const Lane& lane, const GroupAt& at, std::byte* base,
                                                          const float (&values)[kElems]) {
  float largest = 0.0f;
#pragma unroll
  for (int e = 0; e < kElems; ++e) largest = fmaxf(largest, fabsf(values[e]));
#pragma unroll 1
  for (int stride = 1; stride < 1 << lane.lanes_log2; stride *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, stride));
  }
  const uint16_t scale_bits = int8_state_scale(bits_of(largest));
  const float inverse = int8_state_inverse(scale_bits);
  if (at.elems > 0 && lane.index == 0) *scale_at(lane, at, base) = scale_bits;
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    float codes[kChunkElems];
#pragma unroll
    for (int i = 0; i < kChunkElems; ++i) codes[i] = encode_int8_state(values[kChunkElems * part + i], inverse);
    const CodeWords words = pack_chunk(codes, 8, code_form(8, true));
    store_chunk(ChunkWords<1>{{words.at[0], words.at[1]}}, base + elem_index(lane, at, part),
                remaining_in(lane, at, part), true);
  }
}

// Pre: values are finite, those of absent slots 0.
template <int kElems>
static __device__ __forceinline__ void store_average(const Lane& lane, const GroupAt& at, int which,
                                                     const float (&values)[kElems]) {
  std::byte* base = average_base(lane, which);
  switch (lane.site.plan.feedback.state_dtype) {
    case StateDType::kFloat32:
      return store_wide_average<StateDType::kFloat32>(lane, at, base, values);
    case StateDType::kBFloat16:
      return store_wide_average<StateDType::kBFloat16>(lane, at, base, values);
    case StateDType::kFloat16:
      return store_wide_average<StateDType::kFloat16>(lane, at, base, values);
    case StateDType::kInt8:
      return store_int8_average(lane, at, base, values);
  }
}

// The contribution as sent: rotated, then compensated. `c` is the stored correction, 0 where none is added. Without
// kFeedback the plan has none.
template <DType kDType, bool kFeedback, int kElems>
static __device__ __forceinline__ void load_contribution(const Lane& lane, const GroupAt& at, float (&x)[kElems],
                                                         float (&c)[kElems]) {
  const Plan& plan = lane.site.plan;
  ChunkWords<kBytesOf<kDType>> words[kElems / kChunkElems];
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    const std::byte* from =
        static_cast<const std::byte*>(lane.site.tensor) + elem_index(lane, at, part) * kBytesOf<kDType>;
    words[part] = load_chunk<kBytesOf<kDType>>(from, remaining_in(lane, at, part), lane.tensor_aligned);
  }
#pragma unroll
  for (int e = 0; e < kElems; ++e) c[e] = 0.0f;
  const bool corrected = kFeedback && plan.feedback.enabled && !plan.first_site;
  if constexpr (kFeedback) {
    if (corrected) load_average(lane, at, 0, c);
  }
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) widen_chunk<kDType>(words[part], x + kChunkElems * part);
  rotate_entry(lane, at, x);
  if (corrected) {
#pragma unroll
    for (int e = 0; e < kElems; ++e) x[e] = x[e] + c[e];
  }
}

// residual_reference of the core, element by element; a residual that is not a number counts as 0 whatever its NaN.
template <DType kDType, int kElems>
static __device__ __forceinline__ void to_residual_reference(const Lane& lane, float (&decoded)[kElems]) {
  if (lane.site.plan.codec.rotation_log2 > 0) return;
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    float* x = decoded + kChunkElems * part;
    widen_chunk<kDType>(narrow_numbers<kDType>(x), x);
  }
}

template <int kElems>
static __device__ __forceinline__ void next_state(bool first, const Feedback& fb, const float (&u)[kElems],
                                                  float (&c)[kElems], float (&m1)[kElems]) {
  if (first) {
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      const StateElem next = update_element(StateElem{}, u[e], true, fb);
      c[e] = next.c;
      m1[e] = next.m1;
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kElems; ++e) {
    const StateElem next = update_element(StateElem{c[e], m1[e]}, u[e], false, fb);
    c[e] = next.c;
    m1[e] = next.m1;
  }
}

// `u` holds the residual of each element as computed, `c` what load_contribution gave. Overwrites both.
template <int kElems>
static __device__ __forceinline__ void update_state(const Lane& lane, const GroupAt& at, float (&u)[kElems],
                                                    float (&c)[kElems]) {
  // Copies whose k2 the compiler knows to be zero or not, so that update_element has no branch left.
  Feedback one_average = lane.site.plan.feedback;
  const Feedback two_averages = one_average;
  one_average.k2 = 0.0f;
  const bool first = lane.site.plan.first_site;
  fill_absent(lane, at, 0.0f, u);
  if (two_averages.k2 != 0.0f) {
    float m1[kElems];
    if (first) {
#pragma unroll
      for (int e = 0; e < kElems; ++e) m1[e] = 0.0f;
    } else {
      load_average(lane, at, 1, m1);
    }
    __builtin_assume(two_averages.k2 != 0.0f);
    next_state(first, two_averages, u, c, m1);
    store_average(lane, at, 1, m1);
  } else {
    next_state(first, one_average, u, c, u);
  }
  store_average(lane, at, 0, c);
}

}  // namespace echo::cuda
