// Values of a group to codes in a tile and back, in vectors: the arithmetic of core/quantizer.h, element for element,
// and the packing of core/tile.h.
#pragma once

#include <cstddef>
#include <cstring>

#include "../core/quantizer.h"
#include "../core/tile.h"
#include "vectors.h"

namespace echo::cpu {

// 4-bit codes of neighbouring elements share a byte, the even one in the low nibble.
template <int kBits>
static inline void store_codes(IntVector codes, int first_elem, std::byte* out) {
  if constexpr (kBits == 8) {
    const ByteVector bytes = __builtin_convertvector(codes, ByteVector);
    std::memcpy(out + first_elem, &bytes, sizeof(bytes));
    return;
  }
  const LongVector pairs = (LongVector)(codes & 0xf);
  const PairVector bytes = __builtin_convertvector(pairs | (pairs >> 28), PairVector);
  std::memcpy(out + first_elem / 2, &bytes, sizeof(bytes));
}

template <int kBits>
static inline IntVector load_codes(const std::byte* in, int first_elem) {
  if constexpr (kBits == 8) {
    return widen_bytes(in + first_elem);
  }
  const LongVector pairs = widen_pairs(in + first_elem / 2);
  return (IntVector)((pairs & 0xf) | ((pairs & 0xf0) << 28));
}

static inline void store_code(int32_t code, int bits, int elem, std::byte* out) {
  if (bits == 8) {
    out[elem] = static_cast<std::byte>(code);
  } else if (elem % 2 == 0) {
    out[elem / 2] = static_cast<std::byte>(code & 0xf);
  } else {
    out[elem / 2] |= static_cast<std::byte>((code & 0xf) << 4);
  }
}

static inline uint32_t load_code(const std::byte* in, int bits, int elem) {
  if (bits == 8) return static_cast<uint32_t>(in[elem]);
  const auto byte = static_cast<uint32_t>(in[elem / 2]);
  return elem % 2 == 0 ? byte & 0xf : byte >> 4;
}

// The whole vectors of a group; returns the number of elements done.
template <int kBits, bool kDecode>
static inline int encode_vectors(const float* x, int elems, const GroupGrid& grid, std::byte* out, float* decoded) {
  constexpr float kShift = 12582912.0f;  // as in round_to_int; the low bits of the shifted value are the code
  const FloatVector inverse = FloatVector{} + grid.inverse;
  const FloatVector zero = FloatVector{} + grid.zero;
  const FloatVector scale = FloatVector{} + grid.scale;
  const FloatVector code_min = FloatVector{} + grid.code_min;
  const FloatVector code_max = FloatVector{} + grid.code_max;
  const IntVector shift_bits = (IntVector)(FloatVector{} + kShift);
  int i = 0;
  for (; i + kVectorElems <= elems; i += kVectorElems) {
    const FloatVector position = load_vector(x + i) * inverse + zero;
    const FloatVector shifted = lesser_of(greater_of(position, code_min), code_max) + kShift;
    store_codes<kBits>((IntVector)shifted - shift_bits, i, out);
    if constexpr (kDecode) store_vector(scale * ((shifted - kShift) - zero), decoded + i);
  }
  return i;
}

template <int kBits>
static inline int decode_vectors(const std::byte* in, int elems, const GroupGrid& grid, int32_t sign, float* out) {
  const FloatVector zero = FloatVector{} + grid.zero;
  const FloatVector scale = FloatVector{} + grid.scale;
  int i = 0;
  for (; i + kVectorElems <= elems; i += kVectorElems) {
    const IntVector codes = (load_codes<kBits>(in, i) ^ sign) - sign;
    store_vector(scale * (__builtin_convertvector(codes, FloatVector) - zero), out + i);
  }
  return i;
}

// Writes all code_bytes(codec) bytes of the group, zeros for absent elements; `decoded`, unless null, gets what a
// receiver will see.
static inline void encode_codes(const float* x, int elems, const GroupGrid& grid, const Codec& codec, std::byte* out,
                                float* decoded) {
  const GroupGrid g = grid;
  const int bits = codec.bits;
  if (g.code_max == 0.0f || elems < codec.group_elems) std::memset(out, 0, code_bytes(codec));
  int i = 0;
  if (g.code_max != 0.0f) {
    if (bits == 4) {
      i = decoded != nullptr ? encode_vectors<4, true>(x, elems, g, out, decoded)
                             : encode_vectors<4, false>(x, elems, g, out, nullptr);
    } else {
      i = decoded != nullptr ? encode_vectors<8, true>(x, elems, g, out, decoded)
                             : encode_vectors<8, false>(x, elems, g, out, nullptr);
    }
    for (; i < elems; ++i) {
      const float code = encode_element(x[i], g);
      store_code(static_cast<int32_t>(code), bits, i, out);
      if (decoded != nullptr) decoded[i] = decode_element(code, g);
    }
  }
  if (decoded == nullptr) return;
  for (; i < elems; ++i) decoded[i] = decode_element(0.0f, g);
}

static inline void decode_codes(const std::byte* in, int elems, const GroupGrid& grid, const Codec& codec, float* out) {
  const GroupGrid g = grid;
  const Codec c = codec;
  const int32_t sign = c.quantizer != Quantizer::kSymmetric ? 0 : c.bits == 4 ? 0x8 : 0x80;
  int i = c.bits == 4 ? decode_vectors<4>(in, elems, g, sign, out) : decode_vectors<8>(in, elems, g, sign, out);
  for (; i < elems; ++i) out[i] = decode_element(code_value(load_code(in, c.bits, i), c), g);
}

}  // namespace echo::cpu
