// Values of a batch to codes in a tile and back: the arithmetic of core/quantizer.h, element for element.
#pragma once

#include "../core/reduce.h"
#include "grids.h"

namespace echo::cpu {

// What becomes of a decoded value before it is used: nothing, or rounding to a tensor's 16-bit format.
enum class Rounding { kNone, kBFloat16, kFloat16 };

template <Rounding kRounding>
ECHO_INLINE FloatVector rounded(FloatVector x) {
  if constexpr (kRounding == Rounding::kBFloat16) return (FloatVector)(bfloat16_high(x) & 0xffff0000u);
  if constexpr (kRounding == Rounding::kFloat16) return from_float16_of(to_float16_of(x));
  return x;
}

// Y of the residual, given the decoded value; fp32 needs no rounding, as a NaN counts as 0 whatever its bits.
static inline Rounding reference_rounding(const Plan& plan) {
  if (plan.codec.rotation_log2 > 0 || plan.dtype == DType::kFloat32) return Rounding::kNone;
  return plan.dtype == DType::kBFloat16 ? Rounding::kBFloat16 : Rounding::kFloat16;
}

template <typename Visit>
ECHO_INLINE void with_rounding(Rounding rounding, Visit&& visit) {
  switch (rounding) {
    case Rounding::kNone:
      return visit(std::integral_constant<Rounding, Rounding::kNone>{});
    case Rounding::kBFloat16:
      return visit(std::integral_constant<Rounding, Rounding::kBFloat16>{});
    case Rounding::kFloat16:
      return visit(std::integral_constant<Rounding, Rounding::kFloat16>{});
  }
}

// The numbers that codes stand for. The 16 of 4-bit codes fit a vector of AVX-512, where they are looked up.
template <int kBits>
class CodeValues {
 public:
  static constexpr bool kTable = kBits == 4 && kVectorElems == 16;

  ECHO_INLINE_MEMBER explicit CodeValues(Quantizer quantizer) {
    sign_ = IntVector{} + (quantizer == Quantizer::kSymmetric ? 1 << (kBits - 1) : 0);
    if constexpr (kTable) table_ = of_lone_code(all_codes());
  }

  // Bits above the code may hold anything.
  ECHO_INLINE_MEMBER FloatVector of_code(IntVector code) const {
    if constexpr (kTable) return look_up(table_, code);
    return of_lone_code(code & ((1 << kBits) - 1));
  }
  // Bits above the code are 0.
  ECHO_INLINE_MEMBER FloatVector of_lone_code(IntVector code) const {
    return __builtin_convertvector((code ^ sign_) - sign_, FloatVector);
  }
  static ECHO_INLINE_MEMBER IntVector all_codes() {
    IntVector codes;
    for (int i = 0; i < kVectorElems; ++i) codes[i] = i;
    return codes;
  }
  static ECHO_INLINE_MEMBER FloatVector look_up(FloatVector table, IntVector code) {
#if defined(__AVX512F__)
    return (FloatVector)_mm512_permutexvar_ps((__m512i)code, table);
#else
    return __builtin_shuffle(table, code);
#endif
  }

 private:
  IntVector sign_;
  FloatVector table_;
};

// Decodes the codes of one group: scale * (code - zero), times the factor that undoes the rescale (1 without one, which
// changes nothing), then rounded. The 16 values of 4-bit codes fit a vector of AVX-512: there they are computed once
// per group and looked up.
template <int kBits, Rounding kRounding>
class Decoder {
 public:
  using Values = CodeValues<kBits>;
  static constexpr bool kTable = Values::kTable;

  ECHO_INLINE_MEMBER Decoder(float scale, float zero, float factor, Quantizer quantizer)
      : scale_(all_of(scale)), zero_(all_of(zero)), factor_(all_of(factor)), values_(quantizer) {
    if constexpr (kTable) table_ = compute(values_.of_lone_code(Values::all_codes()));
  }

  // Bits above the code may hold anything.
  ECHO_INLINE_MEMBER FloatVector of_code(IntVector code) const {
    if constexpr (kTable) return Values::look_up(table_, code);
    return compute(values_.of_code(code));
  }
  // Of a code as an encoder holds it: its value plus kShift.
  ECHO_INLINE_MEMBER FloatVector of_shifted(FloatVector shifted) const {
    if constexpr (kTable) return of_code((IntVector)shifted);
    return compute(shifted - kShift);
  }

 private:
  ECHO_INLINE_MEMBER FloatVector compute(FloatVector code) const {
    return rounded<kRounding>((scale_ * (code - zero_)) * factor_);
  }

  FloatVector scale_;
  FloatVector zero_;
  FloatVector factor_;
  Values values_;
  FloatVector table_;
};

// x + kShift within limits that are shifted too: as integers, which are in the order of the floats where those are
// positive, and below them where not. Clamping after rounding, to whole numbers, is clamping before it. A NaN becomes
// either limit.
ECHO_INLINE FloatVector shifted_within(FloatVector x, IntVector least, IntVector most) {
  return (FloatVector)lesser_of(greater_of((IntVector)(x + kShift), least), most);
}

// Encodes vectors of one group: the code's value plus kShift.
struct Encoder {
  FloatVector inverse;
  FloatVector zero;
  IntVector code_min;
  IntVector code_max;

  ECHO_INLINE_MEMBER Encoder(const BatchGrid& grid, int j)
      : inverse(all_of(grid.inverse.at[j])),
        zero(all_of(grid.zero.at[j])),
        code_min((IntVector)all_of(grid.code_min.at[j])),
        code_max((IntVector)all_of(grid.code_max.at[j])) {}

  ECHO_INLINE_MEMBER FloatVector shifted(FloatVector x) const {
    return shifted_within(x * inverse + zero, code_min, code_max);
  }
};

// Where decoded values are looked up they may as well be rounded before that.
template <int kBits, DType kDType>
static constexpr Rounding delivered_rounding() {
  return kDType == DType::kBFloat16 && Decoder<kBits, Rounding::kNone>::kTable ? Rounding::kBFloat16 : Rounding::kNone;
}

// ---- sources of values: open a group, then load its blocks ----------------------------------------------------------
template <DType kDType>
struct TensorSource {
  TensorSource(const void* tensor, const Batch& batch)
      : base(static_cast<const std::byte*>(tensor) + batch.elem_of(0) * dtype_bytes(kDType)),
        group_bytes(batch.group_elems * dtype_bytes(kDType)) {}

  ECHO_INLINE_MEMBER void open(int j) { group = base + j * group_bytes; }
  template <typename Extent>
  ECHO_INLINE_MEMBER Block load(int at, Extent extent) const {
    return load_elems<kDType>(group + at * dtype_bytes(kDType), extent);
  }

  const std::byte* base;
  int64_t group_bytes;
  const std::byte* group = nullptr;
};

// An array of the batch, times a factor.
struct ArraySource {
  const float* base;
  int stride;
  float factor;

  ECHO_INLINE_MEMBER void open(int j) { group = base + j * stride; }
  template <typename Extent>
  ECHO_INLINE_MEMBER Block load(int at, Extent) const {
    const Block x = load_block(group + at);
    return Block{x.even * factor, x.odd * factor};
  }
  const float* group = nullptr;
};

template <int kBits, Rounding kRounding>
struct TileSource {
  const std::byte* codes;  // of the batch's first group
  int64_t code_bytes;
  Quantizer quantizer;
  float factor;
  PerGroup scale;
  PerGroup zero;

  TileSource(const std::byte* tile, const Codec& codec, int64_t tile_groups, int64_t slot, int groups, float undo)
      : codes(tile + slot * echo::code_bytes(codec)),
        code_bytes(echo::code_bytes(codec)),
        quantizer(codec.quantizer),
        factor(undo) {
    load_params(tile + params_offset(codec, tile_groups) + slot * param_bytes(codec), codec, groups, scale, zero);
  }

  ECHO_INLINE_MEMBER void open(int j) {
    group = codes + j * code_bytes;
    decoder = Decoder<kBits, kRounding>(scale.at[j], zero.at[j], factor, quantizer);
  }
  template <typename Extent>
  ECHO_INLINE_MEMBER Block load(int at, Extent extent) const {
    const CodeBlock pair = load_codes<kBits>(group + at * kBits / 8, extent);
    return Block{decoder.of_code(pair.even), decoder.of_code(pair.odd)};
  }
  const std::byte* group = nullptr;
  Decoder<kBits, kRounding> decoder{0.0f, 0.0f, 1.0f, Quantizer::kZeroAware};
};

}  // namespace echo::cpu
