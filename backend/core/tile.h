// All offsets: which elements form a group, which groups a rank owns, where codes and parameters lie in a tile, where
// the compensator's state lies in its slot. Nothing else in the project computes an offset.
//
//   tensor   | group 0 | group 1 | ...                        | group G-1 (may be partial) |
//   segments | rank 0: C groups      | rank 1: C groups | ... | late ones short or empty   |
//   tile     | codes: n * g*bits/8 bytes | parameters: n * 2 or 4 bytes | zeros to 16 bytes |
//
// 4-bit codes: element 2i in the low nibble of byte i, 2i+1 in the high one. Parameters: scale, then (not for
// symmetric) zero-point, 16 bits each, little endian. Codes of absent elements and bytes of absent groups are 0.
#pragma once

#include "config.h"
#include "hd.h"

namespace echo {

constexpr int64_t kTileAlignBytes = 16;

ECHO_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
ECHO_HD int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
ECHO_HD int64_t align_up(int64_t bytes) { return ceil_div(bytes, kTileAlignBytes) * kTileAlignBytes; }

struct GroupRange {
  int64_t begin = 0;  // groups of the tensor
  int64_t end = 0;
};

ECHO_HD int64_t group_count(const Plan& plan) { return ceil_div(plan.numel, plan.codec.group_elems); }
ECHO_HD int64_t segment_groups(const Plan& plan) { return ceil_div(group_count(plan), plan.world_size); }

// Elements present in a group: g, fewer in the last one.
ECHO_HD int32_t group_elems_at(const Plan& plan, int64_t group) {
  return static_cast<int32_t>(min_i64(plan.codec.group_elems, plan.numel - group * plan.codec.group_elems));
}

// How every segment is cut into tiles: the first `larger` of them have `step` groups more than the `groups` of the
// others; the last has what is left.
struct TileCut {
  int64_t tiles = 0;
  int64_t groups = 0;
  int64_t step = 0;
  int64_t larger = 0;
};

// Of a segment; of tile `tiles` it is the end of the last, or behind it.
ECHO_HD int64_t tile_begin(const TileCut& cut, int64_t tile) {
  return tile * cut.groups + min_i64(tile, cut.larger) * cut.step;
}

inline TileCut equal_tiles(const Plan& plan, int64_t tile_groups) {
  return TileCut{.tiles = ceil_div(segment_groups(plan), tile_groups), .groups = tile_groups};
}

// Groups [from, to) of the segment that `owner` owns, of a tensor of `groups` of which each rank owns `per_segment`;
// empty where the segment is short.
ECHO_HD GroupRange segment_range(int64_t groups, int64_t per_segment, int32_t owner, int64_t from, int64_t to) {
  const int64_t start = owner * per_segment;
  const int64_t end = min_i64(groups, start + per_segment);
  return GroupRange{min_i64(end, start + from), min_i64(end, start + to)};
}
ECHO_HD GroupRange tile_range(const Plan& plan, int32_t owner, int64_t tile, int64_t tile_groups) {
  const int64_t from = tile * tile_groups;
  return segment_range(group_count(plan), segment_groups(plan), owner, from, from + tile_groups);
}

ECHO_HD int64_t code_bytes(const Codec& codec) { return codec.group_elems * codec.bits / 8; }
ECHO_HD int64_t param_bytes(const Codec& codec) { return codec.quantizer == Quantizer::kSymmetric ? 2 : 4; }
ECHO_HD int64_t params_offset(const Codec& codec, int64_t tile_groups) { return tile_groups * code_bytes(codec); }
ECHO_HD int64_t tile_bytes(const Codec& codec, int64_t tile_groups) {
  return align_up(tile_groups * (code_bytes(codec) + param_bytes(codec)));
}

// Bytes of the codes, parameters and padding that one rank sends for a call: a tile to and from each peer for every
// tile of a segment.
inline int64_t sent_tile_bytes(const Plan& plan, const TileCut& cut) {
  if (cut.tiles == 0) return 0;
  const int64_t whole = cut.tiles - 1;
  const int64_t larger = min_i64(whole, cut.larger);
  const int64_t segment = larger * tile_bytes(plan.codec, cut.groups + cut.step) +
                          (whole - larger) * tile_bytes(plan.codec, cut.groups) +
                          tile_bytes(plan.codec, segment_groups(plan) - tile_begin(cut, whole));
  return 2 * (plan.world_size - 1) * segment;
}

// What one rank has to send for a call, were there no padding: 2(P-1)/P * N * w, with w = bits/8 + parameter bytes / g;
// rounded up.
inline int64_t ideal_wire_bytes(const Plan& plan) {
  const int64_t per_group = code_bytes(plan.codec) + param_bytes(plan.codec);
  return ceil_div(2 * (plan.world_size - 1) * plan.numel * per_group,
                  static_cast<int64_t>(plan.world_size) * plan.codec.group_elems);
}

// Slot of the compensator's state. int8: codes, then one bf16 scale per group; other formats: the elements alone. c
// first, then m1.
ECHO_HD int64_t state_elem_bytes(StateDType dtype) {
  return dtype == StateDType::kFloat32 ? 4 : dtype == StateDType::kInt8 ? 1 : 2;
}
ECHO_HD int64_t state_scales_offset(const Plan& plan) {
  return align_up(plan.numel * state_elem_bytes(plan.feedback.state_dtype));
}
ECHO_HD int64_t state_average_bytes(const Plan& plan) {
  const int64_t scales = plan.feedback.state_dtype == StateDType::kInt8 ? align_up(2 * group_count(plan)) : 0;
  return state_scales_offset(plan) + scales;
}
ECHO_HD int64_t state_bytes(const Plan& plan) {
  if (!plan.feedback.enabled) return 0;
  return state_average_bytes(plan) * (plan.feedback.k2 != 0.0f ? 2 : 1);
}

// What a call keeps for an update that comes after it: this rank's contribution, then the codes of the sum as one tile
// of all groups.
inline int64_t kept_codes_offset(const Plan& plan) { return align_up(plan.numel * dtype_bytes(plan.dtype)); }
inline int64_t kept_params_offset(const Plan& plan) {
  return kept_codes_offset(plan) + params_offset(plan.codec, group_count(plan));
}
inline int64_t kept_bytes(const Plan& plan) {
  return kept_codes_offset(plan) + tile_bytes(plan.codec, group_count(plan));
}

}  // namespace echo
