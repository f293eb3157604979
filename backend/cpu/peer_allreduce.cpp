// Phases, as in every composition: agree, then per tile push, reduce, gather, tail, with tiles in different phases at a
// time: step t of a lane is push(t), reduce(t-d) with its gather, tail(t-2d).
#include "peer_allreduce.h"

#include <cstring>

#include "../core/fault_text.h"
#include "../core/reduce.h"

namespace echo::cpu {
namespace {

void fill_with_nan(const Site& site) {
  const DType dtype = site.plan.dtype;
  const int64_t bytes = dtype_bytes(dtype);
  const uint32_t pattern = dtype == DType::kFloat32    ? kNanBits32
                           : dtype == DType::kBFloat16 ? kNanBitsBFloat16
                                                       : kNanBitsFloat16;
  for (int64_t i = 0; i < site.plan.numel; ++i) {
    std::memcpy(static_cast<std::byte*>(site.tensor) + i * bytes, &pattern, bytes);
  }
}

}  // namespace

PeerGroup::PeerGroup(SlabShape shape, int32_t rank, std::vector<std::byte*> slabs, const Stages& stages)
    : slabs_(std::move(slabs)), view_{shape, rank, slabs_.data()}, sequences_(shape.lanes, 0), stages_(stages) {}

int64_t PeerGroup::wire_bytes(const Plan& plan) const {
  return sent_call_bytes(plan, equal_tiles(plan, peer_tile_groups(plan, view_.shape)));
}

// Everyone's record to everyone; waited for only where its max|x| is needed. Ranks that disagree on the call fault at
// the first ticket.
bool PeerGroup::agree(PeerCall& call, Clock::time_point deadline) {
  const int32_t rank = view_.rank;
  const auto parity = static_cast<int32_t>(call.call_number % kCallParities);
  CallRecord record = make_call_record(call.site.plan, call.direction, call.call_number, call.exact_calls, call.shape);
  if (call.rescale) record.max_magnitude = stages_.max_magnitude(call.site, GroupRange{0, group_count(call.site.plan)});
  const uint64_t ticket = ticket_of(static_cast<uint32_t>(call.call_number), 0);
  for (int32_t peer = 0; peer < view_.shape.world_size; ++peer) {
    std::memcpy(slabs_[peer] + record_offset(view_.shape, rank, parity), &record, sizeof(record));
    word_at(slabs_[peer], record_ticket_offset(rank, parity)).store(ticket, std::memory_order_release);  // P2
  }
  if (!call.rescale) return true;

  uint32_t largest = 0;
  for (int32_t peer = 0; peer < view_.shape.world_size; ++peer) {
    const WaitSite site{.peer = peer,
                        .lane = 0,
                        .stage = Stage::kPush,
                        .source_stride = record_ticket_offset(1, parity) - record_ticket_offset(0, parity)};
    if (!wait_for_ticket(view_, record_ticket_offset(peer, parity), ticket, site, call.limits, deadline)) return false;
    CallRecord theirs;
    std::memcpy(&theirs, slabs_[rank] + record_offset(view_.shape, peer, parity), sizeof(theirs));
    largest = largest < theirs.max_magnitude ? theirs.max_magnitude : largest;
  }
  call.site.rescale_log2 = rescale_exponent(largest);
  return true;
}

bool PeerGroup::all_reduce(const PeerCall& given,
                           const std::function<void(const std::function<void(int32_t)>&)>& run_lanes,
                           const Observer& observer) {
  PeerCall call = given;
  const Clock::time_point deadline = Clock::now() + call.limits.timeout;
  std::atomic<bool> complete{false};
  try {
    if (observer) observer({.step = Step::kBegun, .call_number = call.call_number});
    complete = fault().kind == FaultKind::kNone && agree(call, deadline);
    if (complete) {
      run_lanes([&](int32_t lane) {
        try {
          if (!run_lane(call, lane, deadline, observer)) complete = false;
        } catch (...) {
          abort();  // other lanes, here and on the peers, wait for this one
          throw;
        }
      });
    }
  } catch (...) {
    fill_with_nan(call.site);
    throw;
  }
  // A peer may have faulted where this rank had nothing to wait for: its result is then complete, and the next call
  // reports.
  if (!complete) fill_with_nan(call.site);
  if (observer && complete) observer({.step = Step::kEnded, .call_number = call.call_number});
  return complete;
}

// One lane's walk over its tiles: lane, lane + L, lane + 2L, ...; the same number on all ranks, empty tiles included.
bool PeerGroup::run_lane(const PeerCall& call, int32_t lane, Clock::time_point deadline, const Observer& observer) {
  const Site& site = call.site;
  const Plan& plan = site.plan;
  const SlabShape& shape = view_.shape;
  const int32_t rank = view_.rank;
  const int64_t tile_groups = peer_tile_groups(plan, shape);
  const int64_t tiles = ceil_div(segment_groups(plan), tile_groups);
  const int64_t mine = tiles > lane ? ceil_div(tiles - lane, shape.lanes) : 0;
  const uint64_t first = sequences_[lane];
  const auto parity = static_cast<int32_t>(call.call_number % kCallParities);
  CallRecord record;
  std::memcpy(&record, slabs_[rank] + record_offset(shape, rank, parity), sizeof(record));
  const uint32_t hash = ticket_hash(record);
  std::vector<const std::byte*> peer_tiles(shape.world_size);

  const auto tile_of = [&](int64_t i) { return lane + i * shape.lanes; };
  const auto room = [&](int64_t i) { return min_i64(tile_groups, segment_groups(plan) - tile_of(i) * tile_groups); };
  const auto range = [&](int32_t owner, int64_t i) { return tile_range(plan, owner, tile_of(i), tile_groups); };
  const auto slot = [&](int64_t i) { return static_cast<int32_t>((first + static_cast<uint64_t>(i)) % kRingSlots); };
  const auto ticket = [&](int64_t i) {
    return ticket_of(static_cast<uint32_t>(first + static_cast<uint64_t>(i)), hash);
  };
  const auto peer_at = [&](int32_t step) { return (rank + step) % shape.world_size; };
  const auto observe = [&](Step step, int64_t i) {
    if (observer) observer({.step = step, .call_number = call.call_number, .lane = lane, .tile = tile_of(i)});
  };
  const auto hand_over = [&](Stage stage, int32_t peer, int64_t i) {
    word_at(slabs_[peer], flag_offset(shape, lane, stage, rank, slot(i)))
        .store(ticket(i), std::memory_order_release);  // P1
  };
  const auto arrived = [&](Stage stage, int32_t source, int64_t i) {
    const int64_t offset = flag_offset(shape, lane, stage, source, slot(i));
    const int64_t stride = flag_offset(shape, lane, stage, 1, 0) - flag_offset(shape, lane, stage, 0, 0);
    return wait_for_ticket(view_, offset, ticket(i), WaitSite{source, lane, stage, stride}, call.limits, deadline);
  };

  const int64_t ahead = call.look_ahead;
  for (int64_t step = 0; step < mine + 2 * ahead; ++step) {
    if (const int64_t i = step; i < mine) {  // push
      for (int32_t turn = 1; turn < shape.world_size; ++turn) {
        const int32_t peer = peer_at(turn);
        stages_.push(site, range(peer, i), room(i),
                     slabs_[peer] + slot_offset(shape, peer, lane, Stage::kPush, rank, slot(i)));
        hand_over(Stage::kPush, peer, i);
      }
      observe(Step::kPushed, i);
    }
    if (const int64_t i = step - ahead; i >= 0 && i < mine) {  // reduce, gather
      for (int32_t turn = 1; turn < shape.world_size; ++turn) {
        const int32_t source = peer_at(turn);
        if (!arrived(Stage::kPush, source, i)) return false;
        peer_tiles[source] = slabs_[rank] + slot_offset(shape, rank, lane, Stage::kPush, source, slot(i));
      }
      std::byte* reduced = slabs_[rank] + own_slot_offset(shape, lane, i);
      stages_.reduce(site, range(rank, i), room(i), peer_tiles.data(), reduced);
      observe(Step::kReduced, i);
      for (int32_t turn = 1; turn < shape.world_size; ++turn) {
        const int32_t peer = peer_at(turn);
        std::memcpy(slabs_[peer] + slot_offset(shape, peer, lane, Stage::kGather, rank, slot(i)), reduced,
                    tile_bytes(plan.codec, room(i)));
        hand_over(Stage::kGather, peer, i);
      }
    }
    if (const int64_t i = step - 2 * ahead; i >= 0) {  // tail
      for (int32_t turn = 0; turn < shape.world_size; ++turn) {
        const int32_t owner = peer_at(turn);
        if (owner != rank) {
          if (!arrived(Stage::kGather, owner, i)) return false;
          observe(Step::kGatherSeen, i);
        }
        const int64_t gathered = owner == rank ? own_slot_offset(shape, lane, i)
                                               : slot_offset(shape, rank, lane, Stage::kGather, owner, slot(i));
        stages_.tail(site, range(owner, i), room(i), slabs_[rank] + gathered);
      }
      observe(Step::kUpdated, i);
    }
  }
  sequences_[lane] = first + static_cast<uint64_t>(mine);
  return true;
}

void PeerGroup::abort() { raise_fault(view_, FaultRecord{.kind = FaultKind::kAborted, .rank = view_.rank}); }

// Of the two that a source may have left here; magic 0 if it never came.
CallRecord PeerGroup::latest_record(int32_t source) const {
  CallRecord latest;
  latest.magic = 0;
  for (int32_t parity = 0; parity < kCallParities; ++parity) {
    CallRecord record;
    std::memcpy(&record, slabs_[view_.rank] + record_offset(view_.shape, source, parity), sizeof(record));
    const bool later = latest.magic == 0 || record.call_number > latest.call_number;
    if (record.magic != 0 && later) latest = record;
  }
  return latest;
}

std::string PeerGroup::describe_fault(const PeerCall& call) const {
  FaultRecord record = fault();
  record.timeout_ms = static_cast<uint32_t>(call.limits.timeout.count());
  FaultWitness witness{
      .rank = view_.rank,
      .mine = make_call_record(call.site.plan, call.direction, call.call_number, call.exact_calls, call.shape),
      .theirs = {}};
  const int32_t other = record.rank == view_.rank ? record.peer : record.rank;
  if (other >= 0) witness.theirs = latest_record(other);
  return echo::describe_fault(record, witness);
}

}  // namespace echo::cpu
