// The stages for one instruction set. This file is compiled once per set, with ECHO_ISA naming it; nothing in it has
// external linkage but the table `echo::cpu::<ECHO_ISA>::stages`.
#include "float_environment.h"
#include "group_loops.h"
#include "stages.h"
#include "state_loops.h"

#include "../core/reduce.h"

#if !defined(ECHO_ISA)
#error "compile with -DECHO_ISA=baseline, avx2 or avx512"
#endif
#define ECHO_TEXT_(name) #name
#define ECHO_TEXT(name) ECHO_TEXT_(name)

namespace echo::cpu {
namespace {

// Encodes values and says, unless `decoded` is null, what a receiver will decode; with a rescale both are in the
// caller's units.
void quantize_group(const Site& site, const float* values, int elems, int64_t slot, int64_t tile_groups,
                    std::byte* tile, float* decoded) {
  const Codec& codec = site.plan.codec;
  const int k = site.rescale_log2;
  GroupArray scaled;
  const float* x = values;
  if (k != 0) {
    std::memcpy(scaled.at, values, sizeof(float) * elems);
    scale_group(scaled.at, elems, power_of_two(k));
    x = scaled.at;
  }
  const GroupParams params = group_params(group_stats(x, elems), codec);
  const GroupGrid grid = group_grid(params, codec);
  encode_codes(x, elems, grid, codec, tile + slot * code_bytes(codec), decoded);
  store_params(params, codec, tile + params_offset(codec, tile_groups) + slot * param_bytes(codec));
  if (k != 0 && decoded != nullptr) scale_group(decoded, elems, power_of_two(-k));
}

void dequantize_group(const Site& site, const std::byte* tile, int64_t tile_groups, int64_t slot, int elems,
                      float* decoded) {
  const Codec& codec = site.plan.codec;
  const GroupParams params = load_params(tile + params_offset(codec, tile_groups) + slot * param_bytes(codec), codec);
  decode_codes(tile + slot * code_bytes(codec), elems, group_grid(params, codec), codec, decoded);
  if (site.rescale_log2 != 0) scale_group(decoded, elems, power_of_two(-site.rescale_log2));
}

// The contribution as sent: rotated, then compensated.
void load_contribution(const Site& site, int64_t group, int elems, float* x) {
  load_group(site.tensor, site.plan.dtype, group * site.plan.codec.group_elems, elems, x);
  rotate_entry(x, elems, site.plan.codec);
  apply_correction(site, group, elems, x);
}

// Bytes of absent groups and of the padding, so that a tile never carries what memory happened to hold.
void clear_unused(const Codec& codec, int64_t used, int64_t tile_groups, std::byte* tile) {
  const int64_t params = params_offset(codec, tile_groups);
  std::memset(tile + used * code_bytes(codec), 0, (tile_groups - used) * code_bytes(codec));
  const int64_t params_end = params + used * param_bytes(codec);
  std::memset(tile + params_end, 0, tile_bytes(codec, tile_groups) - params_end);
}

bool updates_locally(const Feedback& fb) { return fb.enabled && fb.residual == Residual::kLocal; }
bool updates_from_group(const Feedback& fb) { return fb.enabled && fb.residual == Residual::kGroup; }

uint32_t max_magnitude(const Site& site, GroupRange groups) {
  const FloatEnvironment environment;
  uint32_t largest = 0;
  GroupArray x;
  for (int64_t group = groups.begin; group < groups.end; ++group) {
    const int elems = group_elems_at(site.plan, group);
    load_group(site.tensor, site.plan.dtype, group * site.plan.codec.group_elems, elems, x.at);
    const uint32_t magnitude = group_max_magnitude(x.at, elems);
    largest = largest < magnitude ? magnitude : largest;
  }
  return largest;
}

void push(const Site& site, GroupRange groups, int64_t tile_groups, std::byte* tile) {
  const FloatEnvironment environment;
  clear_unused(site.plan.codec, groups.end - groups.begin, tile_groups, tile);
  const bool update = updates_locally(site.plan.feedback);
  GroupArray x;
  GroupArray decoded;
  for (int64_t group = groups.begin; group < groups.end; ++group) {
    const int elems = group_elems_at(site.plan, group);
    load_contribution(site, group, elems, x.at);
    quantize_group(site, x.at, elems, group - groups.begin, tile_groups, tile, update ? decoded.at : nullptr);
    if (!update) continue;
    for (int i = 0; i < elems; ++i) x.at[i] = x.at[i] - decoded.at[i];
    update_state(site, group, elems, x.at);
  }
}

void reduce(const Site& site, GroupRange groups, int64_t tile_groups, const std::byte* const* peer_tiles,
            std::byte* tile) {
  const FloatEnvironment environment;
  const Plan& plan = site.plan;
  clear_unused(plan.codec, groups.end - groups.begin, tile_groups, tile);
  const bool update = updates_locally(plan.feedback);
  GroupArray sum;
  GroupArray term;
  for (int64_t group = groups.begin; group < groups.end; ++group) {
    const int elems = group_elems_at(plan, group);
    const int64_t slot = group - groups.begin;
    for (int rank = 0; rank < plan.world_size; ++rank) {
      float* into = rank == 0 ? sum.at : term.at;
      if (rank == plan.rank) {
        load_contribution(site, group, elems, into);
      } else {
        dequantize_group(site, peer_tiles[rank], tile_groups, slot, elems, into);
      }
      if (rank == 0) continue;
      for (int i = 0; i < elems; ++i) sum.at[i] = sum.at[i] + term.at[i];
    }
    quantize_group(site, sum.at, elems, slot, tile_groups, tile, update ? term.at : nullptr);
    if (!update) continue;
    for (int i = 0; i < elems; ++i) sum.at[i] = sum.at[i] - residual_reference(term.at[i], plan);
    update_state(site, group, elems, sum.at);
  }
}

void tail(const Site& site, GroupRange groups, int64_t tile_groups, const std::byte* tile) {
  const FloatEnvironment environment;
  const Plan& plan = site.plan;
  const bool update = updates_from_group(plan.feedback);
  const float inverse_world = 1.0f / static_cast<float>(plan.world_size);
  GroupArray decoded;
  GroupArray x;
  for (int64_t group = groups.begin; group < groups.end; ++group) {
    const int elems = group_elems_at(plan, group);
    dequantize_group(site, tile, tile_groups, group - groups.begin, elems, decoded.at);
    if (update) {
      load_contribution(site, group, elems, x.at);
      for (int i = 0; i < elems; ++i) x.at[i] = x.at[i] - residual_reference(decoded.at[i], plan) * inverse_world;
      update_state(site, group, elems, x.at);
    }
    rotate_exit(decoded.at, elems, plan.codec);
    store_group(decoded.at, plan.dtype, group * plan.codec.group_elems, elems, site.tensor);
  }
}

void correction(const Site& site, float* out) {
  const FloatEnvironment environment;
  const Plan& plan = site.plan;
  GroupArray c;
  for (int64_t group = 0; group < group_count(plan); ++group) {
    const int elems = group_elems_at(plan, group);
    load_average(site, 0, group, elems, c.at);
    rotate_exit(c.at, elems, plan.codec);
    std::memcpy(out + group * plan.codec.group_elems, c.at, sizeof(float) * elems);
  }
}

}  // namespace

namespace ECHO_ISA {
extern const Stages stages;
const Stages stages{ECHO_TEXT(ECHO_ISA), max_magnitude, push, reduce, tail, correction};
}  // namespace ECHO_ISA

}  // namespace echo::cpu
