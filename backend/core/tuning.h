// Numbers that trade speed against memory, each with its ground; "unmeasured" means that no alternative was timed.
#pragma once

#include <cstdint>

#include "tile.h"

namespace echo {

// How far push runs ahead of reduce, and reduce of tail, in tiles; rings of so many slots are then never overwritten
// early (protocol.h): in general, of pushes on CUDA, and of what a rank gathers from itself.
constexpr int kLookAhead = 1;
constexpr int kRingSlots = 2 * kLookAhead + 1;
constexpr int kDevicePushSlots = 2 * kLookAhead;
constexpr int kOwnSlots = kLookAhead + 1;

// Elements of one segment that travel in one tile of the wire composition. Unmeasured on CPU (512 KiB of bf16 per step
// of the pipeline); on CUDA as large as the ring allows in 64 MiB at P = 2, since each tile costs two NCCL calls.
constexpr int64_t kWireTileElemsCpu = 1 << 18;
constexpr int64_t kWireTileElemsCuda = 1 << 22;

// Peer memory on CPU: bytes of a ring slot (a tile), lanes at most (unmeasured), and the workspace below which a group
// does without. Slots: 64 MiB of bf16, two ranks on two Zen 4 cores with 1 MiB of second-level cache each, 40 calls at
// least twice, at 4 bits with and without local feedback. 32, 64 and 128 KiB differed by no more than repeated runs of
// one size; 16 KiB was 8 to 15 % slower than 64 KiB, 256 KiB slower still.
constexpr int64_t kPeerSlotBytes = 64 << 10;
constexpr int32_t kPeerMaxLanes = 4;
constexpr int64_t kPeerMinWorkspaceBytes = 4 << 20;

// Peer memory on CUDA: bytes of a ring slot at most, 352 groups of 128 elements in 4 bits, which two ranks on 132
// multiprocessors get from 64 MiB, and below how many a group does with fewer lanes (unmeasured). Two H200s, 1 GiB of
// bf16, tiles of 256 / 288 / 336 groups: one int8 average 1.21 / 1.20 / 1.19 ms, the same with rotation 1.62 / 1.60 /
// 1.57 ms, without feedback 0.933 / 0.927 / 0.929 ms (ci/baseline/tiles_h200x2.json, medians of 20 calls after 5, as
// all of the following).
constexpr int64_t kPeerDeviceSlotBytes = 23936;
constexpr int64_t kPeerDeviceSmallSlotBytes = 2048;

// Elements of a segment that a multiprocessor has for each lane before it gets one more, with state and without: a lane
// less is less to open and to close. Against all lanes: 20.1 us and 21.9 at 2 MiB, 22.7 and 23.7 at 4, 27.6 and 27.8 at
// 8 (without feedback), 25.0 and 26.0 at 2 MiB (as shipped); there 8192 for each lane took 30.1 us at 4 MiB and 4096
// 28.5.
constexpr int64_t kDeviceLaneElems = 4096;
constexpr int64_t kDevicePlainLaneElems = 8192;

// Tiles a lane is to have at least where there is no state, as far as they have so many elements. Without feedback,
// tiles a lane and us: at 256 MiB 4 278, 5 270, 6 268, 7 267; at 128 MiB 2 161, 3 156, 4 153, 5 153; at 64 MiB 1 89.2,
// 2 90.0, 3 88.8, 4 90.8. With a state fewest is best (as shipped at 256 MiB: 4 409, 5 419, 6 428).
constexpr int64_t kDevicePlainTiles = 6;
constexpr int64_t kDevicePlainTileElems = 18432;

// Bytes of a tensor from which on a call with residual "group" leaves the update of its state to a kernel and a stream
// of their own: from there on call and update together take the device no longer than the call that updates (two H200s,
// int8 state, rotation, us: 84 against 60 and 26 at 16 MiB, 42 against 39 and 11 at 4 MiB), and the second launch with
// its events costs the host something.
constexpr int64_t kDeferredUpdateBytes = 16 << 20;

// Shared memory of a multiprocessor that the lanes there may fill: what compute capability 8.0 has, the least among
// GPUs that NVLink joins in servers.
constexpr int64_t kPeerDeviceSharedBytes = 164 << 10;

// Bytes of the buffers that one tile of `tile_groups` groups needs on a rank: sent, received and gathered from
// everyone, reduced once.
inline int64_t wire_slot_bytes(const Plan& plan, int64_t tile_groups) {
  return (3 * plan.world_size + 1) * tile_bytes(plan.codec, tile_groups);
}

// Groups per tile: the tuned size, fewer if the ring would not fit the workspace or the segment is smaller; at least
// one.
inline int64_t wire_tile_groups(const Plan& plan, int64_t tile_elems, int64_t workspace_bytes) {
  int64_t groups = min_i64(segment_groups(plan), ceil_div(tile_elems, plan.codec.group_elems));
  while (groups > 1 && kRingSlots * wire_slot_bytes(plan, groups) > workspace_bytes) groups = ceil_div(groups, 2);
  return groups;
}

}  // namespace echo
