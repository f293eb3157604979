// The compensator's state of a batch: from its storage format, through an update, and back; offsets come from
// core/tile.h.
#pragma once

#include "../core/feedback.h"
#include "extremes.h"

namespace echo::cpu {

// One stored average (c or m1): elements, and for int8 the scales behind them.
static inline std::byte* average_base(const Site& site, int which) {
  return static_cast<std::byte*>(site.state) + which * state_average_bytes(site.plan);
}

template <StateDType kDType>
inline constexpr DType kElemsOf = kDType == StateDType::kFloat32    ? DType::kFloat32
                                  : kDType == StateDType::kBFloat16 ? DType::kBFloat16
                                                                    : DType::kFloat16;

template <typename Visit>
ECHO_INLINE void with_state_dtype(StateDType dtype, Visit&& visit) {
  switch (dtype) {
    case StateDType::kFloat32:
      return visit(std::integral_constant<StateDType, StateDType::kFloat32>{});
    case StateDType::kBFloat16:
      return visit(std::integral_constant<StateDType, StateDType::kBFloat16>{});
    case StateDType::kFloat16:
      return visit(std::integral_constant<StateDType, StateDType::kFloat16>{});
    case StateDType::kInt8:
      return visit(std::integral_constant<StateDType, StateDType::kInt8>{});
  }
}

static inline void load_average(const Site& site, int which, const Batch& batch, float* out) {
  const std::byte* base = average_base(site, which);
  const std::byte* scales = base + state_scales_offset(site.plan);
  with_state_dtype(site.plan.feedback.state_dtype, [&](auto dtype) {
    constexpr StateDType kDType = decltype(dtype)::value;
    for (int j = 0; j < batch.groups; ++j) {
      const std::byte* group = base + batch.elem_of(j) * state_elem_bytes(kDType);
      float* const to = out + j * batch.stride;
      FloatVector scale = {};
      if constexpr (kDType == StateDType::kInt8) {
        uint16_t scale_bits;
        std::memcpy(&scale_bits, scales + 2 * (batch.first + j), 2);
        scale = all_of(from_bfloat16(scale_bits));
      }
      for_blocks(batch.elems_of(j), [&](int at, auto extent) {
        if constexpr (kDType == StateDType::kInt8) {
          const IntVector pairs = widen_signed_halves(load_raw<HalfVector, 8>(group + at, extent));
          store_block(Block{scale * __builtin_convertvector((pairs << 24) >> 24, FloatVector),
                            scale * __builtin_convertvector(pairs >> 8, FloatVector)},
                      to + at);
        } else {
          store_block(load_elems<kElemsOf<kDType>>(group + at * state_elem_bytes(kDType), extent), to + at);
        }
      });
    }
  });
}

// ---- update -------------------------------------------------------------------------------------------------------
// What an update reads and writes: nothing, or c, or c and m1. At the first site of a pass there is nothing to read,
// and where one average forgets the old one it does as if it were there.
enum class Update { kNone, kFirstOfOne, kFirstOfTwo, kOne, kTwo };

static inline Update update_of(const Plan& plan) {
  const bool two = plan.feedback.k2 != 0.0f;
  if (two) return plan.first_site ? Update::kFirstOfTwo : Update::kTwo;
  return plan.first_site || plan.feedback.beta2 == 0.0f ? Update::kFirstOfOne : Update::kOne;
}

// Nothing to visit where there is no update.
template <typename Visit>
ECHO_INLINE void with_update(Update update, Visit&& visit) {
  switch (update) {
    case Update::kNone:
      return;
    case Update::kFirstOfOne:
      return visit(std::integral_constant<Update, Update::kFirstOfOne>{});
    case Update::kFirstOfTwo:
      return visit(std::integral_constant<Update, Update::kFirstOfTwo>{});
    case Update::kOne:
      return visit(std::integral_constant<Update, Update::kOne>{});
    case Update::kTwo:
      return visit(std::integral_constant<Update, Update::kTwo>{});
  }
}

// The averages of a batch between load and store, and the largest magnitudes of the new ones, which int8 needs.
struct BatchState {
  BatchArray c;
  BatchArray m1;
  FloatVector c_most[kBatchGroups];
  FloatVector m1_most[kBatchGroups];
};

// core/feedback.h for the blocks of one group after another.
template <Update kUpdate>
class Compensator {
 public:
  static constexpr bool kFirst = kUpdate == Update::kFirstOfOne || kUpdate == Update::kFirstOfTwo;
  static constexpr bool kBoth = kUpdate == Update::kFirstOfTwo || kUpdate == Update::kTwo;

  Compensator(const Feedback& fb, BatchState& state) : fb_(fb), state_(state) {}

  ECHO_INLINE_MEMBER void open(int j, int stride) {
    c_ = state_.c.at + j * stride;
    m1_ = state_.m1.at + j * stride;
    c_most_ = m1_most_ = FloatVector{};
  }
  ECHO_INLINE_MEMBER void close(int j) {
    if constexpr (kUpdate == Update::kNone) return;
    state_.c_most[j] = c_most_;
    if constexpr (kBoth) state_.m1_most[j] = m1_most_;
  }

  // `residual` is u as computed; values that are not finite count as 0.
  template <typename Extent>
  ECHO_INLINE_MEMBER void update(const Block& residual, int at, Extent extent) {
    const Block old_c = load_block(c_ + at);
    const Block old_m1 = kBoth ? load_block(m1_ + at) : Block{};
    const FloatVector even = finite_or_zero_of(residual.even);
    const FloatVector odd = finite_or_zero_of(residual.odd);
    Block c{next_c(old_c.even, old_m1.even, even), next_c(old_c.odd, old_m1.odd, odd)};
    c = present_or(c, extent, FloatVector{});
    store_block(c, c_ + at);
    c_most_ = greater_magnitude_of(greater_magnitude_of(c_most_, c.even), c.odd);
    if constexpr (kBoth) {
      Block m1{next_m1(old_m1.even, even), next_m1(old_m1.odd, odd)};
      m1 = present_or(m1, extent, FloatVector{});
      store_block(m1, m1_ + at);
      m1_most_ = greater_magnitude_of(greater_magnitude_of(m1_most_, m1.even), m1.odd);
    }
  }

 private:
  ECHO_INLINE_MEMBER FloatVector next_c(FloatVector c, FloatVector m1, FloatVector u) const {
    if constexpr (kFirst) return finite_or_zero_of(fb_.k3 * u);
    if constexpr (kBoth) return finite_or_zero_of((fb_.beta2 * c + fb_.k2 * m1) + fb_.k3 * u);
    return finite_or_zero_of(fb_.beta2 * c + fb_.k3 * u);
  }
  ECHO_INLINE_MEMBER FloatVector next_m1(FloatVector m1, FloatVector u) const {
    if constexpr (kFirst) return finite_or_zero_of(fb_.k1 * u);
    return finite_or_zero_of(fb_.beta1 * m1 + fb_.k1 * u);
  }

  const Feedback fb_;
  BatchState& state_;
  float* c_ = nullptr;
  float* m1_ = nullptr;
  FloatVector c_most_ = {};
  FloatVector m1_most_ = {};
};

// ---- storage ------------------------------------------------------------------------------------------------------
template <DType kDType>
ECHO_INLINE WordVector state16_of(FloatVector x) {
  constexpr uint32_t kInf = kDType == DType::kBFloat16 ? 0x7f80u : 0x7c00u;
  const WordVector stored = kDType == DType::kBFloat16 ? to_bfloat16_of(x) : to_float16_of(x);
  return (stored & 0x7fffu) == kInf ? WordVector{} : stored;
}

static inline void store_int8_average(const Batch& batch, const float* values, FloatVector* most, std::byte* base,
                                      std::byte* scales) {
  for (int j = batch.groups; j < kBatchGroups; ++j) most[j] = FloatVector{};
  const FloatVector largest = fold_each(most, [](FloatVector p, FloatVector q) { return greater_of(p, q); });
  const WordVector scale_bits =
      largest == 0.0f ? WordVector{} : stored_scale_of(largest / 127.0f, ScaleDType::kBFloat16);
  PerGroup inverses;
  store_vector(scale_bits == 0 ? FloatVector{} : 1.0f / from_bfloat16_of(scale_bits), inverses.at);
  const HalfVector halves = narrow_to_halves((IntVector)scale_bits);
  std::memcpy(scales + 2 * batch.first, &halves, 2 * batch.groups);
  const IntVector least = (IntVector)all_of(kShift - 127.0f);
  const IntVector most_code = (IntVector)all_of(kShift + 127.0f);
  for (int j = 0; j < batch.groups; ++j) {
    const FloatVector inverse = all_of(inverses.at[j]);
    const float* from = values + j * batch.stride;
    std::byte* to = base + batch.elem_of(j);
    for_blocks(batch.elems_of(j), [&](int at, auto extent) {
      const Block x = load_block(from + at);
      const FloatVector even = shifted_within(x.even * inverse, least, most_code);
      const FloatVector odd = shifted_within(x.odd * inverse, least, most_code);
      store_codes<8>(CodeBlock{(IntVector)even, (IntVector)odd}, extent, to + at);
    });
  }
}

static inline void store_average(const Site& site, int which, const Batch& batch, const float* values,
                                 FloatVector* most) {
  std::byte* base = average_base(site, which);
  with_state_dtype(site.plan.feedback.state_dtype, [&](auto dtype) {
    constexpr StateDType kDType = decltype(dtype)::value;
    if constexpr (kDType == StateDType::kInt8) {
      store_int8_average(batch, values, most, base, base + state_scales_offset(site.plan));
    } else {
      for (int j = 0; j < batch.groups; ++j) {
        std::byte* to = base + batch.elem_of(j) * state_elem_bytes(kDType);
        for_blocks(batch.elems_of(j), [&](int at, auto extent) {
          const Block x = load_block(values + j * batch.stride + at);
          if constexpr (kDType == StateDType::kFloat32) {
            store_elems<DType::kFloat32>(x, extent, to + 4 * at);
          } else {
            constexpr DType kElems = kElemsOf<kDType>;
            store_raw<16>(state16_of<kElems>(x.even) | (state16_of<kElems>(x.odd) << 16), extent, to + 2 * at);
          }
        });
      }
    }
  });
}

static inline void store_state(const Site& site, const Batch& batch, BatchState& state) {
  store_average(site, 0, batch, state.c.at, state.c_most);
  if (site.plan.feedback.k2 != 0.0f) store_average(site, 1, batch, state.m1.at, state.m1_most);
}

}  // namespace echo::cpu
