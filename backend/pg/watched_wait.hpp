// Waits for CPU collectives of inner backends that signals end, or that end soon after a process of the group has.
//
// Gloo learns of the latter by a closed connection alone, and not always: a message of which a part has arrived waits
// for the rest until its time-out, and a child that the process had forked (a DataLoader's worker) keeps its
// connections open.
#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "processes.hpp"

namespace echo::pg {

// Waits as the work does, with its result and what it throws, and throws what a signal handler raises meanwhile. Not
// for works that wait() alone drives, messages among them.
bool wait_with_signals(c10d::Work& work, std::chrono::milliseconds timeout = kNoTimeout);

// Returns "the process of rank 1 has exited" if that ended the wait: the work then goes on until its own time-out, and
// owns its tensors. Empty if the work is complete. Throws what the work throws, "Operation timed out!" as it does after
// `timeout`, and what a signal handler raises meanwhile.
std::string wait_while_all_live(c10d::Work& work, const Processes& processes,
                                std::chrono::milliseconds timeout = kNoTimeout);

}  // namespace echo::pg
