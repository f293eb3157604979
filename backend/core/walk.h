// How a call over device memory is shared out: the lanes that it takes, and the tiles that they walk.
#pragma once

#include <numeric>

#include "tile.h"
#include "tuning.h"

namespace echo {

// What a device and a group's slabs allow a plan; equal on all ranks.
struct WalkLimits {
  int32_t multiprocessors = 1;
  int32_t lanes = 1;  // of each multiprocessor
  int32_t warps = 1;  // of a lane
  int64_t task = 1;   // groups that a warp takes at a time
  int64_t fit = 1;    // groups that a slot has room for
};

// Lane l walks tiles l, l + lanes, l + 2 lanes, ...
struct Walk {
  int32_t lanes = 0;
  TileCut cut;
};

// One lane for each multiprocessor, and more where a segment has so many elements for each, or tiles of `fit` groups.
inline int64_t walk_lanes(const Plan& plan, const WalkLimits& limits, int64_t fit) {
  const int64_t elems = plan.feedback.enabled ? kDeviceLaneElems : kDevicePlainLaneElems;
  const int64_t share = min_i64(fit, ceil_div(elems, plan.codec.group_elems));
  const int64_t wanted = ceil_div(segment_groups(plan), share);
  const int64_t most = static_cast<int64_t>(limits.multiprocessors) * limits.lanes;
  return min_i64(most, wanted < limits.multiprocessors ? limits.multiprocessors : wanted);
}

// Tiles of every lane: as few as slots allow. Without state, where the link is what calls wait for, some more, so that
// lanes use it while others use the memory.
inline int64_t walk_rounds(const Plan& plan, int64_t lanes, int64_t fit) {
  const int64_t groups = segment_groups(plan);
  const int64_t least = ceil_div(groups, lanes * fit);
  if (plan.feedback.enabled) return least;
  const int64_t wanted = min_i64(kDevicePlainTiles, groups * plan.codec.group_elems / (lanes * kDevicePlainTileElems));
  return wanted < least ? least : wanted;
}

// As many tiles for every lane, and of equal size but for one unit, so that no lane makes the others wait. Units are
// whole tasks, since what is left of one goes the exact way, which is slow, and so many that the warps of a block get
// equally many at a step.
inline Walk plan_walk(const Plan& plan, const WalkLimits& limits) {
  const int64_t shared = limits.task * (limits.warps / std::gcd(limits.warps, plan.world_size));
  const int64_t unit = shared <= limits.fit ? shared : min_i64(limits.task, limits.fit);
  const int64_t fit = limits.fit / unit * unit;
  const int64_t lanes = walk_lanes(plan, limits, fit);
  const int64_t units = ceil_div(segment_groups(plan), unit);
  const int64_t tiles = min_i64(units, walk_rounds(plan, lanes, fit) * lanes);
  return {.lanes = static_cast<int32_t>(min_i64(lanes, tiles)),
          .cut = {.tiles = tiles, .groups = units / tiles * unit, .step = unit, .larger = units % tiles}};
}

}  // namespace echo
