// What a rank has just done in a group or a call, where a test may watch it, hold it up or end it.
#pragma once

#include <cstdint>
#include <functional>

namespace echo {

enum class Step : uint8_t {
  kCreated,     // its slab is made, no peer has mapped it
  kMapped,      // it has mapped all slabs, and has yet to tell the others
  kBegun,       // it entered a call
  kPushed,      // a tile's codes are handed to all peers; with residual "local" its state is up to date
  kReduced,     // a tile of its own segment is reduced, no peer has it yet
  kGatherSeen,  // a peer's reduced tile has come; over peer memory its own is decoded already
  kUpdated,     // a tile of all owners is decoded; with residual "group" its state is up to date. Over peer
                // memory of devices: what updates the state after the call is enqueued
  kLaunched,    // over peer memory of devices: the kernel of a call is enqueued, and may wait for peers
  kEnded,       // its part of a call is complete
  kClosing,     // it is about to let go of the exchange
};

struct Moment {
  Step step = Step::kCreated;
  uint64_t call_number = 0;
  int32_t lane = 0;
  int64_t tile = 0;  // number within the segment
};

// Called on the thread that does the step, lanes at a time. What it throws ends the call as any failure does.
using Observer = std::function<void(const Moment&)>;

}  // namespace echo
