// Bounded waiting for a ticket, and the fault word that ends all waiting of a group.
//
// A waiter spins briefly, then yields, then sleeps for short times, so that eight ranks make progress on two cores;
// from the yielding phase on it also looks for an abort, for an exited peer and at the clock. Nobody is woken: with
// eight ranks on two shared x86-64 cores, calls of 1 MiB and 64 MiB took 1.6 to 2.1 times their bare work (medians of
// three runs), so that futexes have little to win there.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>

#include "../core/protocol.h"

namespace echo::cpu {

using Clock = std::chrono::steady_clock;

inline std::atomic_ref<uint64_t> word_at(std::byte* slab, int64_t offset) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(slab + offset));
}

// Where and for whom a lane waits; goes into the fault record as it is.
struct WaitSite {
  int32_t peer = -1;
  int32_t lane = 0;
  Stage stage = Stage::kPush;
  int64_t source_stride = 0;  // bytes from a source's word to the same word of the next source
};

// Turns of spinning before a waiter yields. Where ranks exceed the cores, every turn keeps the rank that is waited for
// off its core: eight ranks on two cores took 0.6 ms for 64 KiB without and 1.0 ms with, equal from 1 MiB on (x86-64,
// medians of six runs).
constexpr int32_t kSpins = 2000;

struct WaitLimits {
  std::chrono::milliseconds timeout{1800000};
  int32_t spins = kSpins;
  // True if the peer's process no longer exists; asked a few times a second.
  std::function<bool(int32_t peer)> has_exited;
};

// Writes the first fault of this group to every rank's slab (P3); later ones are dropped.
void raise_fault(const PeerView& view, const FaultRecord& record);

// The fault that this rank's slab holds, kind kNone if there is none.
FaultRecord read_fault(const PeerView& view);

// Until the word at `offset` of this rank's slab is `expected` (acquire P1, P2). False after a fault, own or foreign.
bool wait_for_ticket(const PeerView& view, int64_t offset, uint64_t expected, WaitSite site, const WaitLimits& limits,
                     Clock::time_point deadline);

}  // namespace echo::cpu
