// A block: 2 * kVectorElems consecutive elements as two vectors, those of even and those of odd index.
//
// Split this way, 16-bit elements come and go as pairs in 32-bit words, and two 4-bit codes meet in their byte, by
// shifts and masks alone. Arrays of fp32 inside the stages hold blocks: first the even vector, then the odd one. The
// last block of a group may be a front: a few elements that are there (`elems`, in order) and absent ones behind them,
// which are never touched in memory.
#pragma once

#include <cstddef>
#include <type_traits>

#include "vectors.h"

namespace echo::cpu {

static constexpr int kBlockElems = 2 * kVectorElems;

struct Block {
  FloatVector even;
  FloatVector odd;
};

struct CodeBlock {  // integers, one per 32-bit element; bits above the code may hold anything
  IntVector even;
  IntVector odd;
};

struct Whole {
  static constexpr int elems = kBlockElems;
};
struct Front {
  int elems;  // 1 .. kBlockElems - 1
};

// visit(offset, extent) for each block of a group of `elems` elements.
template <typename Visit>
ECHO_INLINE void for_blocks(int elems, Visit&& visit) {
  int at = 0;
  for (; at + kBlockElems <= elems; at += kBlockElems) visit(at, Whole{});
  if (at < elems) visit(at, Front{elems - at});
}

ECHO_INLINE Block load_block(const float* from) { return Block{load_vector(from), load_vector(from + kVectorElems)}; }
ECHO_INLINE void store_block(const Block& x, float* to) {
  store_vector(x.even, to);
  store_vector(x.odd, to + kVectorElems);
}

ECHO_INLINE Block sum_of(const Block& u, const Block& v) { return Block{u.even + v.even, u.odd + v.odd}; }
ECHO_INLINE Block difference_of(const Block& u, const Block& v) { return Block{u.even - v.even, u.odd - v.odd}; }

// `x` where elements are there, `otherwise` where they are absent.
ECHO_INLINE Block present_or(const Block& x, Whole, FloatVector) { return x; }
ECHO_INLINE Block present_or(const Block& x, Front front, FloatVector otherwise) {
  IntVector index;
  for (int i = 0; i < kVectorElems; ++i) index[i] = 2 * i;
  return Block{index < front.elems ? x.even : otherwise, index + 1 < front.elems ? x.odd : otherwise};
}

// ---- raw bytes of a block, kBits per element ----------------------------------------------------------------------
template <typename Raw, int kBits>
ECHO_INLINE Raw load_raw(const std::byte* from, Whole) {
  static_assert(sizeof(Raw) * 8 == kBits * kBlockElems);
  Raw raw;
  std::memcpy(&raw, from, sizeof(raw));
  return raw;
}

template <typename Raw, int kBits>
ECHO_INLINE Raw load_raw(const std::byte* from, Front front) {
  static_assert(sizeof(Raw) * 8 == kBits * kBlockElems);
  const int bytes = (front.elems * kBits + 7) / 8;
#if defined(__AVX512F__)
  const uint64_t mask = (uint64_t{1} << bytes) - 1;
  if constexpr (sizeof(Raw) == 64) {
    return (Raw)_mm512_maskz_loadu_epi8(mask, from);
  } else if constexpr (sizeof(Raw) == 32) {
    return (Raw)_mm256_maskz_loadu_epi8(static_cast<__mmask32>(mask), from);
  } else {
    return (Raw)_mm_maskz_loadu_epi8(static_cast<__mmask16>(mask), from);
  }
#else
  Raw raw = {};
  std::memcpy(&raw, from, bytes);
  return raw;
#endif
}

template <int kBits, typename Raw>
ECHO_INLINE void store_raw(const Raw& raw, Whole, std::byte* to) {
  static_assert(sizeof(Raw) * 8 == kBits * kBlockElems);
  std::memcpy(to, &raw, sizeof(raw));
}

// Bits behind the last element of a byte that it shares are taken from `raw`.
template <int kBits, typename Raw>
ECHO_INLINE void store_raw(const Raw& raw, Front front, std::byte* to) {
  static_assert(sizeof(Raw) * 8 == kBits * kBlockElems);
  const int bytes = (front.elems * kBits + 7) / 8;
#if defined(__AVX512F__)
  const uint64_t mask = (uint64_t{1} << bytes) - 1;
  if constexpr (sizeof(Raw) == 64) {
    _mm512_mask_storeu_epi8(to, mask, (__m512i)raw);
  } else if constexpr (sizeof(Raw) == 32) {
    _mm256_mask_storeu_epi8(to, static_cast<__mmask32>(mask), (__m256i)raw);
  } else {
    _mm_mask_storeu_epi8(to, static_cast<__mmask16>(mask), (__m128i)raw);
  }
#else
  std::memcpy(to, &raw, bytes);
#endif
}

// ---- elements of a tensor or a state ------------------------------------------------------------------------------
struct FloatPair {
  FloatVector front;
  FloatVector back;
};

ECHO_INLINE Block split(const FloatPair& x) {
  IntVector even;
  for (int i = 0; i < kVectorElems; ++i) even[i] = 2 * i;
  return Block{__builtin_shuffle(x.front, x.back, even), __builtin_shuffle(x.front, x.back, even + 1)};
}

ECHO_INLINE FloatPair join(const Block& x) {
  IntVector low;
  for (int i = 0; i < kVectorElems; ++i) low[i] = i / 2 + (i % 2) * kVectorElems;
  return FloatPair{__builtin_shuffle(x.even, x.odd, low), __builtin_shuffle(x.even, x.odd, low + kVectorElems / 2)};
}

// Absent elements are 0.
template <DType kDType, typename Extent>
ECHO_INLINE Block load_elems(const std::byte* from, Extent extent) {
  if constexpr (kDType == DType::kFloat32) {
    FloatPair pair = {};
    if constexpr (std::is_same_v<Extent, Whole>) {
      std::memcpy(&pair, from, sizeof(pair));
    } else {
      std::memcpy(&pair, from, sizeof(float) * extent.elems);
    }
    return split(pair);
  } else {
    const WordVector raw = load_raw<WordVector, 16>(from, extent);
    if constexpr (kDType == DType::kBFloat16) return Block{(FloatVector)(raw << 16), (FloatVector)(raw & 0xffff0000u)};
    return Block{from_float16_of(raw & 0xffffu), from_float16_of(raw >> 16)};
  }
}

// Rounds to nearest even; every NaN is the canonical one.
template <DType kDType, typename Extent>
ECHO_INLINE void store_elems(const Block& x, Extent extent, std::byte* to) {
  if constexpr (kDType == DType::kFloat32) {
    const FloatVector nan = all_of(float_of(kNanBits32));
    const FloatPair pair = join(Block{x.even == x.even ? x.even : nan, x.odd == x.odd ? x.odd : nan});
    if constexpr (std::is_same_v<Extent, Whole>) {
      std::memcpy(to, &pair, sizeof(pair));
    } else {
      std::memcpy(to, &pair, sizeof(float) * extent.elems);
    }
  } else if constexpr (kDType == DType::kBFloat16) {
    store_raw<16>((bfloat16_high(x.even) >> 16) | (bfloat16_high(x.odd) & 0xffff0000u), extent, to);
  } else {
    store_raw<16>(to_float16_of(x.even) | (to_float16_of(x.odd) << 16), extent, to);
  }
}

// ---- codes --------------------------------------------------------------------------------------------------------
// 4-bit codes of neighbours share a byte, the even one in the low nibble.
template <int kBits, typename Extent>
ECHO_INLINE CodeBlock load_codes(const std::byte* from, Extent extent) {
  IntVector pairs;
  if constexpr (kBits == 4) {
    pairs = widen_bytes(load_raw<ByteVector, 4>(from, extent));
  } else {
    pairs = widen_halves(load_raw<HalfVector, 8>(from, extent));
  }
  return CodeBlock{pairs, pairs >> kBits};
}

template <int kBits, typename Extent>
ECHO_INLINE void store_codes(const CodeBlock& codes, Extent extent, std::byte* to) {
  constexpr int kMask = (1 << kBits) - 1;
  IntVector pairs = (codes.even & kMask) | ((codes.odd & kMask) << kBits);
  if constexpr (std::is_same_v<Extent, Front>) {
    IntVector index;
    for (int i = 0; i < kVectorElems; ++i) index[i] = 2 * i;
    pairs = index + 1 < extent.elems ? pairs : index < extent.elems ? pairs & kMask : IntVector{};
  }
  if constexpr (kBits == 4) {
    store_raw<4>(narrow_to_bytes(pairs), extent, to);
  } else {
    store_raw<8>(narrow_to_halves(pairs), extent, to);
  }
}

}  // namespace echo::cpu
