// How calls over device memory are cut into lanes and tiles, whatever the device, the group and the size.
#include "../../backend/core/walk.h"

#include <algorithm>
#include <random>
#include <vector>

#include "check.h"

namespace {

using namespace echo;

int64_t unit_of(const Plan& plan, const WalkLimits& limits) {
  int64_t unit = limits.task;
  while (plan.world_size * unit / limits.task % limits.warps != 0) unit += limits.task;
  return unit <= limits.fit ? unit : min_i64(limits.task, limits.fit);
}

// Tiles lie side by side, none is empty, and each fits; the warps of a block share those that are not the last evenly.
std::vector<int64_t> tiles_of(const Plan& plan, const WalkLimits& limits, const TileCut& cut) {
  std::vector<int64_t> tiles;
  const int64_t segment = segment_groups(plan);
  CHECK_EQ(tile_begin(cut, 0), 0);
  CHECK(tile_begin(cut, cut.tiles) >= segment);
  int64_t sent = 0;
  for (int64_t tile = 0; tile < cut.tiles; ++tile) {
    const int64_t end = min_i64(segment, tile_begin(cut, tile + 1));
    tiles.push_back(end - tile_begin(cut, tile));
    sent += 2 * (plan.world_size - 1) * tile_bytes(plan.codec, tiles.back());
    CHECK(tiles.back() > 0 && tiles.back() <= limits.fit);
    if (tile + 1 < cut.tiles) CHECK_EQ(tiles.back() % unit_of(plan, limits), 0);
  }
  CHECK_EQ(sent, sent_tile_bytes(plan, cut));
  return tiles;
}

void check_walk(const Plan& plan, const WalkLimits& limits) {
  const Walk walk = plan_walk(plan, limits);
  const int64_t segment = segment_groups(plan);
  const int64_t unit = unit_of(plan, limits);
  const int64_t fit = limits.fit / unit * unit;
  const std::vector<int64_t> tiles = tiles_of(plan, limits, walk.cut);
  std::vector<int64_t> load(walk.lanes);
  std::vector<int64_t> count(walk.lanes);
  for (size_t tile = 0; tile < tiles.size(); ++tile) {
    load[tile % walk.lanes] += tiles[tile];
    count[tile % walk.lanes] += 1;
  }

  const int64_t resident = static_cast<int64_t>(limits.multiprocessors) * limits.lanes;
  CHECK(walk.lanes >= 1 && walk.lanes <= resident);
  CHECK(walk.lanes >= min_i64(limits.multiprocessors, ceil_div(segment, unit)));
  // No lane besides one for each multiprocessor without its share, and all lanes before any has a second tile.
  const int64_t elems = plan.feedback.enabled ? kDeviceLaneElems : kDevicePlainLaneElems;
  const int64_t share = min_i64(fit, ceil_div(elems, plan.codec.group_elems));
  if (walk.lanes > limits.multiprocessors) CHECK((walk.lanes - 1) * share < segment);
  const int64_t rounds = *std::max_element(count.begin(), count.end());
  if (rounds > 1)
    CHECK(walk.lanes == resident || (walk.lanes == limits.multiprocessors && walk.lanes * share >= segment));

  // As few tiles a lane as fit allows; without state so many as are wanted, of enough elements.
  const bool fewest = (rounds - 1) * walk.lanes * fit < segment;
  const bool wanted = !plan.feedback.enabled && rounds <= kDevicePlainTiles &&
                      segment * plan.codec.group_elems >= rounds * walk.lanes * kDevicePlainTileElems;
  CHECK(fewest || wanted);
  const auto [least, largest] = std::minmax_element(load.begin(), load.end());
  const bool smallest = static_cast<int64_t>(tiles.size()) == ceil_div(segment, unit);
  CHECK(*std::min_element(count.begin(), count.end()) >= rounds - (smallest ? 1 : 0));
  CHECK(*largest - *least < 2 * unit);  // one unit, and what the segment's last lacks
}

Plan plan_of(int32_t world_size, int32_t group_elems, int32_t bits, int64_t numel, bool feedback) {
  Plan plan;
  plan.world_size = world_size;
  plan.codec.group_elems = group_elems;
  plan.codec.bits = bits;
  plan.numel = numel;
  plan.feedback.enabled = feedback;
  return plan;
}

// Of warps whose lanes hold 32 elements each, at most one group a lane.
WalkLimits limits_of(const Plan& plan, int32_t multiprocessors, int32_t lanes, int64_t slot_bytes) {
  int32_t side = 32;
  while (side > 1 && 32 * 32 / side < plan.codec.group_elems) side /= 2;
  return {.multiprocessors = multiprocessors,
          .lanes = lanes,
          .warps = 4,
          .task = side,
          .fit = slot_bytes / (code_bytes(plan.codec) + param_bytes(plan.codec))};
}

ECHO_TEST(every_lane_of_a_walk_has_its_share) {
  std::mt19937_64 random(1);
  for (const int32_t ranks : {2, 3, 4, 8}) {
    for (const int32_t group_elems : {16, 64, 96, 128, 1024}) {
      for (const int32_t bits : {4, 8}) {
        const auto check_at = [&](int64_t numel, int32_t multiprocessors, int32_t lanes, int64_t slot_bytes) {
          if (numel < 1) return;
          for (const bool feedback : {false, true}) {
            const Plan plan = plan_of(ranks, group_elems, bits, numel, feedback);
            check_walk(plan, limits_of(plan, multiprocessors, lanes, slot_bytes));
          }
        };
        for (const int32_t multiprocessors : {1, 2, 132}) {
          for (const int32_t lanes : {2, 3}) {
            for (const int64_t slot_bytes : {int64_t{1152}, int64_t{4352}, kPeerDeviceSlotBytes}) {
              for (int64_t numel = 1; numel < (int64_t{1} << 26) / (133 - multiprocessors); numel *= 4) {
                const auto beside = static_cast<int64_t>(random() % group_elems);
                check_at(numel + static_cast<int64_t>(random() % (3 * numel)), multiprocessors, lanes, slot_bytes);
                for (const int64_t near : {-beside - 1, int64_t{0}, beside + 1})
                  check_at(numel * ranks * group_elems / 16 + near, multiprocessors, lanes, slot_bytes);
              }
            }
          }
        }
      }
    }
  }
}

// Two ranks of 132 multiprocessors, three lanes each: what was measured, and the sizes on either side of each limit.
ECHO_TEST(walks_as_measured) {
  struct Expected {
    bool feedback;
    int64_t numel;
    int32_t lanes;
    int64_t tiles, first, last;  // groups of the first tile, and of the last
  };
  constexpr int64_t kMi = 1 << 20;
  constexpr int64_t kLane = 2 * kDeviceLaneElems;  // elements of both segments that ask for a lane
  constexpr int64_t kPlainLane = 2 * kDevicePlainLaneElems;
  constexpr int64_t kFull = 2 * 396 * 352 * 128;                   // that fill each lane's slot once
  constexpr int64_t kPlainTile = 2 * 396 * kDevicePlainTileElems;  // that give each lane a tile of its own
  for (const Expected& e : {Expected{true, 1, 1, 1, 1, 1},
                            {true, kMi, 132, 132, 32, 16},
                            {true, 132 * kLane, 132, 132, 32, 32},
                            {true, 132 * kLane + 1, 133, 133, 32, 1},
                            {true, 4 * kMi, 396, 396, 48, 32},
                            {true, 8 * kMi, 396, 396, 96, 80},
                            {true, 32 * kMi, 396, 396, 336, 320},
                            {true, kFull, 396, 396, 352, 352},
                            {true, kFull + 1, 396, 792, 192, 161},
                            {true, 512 * kMi, 396, 6336, 336, 320},
                            {false, 1, 1, 1, 1, 1},
                            {false, kMi, 132, 132, 32, 16},
                            {false, 132 * kPlainLane, 132, 132, 64, 64},
                            {false, 132 * kPlainLane + 1, 133, 133, 64, 33},
                            {false, 4 * kMi, 256, 256, 64, 64},
                            {false, 32 * kMi, 396, 792, 176, 160},
                            {false, 128 * kMi, 396, 2376, 224, 208},
                            {false, 6 * kPlainTile, 396, 2376, 144, 144},
                            {false, 6 * kPlainTile - 256, 396, 1980, 176, 159},
                            {false, 512 * kMi, 396, 6336, 336, 320}}) {
    const Plan plan = plan_of(2, 128, 4, e.numel, e.feedback);
    const WalkLimits limits = limits_of(plan, 132, 3, kPeerDeviceSlotBytes);
    const Walk walk = plan_walk(plan, limits);
    const std::vector<int64_t> tiles = tiles_of(plan, limits, walk.cut);
    CHECK_EQ(walk.lanes, e.lanes);
    CHECK_EQ(walk.cut.tiles, e.tiles);
    CHECK_EQ(tiles.front(), e.first);
    CHECK_EQ(tiles.back(), e.last);
    check_walk(plan, limits);
  }
}

}  // namespace
