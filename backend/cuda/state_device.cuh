// The compensator's state of one group, and the contribution that it corrects; offsets come from core/tile.h.
#pragma once

#include "group_device.cuh"

namespace echo::cuda {

static __device__ __forceinline__ std::byte* average_base(const Site& site, int which) {
  return static_cast<std::byte*>(site.state) + which * state_average_bytes(site.plan);
}

template <DType kDType, int kElems>
static __device__ __forceinline__ void load_wide_average(const Lane& lane, const GroupAt& at, const std::byte* base, float (&out)[kElems]) {
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    const std::byte* from = base + elem_index(lane, at, part) * kBytesOf<kDType>;
    widen_chunk<kDType>(load_chunk<kBytesOf<kDType>>(from, remaining_in(lane, at, part), true), out + kChunkElems * part);
  }
}

// One stored average (0: c, 1: m1); absent slots are 0.
template <int kElems>
static __device__ __forceinline__ void load_average(const Lane& lane, const GroupAt& at, int which, float (&out)[kElems]) {
  const Plan& plan = lane.site.plan;
  const std::byte* base = average_base(lane.site, which);
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
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(base + state_scales_offset(plan));
  const float scale = from_bfloat16(at.elems > 0 ? scales[lane.first_group + at.slot] : uint16_t{0});
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    const ChunkWords<1> words = load_chunk<1>(base + elem_index(lane, at, part), remaining_in(lane, at, part), true);
    unpack_chunk(CodeWords{{words.at[0], words.at[1]}}, 8, code_form(8, true), out + kChunkElems * part);
  }
#pragma unroll
  for (int e = 0; e < kElems; ++e) out[e] = scale * out[e];
}

// Pre: values are finite, those of absent slots 0.
template <int kElems>
static __device__ __forceinline__ void store_average(const Lane& lane, const GroupAt& at, int which, const float (&values)[kElems]) {
  const Plan& plan = lane.site.plan;
  const StateDType dtype = plan.feedback.state_dtype;
  std::byte* base = average_base(lane.site, which);
  float inverse = 0.0f;
  if (dtype == StateDType::kInt8) {
    float largest = 0.0f;
#pragma unroll
    for (int e = 0; e < kElems; ++e) largest = fmaxf(largest, fabsf(values[e]));
#pragma unroll 1
    for (int stride = 1; stride < 1 << lane.lanes_log2; stride *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, stride));
    }
    const uint16_t scale_bits = int8_state_scale(bits_of(largest));
    inverse = int8_state_inverse(scale_bits);
    if (at.elems > 0 && lane.index == 0) {
      reinterpret_cast<uint16_t*>(base + state_scales_offset(plan))[lane.first_group + at.slot] = scale_bits;
    }
  }
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    const float* x = values + kChunkElems * part;
    std::byte* to = base + elem_index(lane, at, part) * state_elem_bytes(dtype);
    const int32_t remaining = remaining_in(lane, at, part);
    if (dtype == StateDType::kInt8) {
      float codes[kChunkElems];
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) codes[i] = encode_int8_state(x[i], inverse);
      const CodeWords words = pack_chunk(codes, 8, code_form(8, true));
      store_chunk(ChunkWords<1>{{words.at[0], words.at[1]}}, to, remaining, true);
    } else if (dtype == StateDType::kFloat32) {
      ChunkWords<4> words;
#pragma unroll
      for (int i = 0; i < kChunkElems; ++i) words.at[i] = bits_of(x[i]);
      store_chunk(words, to, remaining, true);
    } else {
      ChunkWords<2> words;
#pragma unroll
      for (int i = 0; i < kChunkElems; i += 2) {
        words.at[i / 2] = store_state16(x[i], dtype) | static_cast<uint32_t>(store_state16(x[i + 1], dtype)) << 16;
      }
      store_chunk(words, to, remaining, true);
    }
  }
}

// The contribution as sent: rotated, then compensated. `c` is the stored correction, 0 where none is added. Without kFeedback the plan has none.
template <DType kDType, bool kFeedback, int kElems>
static __device__ __forceinline__ void load_contribution(const Lane& lane, const GroupAt& at, float (&x)[kElems], float (&c)[kElems]) {
  const Plan& plan = lane.site.plan;
  ChunkWords<kBytesOf<kDType>> words[kElems / kChunkElems];
#pragma unroll
  for (int part = 0; part < kElems / kChunkElems; ++part) {
    const std::byte* from = static_cast<const std::byte*>(lane.site.tensor) + elem_index(lane, at, part) * kBytesOf<kDType>;
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

// `u` holds the residual of each element as computed, `c` what load_contribution gave. Overwrites both.
template <int kElems>
static __device__ __forceinline__ void update_state(const Lane& lane, const GroupAt& at, float (&u)[kElems], float (&c)[kElems]) {
  const Feedback& fb = lane.site.plan.feedback;
  fill_absent(lane, at, 0.0f, u);
  if (fb.k2 == 0.0f) {
    Feedback one = fb;
    one.k2 = 0.0f;
    const bool first = lane.site.plan.first_site;
#pragma unroll
    for (int e = 0; e < kElems; ++e) c[e] = update_element(StateElem{c[e], 0.0f}, u[e], first, one).c;
    store_average(lane, at, 0, c);
    return;
  }
  float m1[kElems];
  if (lane.site.plan.first_site) {
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      const StateElem next = update_element(StateElem{}, u[e], true, fb);
      c[e] = next.c;
      m1[e] = next.m1;
    }
  } else {
    load_average(lane, at, 1, m1);
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      const StateElem next = update_element(StateElem{c[e], m1[e]}, u[e], false, fb);
      c[e] = next.c;
      m1[e] = next.m1;
    }
  }
  store_average(lane, at, 0, c);
  store_average(lane, at, 1, m1);
}

}  // namespace echo::cuda
