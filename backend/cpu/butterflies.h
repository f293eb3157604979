// The rotation on blocks: signs, and butterflies (u, v) -> (u+v, u-v) at strides 1, 2, 4, ....
//
// Element 2i of a block is element i of its even vector, so stride 1 joins the two vectors, stride 2s elements s apart
// in one of them, and strides from kBlockElems on whole blocks; two of the latter at a time, so that an array is walked
// half as often. One addition per element and stride, as in the scalar form: x[i^h] + (-x[i]) is x[i^h] - x[i] to the
// bit.
#pragma once

#include "../core/rotation.h"
#include "batch.h"

namespace echo::cpu {

// Sign bits in block order: of a run of kMaxGroupElems, and of a block made of runs of 2^m, for each m.
struct SignTables {
  static constexpr int kShortRuns = kVectorElems == 16 ? 5 : kVectorElems == 8 ? 4 : 3;  // runs below kBlockElems
  alignas(64) uint32_t run[kMaxGroupElems];
  alignas(64) uint32_t block[kShortRuns][kBlockElems];
  constexpr SignTables() : run(), block() {
    for (int i = 0; i < kMaxGroupElems; ++i) run[place(i)] = rotation_sign_bit(static_cast<uint32_t>(i));
    for (int m = 0; m < kShortRuns; ++m) {
      for (int i = 0; i < kBlockElems; ++i) block[m][place(i)] = rotation_sign_bit(static_cast<uint32_t>(i % (1 << m)));
    }
  }
  static constexpr int place(int i) {
    return i / kBlockElems * kBlockElems + i % kBlockElems / 2 + (i % 2) * kVectorElems;
  }
};
static_assert(1 << SignTables::kShortRuns == kBlockElems);
static constexpr SignTables kSigns;

ECHO_INLINE Block flip_signs(const Block& x, int at, int run_log2) {
  const uint32_t* signs =
      run_log2 < SignTables::kShortRuns ? kSigns.block[run_log2] : kSigns.run + (at & ((1 << run_log2) - 1));
  WordVector even;
  WordVector odd;
  std::memcpy(&even, signs, sizeof(even));
  std::memcpy(&odd, signs + kVectorElems, sizeof(odd));
  return Block{(FloatVector)((WordVector)x.even ^ even), (FloatVector)((WordVector)x.odd ^ odd)};
}

// Partners by a shuffle, signs by flipping the top bit, or by a product with 1 or -1 where one instruction multiplies
// and adds: the product is exact, so that the fused form rounds once as well.
template <int kStride>
ECHO_INLINE FloatVector butterfly_inside(FloatVector x) {
  IntVector partner;
  for (int i = 0; i < kVectorElems; ++i) partner[i] = i ^ kStride;
#if defined(__AVX512F__)
  FloatVector side;
  for (int i = 0; i < kVectorElems; ++i) side[i] = (i & kStride) ? -1.0f : 1.0f;
  return (FloatVector)_mm512_fmadd_ps(x, side, __builtin_shuffle(x, partner));
#else
  IntVector sign;
  for (int i = 0; i < kVectorElems; ++i) sign[i] = (i & kStride) ? INT32_MIN : 0;
  return __builtin_shuffle(x, partner) + (FloatVector)((IntVector)x ^ sign);
#endif
}

// The strides below kBlockElems that a run has; all of them where it is known to be a block or longer.
template <bool kLongRun>
ECHO_INLINE Block butterflies_inside(Block x, int given_log2) {
  const int run_log2 = kLongRun ? SignTables::kShortRuns : given_log2;
  if (run_log2 > 0) x = Block{x.even + x.odd, x.even - x.odd};
  if (run_log2 > 1) x = Block{butterfly_inside<1>(x.even), butterfly_inside<1>(x.odd)};
  if (run_log2 > 2) x = Block{butterfly_inside<2>(x.even), butterfly_inside<2>(x.odd)};
  if constexpr (kVectorElems > 4) {
    if (run_log2 > 3) x = Block{butterfly_inside<4>(x.even), butterfly_inside<4>(x.odd)};
  }
  if constexpr (kVectorElems > 8) {
    if (run_log2 > 4) x = Block{butterfly_inside<8>(x.even), butterfly_inside<8>(x.odd)};
  }
  return x;
}

// Strides `stride` and 2 * stride of `elems` elements in whole blocks.
static inline void two_strides(float* x, int elems, int stride) {
  for (int base = 0; base < elems; base += 4 * stride) {
    for (int at = base; at < base + stride; at += kBlockElems) {
      const Block a = load_block(x + at);
      const Block b = load_block(x + at + stride);
      const Block c = load_block(x + at + 2 * stride);
      const Block d = load_block(x + at + 3 * stride);
      const Block ab = sum_of(a, b), ab_ = difference_of(a, b), cd = sum_of(c, d), cd_ = difference_of(c, d);
      store_block(sum_of(ab, cd), x + at);
      store_block(sum_of(ab_, cd_), x + at + stride);
      store_block(difference_of(ab, cd), x + at + 2 * stride);
      store_block(difference_of(ab_, cd_), x + at + 3 * stride);
    }
  }
}

static inline void one_stride(float* x, int elems, int stride) {
  for (int base = 0; base < elems; base += 2 * stride) {
    for (int at = base; at < base + stride; at += kBlockElems) {
      const Block u = load_block(x + at);
      const Block v = load_block(x + at + stride);
      store_block(sum_of(u, v), x + at);
      store_block(difference_of(u, v), x + at + stride);
    }
  }
}

static inline void outer_butterflies(float* x, int elems, int run_log2) {
  int stride = kBlockElems;
  for (; 4 * stride <= 1 << run_log2; stride *= 4) two_strides(x, elems, stride);
  if (2 * stride <= 1 << run_log2) one_stride(x, elems, stride);
}

// Pre: the group is whole; absent elements of its last block are runs of their own.
static inline void rotate_entry(float* x, int elems, const Codec& codec) {
  const int m = codec.rotation_log2;
  const float factor = rotation_entry_factor(codec);
  with_flag(m >= SignTables::kShortRuns, [&](auto long_run) {
    for (int at = 0; at < elems; at += kBlockElems) {
      store_block(butterflies_inside<long_run>(flip_signs(load_block(x + at), at, m), m), x + at);
    }
  });
  outer_butterflies(x, elems, m);
  if (factor == 1.0f) return;
  for (int at = 0; at < elems; at += kBlockElems) {
    const Block sum = load_block(x + at);
    store_block(Block{sum.even * factor, sum.odd * factor}, x + at);
  }
}

// The way back of fp32 values, those of a state.
static inline void rotate_exit(float* x, int elems, const Codec& codec) {
  const int m = codec.rotation_log2;
  const FloatVector factor = all_of(rotation_exit_factor(codec));
  with_flag(m >= SignTables::kShortRuns, [&](auto long_run) {
    for (int at = 0; at < elems; at += kBlockElems) {
      store_block(butterflies_inside<long_run>(load_block(x + at), m), x + at);
    }
  });
  outer_butterflies(x, elems, m);
  for (int at = 0; at < elems; at += kBlockElems) {
    const Block sum = load_block(x + at);
    store_block(flip_signs(Block{sum.even * factor, sum.odd * factor}, at, m), x + at);
  }
}

}  // namespace echo::cpu
