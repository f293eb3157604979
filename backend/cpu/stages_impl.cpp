// The stages for one instruction set. This file is compiled once per set, with ECHO_ISA naming it; nothing in it has
// external linkage but the table `echo::cpu::<ECHO_ISA>::stages`.
#include "delivery.h"
#include "float_environment.h"
#include "stages.h"
#include "state_loops.h"

#if !defined(ECHO_ISA)
#error "compile with -DECHO_ISA=baseline, avx2 or avx512"
#endif
#define ECHO_TEXT_(name) #name
#define ECHO_TEXT(name) ECHO_TEXT_(name)

namespace echo::cpu {
namespace {

// All that a stage needs besides its arguments; lives on the stack of the lane.
struct Scratch {
  BatchArray x;       // contribution or sum
  BatchArray scaled;  // the same times 2^k, where there is a rescale
  BatchArray values;  // rotated or decoded
  BatchState state;
  Extremes extremes;
  BatchGrid grid;
};

// Bytes of absent groups and of the padding, so that a tile never carries what memory happened to hold.
void clear_unused(const Codec& codec, int64_t used, int64_t tile_groups, std::byte* tile) {
  const int64_t params = params_offset(codec, tile_groups);
  std::memset(tile + used * code_bytes(codec), 0, (tile_groups - used) * code_bytes(codec));
  const int64_t params_end = params + used * param_bytes(codec);
  std::memset(tile + params_end, 0, tile_bytes(codec, tile_groups) - params_end);
}

bool updates_locally(const Feedback& fb) { return fb.enabled && fb.residual == Residual::kLocal; }
bool updates_from_group(const Feedback& fb) { return fb.enabled && fb.residual == Residual::kGroup; }

bool has_correction(const Plan& plan) { return plan.feedback.enabled && !plan.first_site; }

// The tensor's values of a batch into an array, rotated.
void load_rotated(const Site& site, const Batch& batch, float* out) {
  const Codec& codec = site.plan.codec;
  with_dtype(site.plan.dtype, [&](auto dtype) {
    accumulate<false, false, false>(batch, TensorSource<decltype(dtype)::value>(site.tensor, batch), nullptr, out,
                                    nullptr);
  });
  for (int j = 0; j < batch.groups; ++j) {
    if (is_rotated(codec, batch.elems_of(j))) rotate_entry(out + j * batch.stride, batch.elems_of(j), codec);
  }
}

// Adds the contribution as sent (rotated, then compensated) to scratch.x, or starts it; the averages stay in the
// scratch for the update.
void add_contribution(const Site& site, const Batch& batch, bool start, bool last, Scratch& scratch) {
  const Plan& plan = site.plan;
  if (has_correction(plan)) {
    load_average(site, 0, batch, scratch.state.c.at);
    if (plan.feedback.k2 != 0.0f) load_average(site, 1, batch, scratch.state.m1.at);
  }
  const auto add = [&](auto source) {
    with_flag(has_correction(plan), [&](auto correct) {
      with_flag(!start, [&](auto adds) {
        with_flag(last, [&](auto stats) {
          accumulate<correct, adds, stats>(batch, source, scratch.state.c.at, scratch.x.at, &scratch.extremes);
        });
      });
    });
  };
  if (plan.codec.rotation_log2 > 0) {
    load_rotated(site, batch, scratch.values.at);
    add(ArraySource{scratch.values.at, batch.stride, 1.0f});
  } else {
    with_dtype(plan.dtype, [&](auto dtype) { add(TensorSource<decltype(dtype)::value>(site.tensor, batch)); });
  }
}

// Adds what another rank pushed to scratch.x, or starts it.
void add_copy(const Site& site, const Batch& batch, const std::byte* tile, int64_t tile_groups, int64_t slot,
              bool start, bool last, Scratch& scratch) {
  const float undo = power_of_two(-site.rescale_log2);
  with_bits(site.plan.codec.bits, [&](auto bits) {
    const TileSource<bits, Rounding::kNone> source(tile, site.plan.codec, tile_groups, slot, batch.groups, undo);
    with_flag(!start, [&](auto adds) {
      with_flag(last, [&](auto stats) {
        accumulate<false, adds, stats>(batch, source, nullptr, scratch.x.at, &scratch.extremes);
      });
    });
  });
}

// What the next batch will read for its group j: contribution and averages.
template <Update kUpdate>
ECHO_INLINE void prefetch_next(const Site& site, const Batch& batch, int j) {
  const int64_t group = batch.first + batch.groups + j;
  prefetch_group<false>(site.tensor, group, batch.group_elems * dtype_bytes(site.plan.dtype));
  if constexpr (kUpdate != Update::kNone) {
    const int64_t bytes = batch.group_elems * state_elem_bytes(site.plan.feedback.state_dtype);
    prefetch_group<true>(average_base(site, 0), group, bytes);
    if constexpr (Compensator<kUpdate>::kBoth) prefetch_group<true>(average_base(site, 1), group, bytes);
  }
}

template <int kBits, Update kUpdate, Rounding kRounding>
void encode_batch(const Site& site, const Batch& batch, const float* values, std::byte* codes, Scratch& scratch) {
  const Codec& codec = site.plan.codec;
  const float undo = power_of_two(-site.rescale_log2);
  Compensator<kUpdate> compensator(site.plan.feedback, scratch.state);
  for (int j = 0; j < batch.groups; ++j) {
    const float* x = scratch.x.at + j * batch.stride;
    const float* scaled = values + j * batch.stride;
    std::byte* out = codes + j * code_bytes(codec);
    const Encoder encoder(scratch.grid, j);
    const Decoder<kBits, kRounding> decoder(scratch.grid.scale.at[j], scratch.grid.zero.at[j], undo, codec.quantizer);
    if (batch.elems_of(j) < codec.group_elems) std::memset(out, 0, code_bytes(codec));
    prefetch_next<kUpdate>(site, batch, j);
    compensator.open(j, batch.stride);
    for_blocks(batch.elems_of(j), [&](int at, auto extent) {
      const Block value = load_block(scaled + at);
      const Block shifted{encoder.shifted(value.even), encoder.shifted(value.odd)};
      store_codes<kBits>(CodeBlock{(IntVector)shifted.even, (IntVector)shifted.odd}, extent, out + at * kBits / 8);
      if constexpr (kUpdate != Update::kNone) {
        const Block decoded{decoder.of_shifted(shifted.even), decoder.of_shifted(shifted.odd)};
        compensator.update(difference_of(load_block(x + at), decoded), at, extent);
      }
    });
    compensator.close(j);
  }
}

// Quantizes scratch.x, whose extremes are known, and updates the state with what that rounds away, measured against the
// decoded value after `rounding`.
void quantize(const Site& site, const Batch& batch, int64_t slot, int64_t tile_groups, std::byte* tile,
              Rounding rounding, Scratch& scratch) {
  const Codec& codec = site.plan.codec;
  const float* values = scratch.x.at;
  if (site.rescale_log2 != 0) {
    const ArraySource source{scratch.x.at, batch.stride, power_of_two(site.rescale_log2)};
    accumulate<false, false, true>(batch, source, nullptr, scratch.scaled.at, &scratch.extremes);
    values = scratch.scaled.at;
  }
  const BatchParams params = batch_params(batch_stats(batch, scratch.extremes), codec);
  batch_grid(params, codec, scratch.grid);
  store_params(params, codec, batch.groups, tile + params_offset(codec, tile_groups) + slot * param_bytes(codec));
  const bool update = updates_locally(site.plan.feedback);
  std::byte* codes = tile + slot * code_bytes(codec);
  with_bits(codec.bits, [&](auto bits) {
    if (!update) return encode_batch<bits, Update::kNone, Rounding::kNone>(site, batch, values, codes, scratch);
    with_rounding(rounding, [&](auto rounds) {
      with_update(update_of(site.plan),
                  [&](auto kind) { encode_batch<bits, kind, rounds>(site, batch, values, codes, scratch); });
    });
  });
  if (update) store_state(site, batch, scratch.state);
}

uint32_t max_magnitude(const Site& site, GroupRange groups) {
  const FloatEnvironment environment;
  uint32_t largest = 0;
  BatchArray x;
  for_batches(site.plan, groups, [&](const Batch& batch) {
    with_dtype(site.plan.dtype, [&](auto dtype) {
      accumulate<false, false, false>(batch, TensorSource<decltype(dtype)::value>(site.tensor, batch), nullptr, x.at,
                                      nullptr);
    });
    for (int j = 0; j < batch.groups; ++j) {
      const uint32_t magnitude = max_magnitude_of(x.at + j * batch.stride, batch.elems_of(j));
      largest = largest < magnitude ? magnitude : largest;
    }
  });
  return largest;
}

void push(const Site& site, GroupRange groups, int64_t tile_groups, std::byte* tile) {
  const FloatEnvironment environment;
  clear_unused(site.plan.codec, groups.end - groups.begin, tile_groups, tile);
  Scratch scratch;
  for_batches(site.plan, groups, [&](const Batch& batch) {
    add_contribution(site, batch, true, site.rescale_log2 == 0, scratch);
    quantize(site, batch, batch.first - groups.begin, tile_groups, tile, Rounding::kNone, scratch);
  });
}

void reduce(const Site& site, GroupRange groups, int64_t tile_groups, const std::byte* const* peer_tiles,
            std::byte* tile) {
  const FloatEnvironment environment;
  const Plan& plan = site.plan;
  clear_unused(plan.codec, groups.end - groups.begin, tile_groups, tile);
  Scratch scratch;
  for_batches(plan, groups, [&](const Batch& batch) {
    const int64_t slot = batch.first - groups.begin;
    for (int rank = 0; rank < plan.world_size; ++rank) {
      const bool start = rank == 0;
      const bool last = rank + 1 == plan.world_size && site.rescale_log2 == 0;
      if (rank == plan.rank) {
        add_contribution(site, batch, start, last, scratch);
      } else {
        add_copy(site, batch, peer_tiles[rank], tile_groups, slot, start, last, scratch);
      }
    }
    quantize(site, batch, slot, tile_groups, tile, reference_rounding(plan), scratch);
  });
}

// State of a batch from the contribution in scratch.x and the mean of the decoded values.
void update_from_group(const Site& site, const Batch& batch, Scratch& scratch) {
  const Plan& plan = site.plan;
  const FloatVector inverse_world = all_of(1.0f / static_cast<float>(plan.world_size));
  with_rounding(reference_rounding(plan), [&](auto rounding) {
    with_update(update_of(plan), [&](auto kind) {
      constexpr Rounding kRounding = decltype(rounding)::value;
      constexpr Update kUpdate = decltype(kind)::value;
      Compensator<kUpdate> compensator(plan.feedback, scratch.state);
      for (int j = 0; j < batch.groups; ++j) {
        prefetch_next<kUpdate>(site, batch, j);
        compensator.open(j, batch.stride);
        for_blocks(batch.elems_of(j), [&](int at, auto extent) {
          const Block x = load_block(scratch.x.at + j * batch.stride + at);
          const Block y = load_block(scratch.values.at + j * batch.stride + at);
          const Block mean{rounded<kRounding>(y.even) * inverse_world, rounded<kRounding>(y.odd) * inverse_world};
          compensator.update(difference_of(x, mean), at, extent);
        });
        compensator.close(j);
      }
    });
  });
  store_state(site, batch, scratch.state);
}

// An array of a batch into the tensor.
void store_batch(const Site& site, const Batch& batch, const float* values) {
  with_dtype(site.plan.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    for (int j = 0; j < batch.groups; ++j) {
      std::byte* to = static_cast<std::byte*>(site.tensor) + batch.elem_of(j) * dtype_bytes(kDType);
      for_blocks(batch.elems_of(j), [&](int at, auto extent) {
        store_elems<kDType>(load_block(values + j * batch.stride + at), extent, to + at * dtype_bytes(kDType));
      });
    }
  });
}

void tail(const Site& site, GroupRange groups, int64_t tile_groups, const std::byte* tile) {
  const FloatEnvironment environment;
  const Plan& plan = site.plan;
  const float undo = power_of_two(-site.rescale_log2);
  Scratch scratch;
  for_batches(plan, groups, [&](const Batch& batch) {
    const int64_t slot = batch.first - groups.begin;
    if (updates_from_group(plan.feedback)) {
      add_contribution(site, batch, true, false, scratch);
      with_bits(plan.codec.bits, [&](auto bits) {
        const TileSource<bits, Rounding::kNone> source(tile, plan.codec, tile_groups, slot, batch.groups, undo);
        accumulate<false, false, false>(batch, source, nullptr, scratch.values.at, nullptr);
      });
      update_from_group(site, batch, scratch);
    }
    with_bits(plan.codec.bits, [&](auto bits) {
      with_dtype(plan.dtype, [&](auto dtype) {
        const TileSource<bits, delivered_rounding<bits, dtype>()> source(tile, plan.codec, tile_groups, slot,
                                                                         batch.groups, undo);
        deliver<bits, dtype>(batch, source, plan.codec, site.tensor);
      });
    });
  });
}

void correction(const Site& site, float* out) {
  const FloatEnvironment environment;
  Site into = site;
  into.plan.dtype = DType::kFloat32;
  into.tensor = out;
  BatchArray c;
  for_batches(site.plan, GroupRange{0, group_count(site.plan)}, [&](const Batch& batch) {
    load_average(site, 0, batch, c.at);
    for (int j = 0; j < batch.groups; ++j) {
      if (!is_rotated(site.plan.codec, batch.elems_of(j))) continue;
      rotate_exit(c.at + j * batch.stride, batch.elems_of(j), site.plan.codec);
    }
    store_batch(into, batch, c.at);
  });
}

}  // namespace

namespace ECHO_ISA {
extern const Stages stages;
const Stages stages{ECHO_TEXT(ECHO_ISA), max_magnitude, push, reduce, tail, correction};
}  // namespace ECHO_ISA

}  // namespace echo::cpu
