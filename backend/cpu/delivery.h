// A batch of a tile straight into the tensor: decoded, out of the rotation, rounded once.
#pragma once

#include "butterflies.h"
#include "code_loops.h"

namespace echo::cpu {

// The exit of one rotated group, blocks at a time: whole numbers of fp32 (core/rotation.h) up to the last product.
class Exit {
 public:
  ECHO_INLINE_MEMBER Exit(float scale, float zero, float undo, const Codec& codec)
      : run_log2_(codec.rotation_log2), scale_(all_of(exit_scale(scale, undo, codec))) {
    IntVector index;
    for (int i = 0; i < kVectorElems; ++i) index[i] = 2 * i;
    starts_ = (index & (run_elems() - 1)) == 0 ? all_of(exit_offset(zero, codec)) : FloatVector{};
  }

  // What is delivered of the block at `at`, of which `h` is the transform. Other elements lose 0, which changes no bit:
  // sums and differences of codes are never -0.
  ECHO_INLINE_MEMBER Block of(const Block& h, int at) const {
    const FloatVector even = (at & (run_elems() - 1)) == 0 ? h.even - starts_ : h.even;
    return flip_signs(Block{scale_ * even, scale_ * h.odd}, at, run_log2_);
  }

 private:
  ECHO_INLINE_MEMBER int run_elems() const { return 1 << run_log2_; }

  int run_log2_;
  FloatVector scale_;
  FloatVector starts_;  // 2^m * z where a block of even elements has the first of a run
};

// A group whose codes are at `codes`, to the elements at `to`.
template <int kBits, DType kDType>
static inline void deliver_rotated(const std::byte* codes, const CodeValues<kBits>& values, const Exit& exit,
                                   const Codec& codec, std::byte* to) {
  const int run_log2 = codec.rotation_log2;
  const auto values_at = [&](int at, auto extent) {
    const CodeBlock pair = load_codes<kBits>(codes + at * kBits / 8, extent);
    return Block{values.of_code(pair.even), values.of_code(pair.odd)};
  };
  const auto store = [&](const Block& h, int at, auto extent) {
    store_elems<kDType>(exit.of(h, at), extent, to + at * dtype_bytes(kDType));
  };
  if (run_log2 < SignTables::kShortRuns) {
    for_blocks(codec.group_elems, [&](int at, auto extent) {
      store(butterflies_inside<false>(values_at(at, extent), run_log2), at, extent);
    });
    return;
  }
  alignas(64) float h[kMaxGroupElems];
  for (int at = 0; at < codec.group_elems; at += kBlockElems) {
    store_block(butterflies_inside<true>(values_at(at, Whole{}), run_log2), h + at);
  }
  outer_butterflies(h, codec.group_elems, run_log2);
  for (int at = 0; at < codec.group_elems; at += kBlockElems) store(load_block(h + at), at, Whole{});
}

template <int kBits, DType kDType>
static inline void deliver(const Batch& batch, const TileSource<kBits, delivered_rounding<kBits, kDType>()>& tile,
                           const Codec& codec, void* tensor) {
  auto source = tile;
  const CodeValues<kBits> values(codec.quantizer);
  for (int j = 0; j < batch.groups; ++j) {
    std::byte* to = static_cast<std::byte*>(tensor) + batch.elem_of(j) * dtype_bytes(kDType);
    prefetch_group<true>(tensor, batch.first + batch.groups + j, batch.group_elems * dtype_bytes(kDType));
    if (is_rotated(codec, batch.elems_of(j))) {
      const Exit exit(tile.scale.at[j], tile.zero.at[j], tile.factor, codec);
      deliver_rotated<kBits, kDType>(tile.codes + j * tile.code_bytes, values, exit, codec, to);
      continue;
    }
    source.open(j);
    for_blocks(batch.elems_of(j), [&](int at, auto extent) {
      const Block value = source.load(at, extent);
      if constexpr (delivered_rounding<kBits, kDType>() == Rounding::kBFloat16) {
        store_raw<16>(((WordVector)value.even >> 16) | (WordVector)value.odd, extent, to + 2 * at);
      } else {
        store_elems<kDType>(value, extent, to + at * dtype_bytes(kDType));
      }
    });
  }
}

}  // namespace echo::cpu
