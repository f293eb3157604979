// Tensors with more elements than 32 bits count: every offset, at sizes whose memory no test can have.
#include "../../backend/core/protocol.h"
#include "check.h"

namespace {

using namespace echo;

Plan plan_of(int64_t numel, int32_t world_size, int32_t group_elems) {
  Plan plan;
  plan.numel = numel;
  plan.world_size = world_size;
  plan.codec.group_elems = group_elems;
  plan.feedback = make_feedback(Residual::kLocal, StateDType::kFloat32, 0.75, 0.35, 0.7, 0.3);
  return plan;
}

// The tiles of all owners follow each other without a gap or an overlap, and end with the tensor.
void check_tiling(const Plan& plan, int64_t tile_groups) {
  const int64_t segment = segment_groups(plan);
  const int64_t tiles = ceil_div(segment, tile_groups);
  int64_t groups = 0;
  for (int32_t owner = 0; owner < plan.world_size; ++owner) {
    const int64_t first = tile_range(plan, owner, 0, tile_groups).begin;
    const int64_t last = tile_range(plan, owner, tiles - 1, tile_groups).end;
    CHECK_EQ(first, min_i64(group_count(plan), owner * segment));
    for (const int64_t tile : {int64_t{0}, tiles / 2, tiles - 1}) {
      const GroupRange range = tile_range(plan, owner, tile, tile_groups);
      CHECK(range.begin <= range.end && range.end - range.begin <= tile_groups);
      if (tile + 1 < tiles) CHECK_EQ(range.end, tile_range(plan, owner, tile + 1, tile_groups).begin);
    }
    groups += last - first;
  }
  CHECK_EQ(groups, group_count(plan));
  const int64_t in_last = group_elems_at(plan, group_count(plan) - 1);
  CHECK_EQ((group_count(plan) - 1) * plan.codec.group_elems + in_last, plan.numel);
}

ECHO_TEST(offsets_of_tensors_beyond_32_bits) {
  constexpr int64_t k4Gi = int64_t{1} << 32;
  for (const int64_t numel : {k4Gi - 1, k4Gi, k4Gi + 12345, (int64_t{1} << 40) + 7}) {
    for (const int32_t world_size : {2, 3, 64}) {
      for (const int32_t group_elems : {16, 128, 1024}) {
        const Plan plan = plan_of(numel, world_size, group_elems);
        const SlabShape shape{world_size, 4, kPeerSlotBytes};
        check_tiling(plan, peer_tile_groups(plan, shape));
        check_tiling(plan, wire_tile_groups(plan, kWireTileElemsCpu, 64 << 20));
        check_tiling(plan, wire_tile_groups(plan, kWireTileElemsCuda, 64 << 20));
        // Two averages of four bytes per element.
        CHECK(state_bytes(plan) >= 8 * numel && state_bytes(plan) <= 8 * numel + 2 * kTileAlignBytes);
        const double ideal =
            2.0 * (world_size - 1) / world_size * static_cast<double>(numel) * (0.5 + 4.0 / group_elems);
        const int64_t sent = sent_tile_bytes(plan, equal_tiles(plan, peer_tile_groups(plan, shape)));
        // Padding: at most a group per peer, and 15 bytes of alignment in each tile.
        CHECK(static_cast<double>(sent) >= ideal * (1 - 1e-12) && static_cast<double>(sent) <= ideal * 1.01);
        CHECK(static_cast<double>(ideal_wire_bytes(plan)) >= ideal * (1 - 1e-12));
      }
    }
  }
}

}  // namespace
