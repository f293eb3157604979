// All counters of the peer-memory protocol and where they lie: one slab per rank, written by its peers, read by its
// owner.
//
// clang-format off
//   word                             writer       reader      meaning                                   order
//   flag[lane][stage][source][slot]  source rank  slab owner  ticket of the tile in that slot           P1
//   record_ticket[source][parity]    source rank  slab owner  call number + 1 of the record beside it   P2
//   fault                            anyone       slab owner  not 0: the group has failed; see records  P3
// clang-format on
//
// Each is stored with release and loaded with acquire, under the name in the last column; at rest a flag keeps its last
// ticket and a record ticket its last call, and a fault word that is set is never cleared.
//
// A ticket is 64 bits: low half the lane's tile sequence plus one, high half a hash of the call. The sequence counts a
// lane's tiles over the life of the group and is never cleared; its low half in the ticket wraps, the slot comes from
// all 64 bits, since 2^32 is no multiple of the ring's slots; expected tickets are computed where they are waited for,
// nothing comes from a caller, so that a captured call can be replayed. Each slot has its own ticket: a producer may
// run ahead into the next call, and a counter shared by the slots would then show the hash of that call to a consumer
// that still waits in this one.
//
// Why no credits are needed with D = 2d+1 slots: before push(i) a lane has seen gather(i-1-2d) of every peer, which
// each peer sent after it had read push(i-1-2d) of this rank; and a peer gathers tile k into this slab only after it
// has acquired this rank's push(k), which follows this rank's tail(k-1-2d). So slot k % D is free in both rings when it
// is written.
//
// Pushes need only 2d slots where a lane waits for push(i-d), which it reduces at the same step, before it pushes tile
// i, and releases its own push(i-d) after it has reduced tile i-2d: whoever has acquired push(i-d) of a peer then knows
// that the peer has read push(i-2d). The CUDA kernel's lanes do (peer_kernel.cuh), those on CPU push first.
//
// What a rank gathers from itself needs d+1 slots and no tickets: one lane writes and reads it, and has stored tile
// i-2d before it encodes tile i+1-d, so that from i+1-2d to i+1-d so many are alive. A call leaves none for the next.
//
// At the start of a call no slot holds what someone has yet to read: a lane that has ended a call has stored all its
// tiles, and has seen the last gather of every peer, which had read all its pushes by then.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tile.h"
#include "tuning.h"

namespace echo {

enum class Stage : uint8_t { kPush, kGather };
constexpr int kStages = 2;
constexpr int64_t kCacheLineBytes = 64;
constexpr int kCallParities = 2;  // a rank is at most one call ahead of any peer
constexpr int32_t kMaxPeerRanks = 64;

// Equal on all ranks of a group, fixed when the slabs are made.
struct SlabShape {
  int32_t world_size = 1;
  int32_t lanes = 1;
  int64_t slot_bytes = 0;           // multiple of kTileAlignBytes
  int32_t push_slots = kRingSlots;  // of a ring of pushes
};

ECHO_HD uint64_t ticket_of(uint32_t sequence, uint32_t call_hash) {
  return (static_cast<uint64_t>(call_hash) << 32) | static_cast<uint32_t>(sequence + 1u);
}

enum class TicketState : uint8_t { kNotYet, kHere, kForeign };

// A slot's ticket moves from `expected` less its ring's slots to `expected`; anything else means that the ranks are not
// in the same call.
ECHO_HD TicketState compare_ticket(uint64_t seen, uint64_t expected) {
  if (seen == expected) return TicketState::kHere;
  const auto distance = static_cast<int32_t>(static_cast<uint32_t>(seen) - static_cast<uint32_t>(expected));
  return distance < 0 ? TicketState::kNotYet : TicketState::kForeign;
}

// Offsets in a slab: fault word, fault records by author, record tickets, records, flags, then the slots of both rings.
constexpr int64_t kRecordBytes = 64;
ECHO_HD int64_t fault_offset() { return 0; }
ECHO_HD int64_t fault_record_offset(int32_t author) { return (1 + author) * kCacheLineBytes; }
ECHO_HD int64_t record_ticket_offset(int32_t source, int32_t parity) {
  return fault_record_offset(kMaxPeerRanks) + (source * kCallParities + parity) * kCacheLineBytes;
}
ECHO_HD int64_t record_offset(const SlabShape& shape, int32_t source, int32_t parity) {
  return record_ticket_offset(shape.world_size, 0) + (source * kCallParities + parity) * kRecordBytes;
}
ECHO_HD int64_t flag_offset(const SlabShape& shape, int32_t lane, Stage stage, int32_t source, int32_t slot) {
  const int64_t index =
      ((static_cast<int64_t>(lane) * kStages + static_cast<int64_t>(stage)) * shape.world_size + source) * kRingSlots +
      slot;
  return record_offset(shape, shape.world_size, 0) + index * kCacheLineBytes;
}
// Slots of a lane: rings of what its peers push, in rank order, rings of what they gather here, and those of what the
// owner gathers from itself.
ECHO_HD int32_t slots_of_lane(const SlabShape& shape) {
  return (shape.world_size - 1) * (shape.push_slots + kRingSlots) + kOwnSlots;
}
ECHO_HD int64_t slots_offset(const SlabShape& shape, int32_t lane, int32_t slot) {
  const int64_t index = static_cast<int64_t>(lane) * slots_of_lane(shape) + slot;
  return flag_offset(shape, shape.lanes, Stage::kPush, 0, 0) + index * shape.slot_bytes;
}
// Of those of a lane in the slab of `owner`: what another rank sends, and tile i of a call as a rank gathers it itself.
ECHO_HD int32_t slot_in_lane(const SlabShape& shape, int32_t owner, Stage stage, int32_t source, int32_t slot) {
  const int32_t ring = source < owner ? source : source - 1;
  if (stage == Stage::kPush) return ring * shape.push_slots + slot;
  return (shape.world_size - 1) * shape.push_slots + ring * kRingSlots + slot;
}
ECHO_HD int32_t own_slot_in_lane(const SlabShape& shape, int64_t i) {
  return slots_of_lane(shape) - kOwnSlots + static_cast<int32_t>(i % kOwnSlots);
}
ECHO_HD int64_t slot_offset(const SlabShape& shape, int32_t owner, int32_t lane, Stage stage, int32_t source,
                            int32_t slot) {
  return slots_offset(shape, lane, slot_in_lane(shape, owner, stage, source, slot));
}
ECHO_HD int64_t own_slot_offset(const SlabShape& shape, int32_t lane, int64_t i) {
  return slots_offset(shape, lane, own_slot_in_lane(shape, i));
}
ECHO_HD int64_t slab_bytes(const SlabShape& shape) { return slots_offset(shape, shape.lanes, 0); }

// The largest slots whose slab fits the workspace; 0 if not even one group of the largest kind does.
inline int64_t slot_bytes_for(int64_t workspace_bytes, SlabShape shape, int64_t most) {
  shape.slot_bytes = 0;
  const int64_t slots = static_cast<int64_t>(shape.lanes) * slots_of_lane(shape);
  const int64_t room = (workspace_bytes - slab_bytes(shape)) / slots / kTileAlignBytes * kTileAlignBytes;
  const int64_t bytes = min_i64(room, most);
  return bytes < kMaxGroupElems + 2 * kTileAlignBytes ? 0 : bytes;
}

// The next smaller slots for a host without room for these: half the slab; 0 below the floor.
inline int64_t smaller_slot_bytes(const SlabShape& shape) {
  const int64_t workspace_bytes = slab_bytes(shape) / 2;
  if (workspace_bytes < kPeerMinWorkspaceBytes) return 0;
  return slot_bytes_for(workspace_bytes, shape, shape.slot_bytes);
}

inline int64_t groups_that_fit_slot(const Codec& codec, const SlabShape& shape) {
  return shape.slot_bytes / (code_bytes(codec) + param_bytes(codec));
}

// Groups per tile such that a tile fits a slot and every lane gets work from a small segment.
inline int64_t peer_tile_groups(const Plan& plan, const SlabShape& shape) {
  return min_i64(groups_that_fit_slot(plan.codec, shape), ceil_div(segment_groups(plan), shape.lanes));
}

// A slab of every rank as mapped here; own first among equals: slabs[rank] is this rank's.
struct PeerView {
  SlabShape shape;
  int32_t rank = 0;
  std::byte* const* slabs = nullptr;
};

// kOverlap: a call of this rank began before the one before it had ended.
enum class FaultKind : uint32_t { kNone, kTimeout, kForeignTicket, kPeerExited, kAborted, kOverlap };

// What stopped a group: who waited for whom, where, and what it saw. Written once, never cleared.
struct FaultRecord {
  FaultKind kind = FaultKind::kNone;
  int32_t rank = -1;
  int32_t peer = -1;
  int32_t lane = -1;
  int32_t stage = -1;
  uint32_t timeout_ms = 0;  // of the call that waited
  uint64_t expected = 0;
  uint64_t seen = 0;
};
static_assert(sizeof(FaultRecord) <= kCacheLineBytes);

}  // namespace echo
