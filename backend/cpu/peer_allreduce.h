// The composition over peer memory: ranks of one host write codes straight into each other's slabs.
//
// No torch: ranks may be processes that map each other's shared memory, or threads of a test that hand each other plain
// buffers.
#pragma once

#include <functional>
#include <vector>

#include "../core/call_record.h"
#include "../core/moment.h"
#include "../core/tuning.h"
#include "peer_wait.h"
#include "stages.h"

namespace echo::cpu {

struct PeerCall {
  Site site;
  Direction direction = Direction::kForward;
  bool rescale = false;
  uint64_t call_number = 0;
  uint64_t exact_calls = 0;
  CallShape shape;
  WaitLimits limits;
  // Tiles that push runs ahead, from 0 to kLookAhead: less than the ring has room for is safe, and only slower.
  int32_t look_ahead = kLookAhead;
};

// One rank's end of the protocol. Calls are collective and serial; a lane's sequence lives as long as the group.
class PeerGroup {
 public:
  // `slabs` are mapped, zeroed before any rank uses them, and outlive this object; slabs[rank] is this rank's.
  PeerGroup(SlabShape shape, int32_t rank, std::vector<std::byte*> slabs, const Stages& stages = active_stages());

  const SlabShape& shape() const { return view_.shape; }

  // Where all lanes begin to count, before the first call and alike on all ranks: for tests, which start near the end
  // of what a ticket can hold. Flags must then hold the tickets before it.
  void count_from(uint64_t sequence) { sequences_.assign(sequences_.size(), sequence); }

  // Runs this rank's part of a call on `lanes` threads given by `run_lanes(body)`, which must call body(lane) once for
  // each lane of the shape, in parallel or one after another where lanes is 1, and return when all have returned. False
  // after a fault: the tensor is then filled with NaN and every later call fails at once.
  // What the observer or `run_lanes` throws is thrown on, after NaN as well; the group is then of no more use.
  bool all_reduce(const PeerCall& call, const std::function<void(const std::function<void(int32_t)>&)>& run_lanes,
                  const Observer& observer = {});

  FaultRecord fault() const { return read_fault(view_); }
  // "rank 1 waited 3.0 s in push, lane 0, for rank 0 ..."
  std::string describe_fault(const PeerCall& call) const;
  void abort();

  // Bytes that one call puts into peers' slabs.
  int64_t wire_bytes(const Plan& plan) const;

 private:
  bool agree(PeerCall& call, Clock::time_point deadline);
  CallRecord latest_record(int32_t source) const;
  bool run_lane(const PeerCall& call, int32_t lane, Clock::time_point deadline, const Observer& observer);

  std::vector<std::byte*> slabs_;
  PeerView view_;
  std::vector<uint64_t> sequences_;  // per lane: tiles finished so far; the next tile's number
  const Stages& stages_;
};

}  // namespace echo::cpu
