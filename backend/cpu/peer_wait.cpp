#include "peer_wait.h"

#include <cstring>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace echo::cpu {
namespace {

constexpr int kYields = 200;
constexpr auto kNap = std::chrono::microseconds(50);
constexpr auto kWritingPatience = std::chrono::milliseconds(500);
constexpr auto kExitCheckPeriod = std::chrono::milliseconds(200);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  __asm__ volatile("yield");
#endif
}

enum FaultState : uint64_t { kNoFault = 0, kWriting = 1, kWritten = 2 };

// A peer that ended without the ticket that every source owes this rank here; -1 if there is none. All sources are
// looked at: the one waited for may live and be late for long.
int32_t find_exited(const PeerView& view, int64_t offset, uint64_t expected, WaitSite site, const WaitLimits& limits) {
  if (!limits.has_exited) return -1;
  for (int32_t peer = 0; peer < view.shape.world_size; ++peer) {
    if (peer == view.rank || !limits.has_exited(peer)) continue;
    // Read after the exit was seen: a peer that left right after its last store has delivered.
    const auto word = word_at(view.slabs[view.rank], offset + (peer - site.peer) * site.source_stride);
    if (compare_ticket(word.load(std::memory_order_acquire), expected) == TicketState::kNotYet) return peer;
  }
  return -1;
}

}  // namespace

void raise_fault(const PeerView& view, const FaultRecord& record) {
  for (int32_t rank = 0; rank < view.shape.world_size; ++rank) {
    std::byte* slab = view.slabs[rank];
    uint64_t none = kNoFault;
    if (!word_at(slab, fault_offset()).compare_exchange_strong(none, kWriting, std::memory_order_acq_rel)) continue;
    std::memcpy(slab + fault_record_offset(0), &record, sizeof(record));
    word_at(slab, fault_offset()).store(kWritten, std::memory_order_release);
  }
}

FaultRecord read_fault(const PeerView& view) {
  std::byte* slab = view.slabs[view.rank];
  const auto word = word_at(slab, fault_offset());
  uint64_t state = word.load(std::memory_order_acquire);
  for (auto waited = kNap * 0; state == kWriting && waited < kWritingPatience; waited += kNap) {
    std::this_thread::sleep_for(kNap);  // its author may just have lost its core
    state = word.load(std::memory_order_acquire);
  }
  FaultRecord record;
  if (state == kWritten) std::memcpy(&record, slab + fault_record_offset(0), sizeof(record));
  if (state == kWriting) record.kind = FaultKind::kAborted;  // its author died while writing it
  return record;
}

bool wait_for_ticket(const PeerView& view, int64_t offset, uint64_t expected, WaitSite site, const WaitLimits& limits,
                     Clock::time_point deadline) {
  std::byte* slab = view.slabs[view.rank];
  const auto word = word_at(slab, offset);
  const auto fault_word = word_at(slab, fault_offset());
  auto next_exit_check = Clock::time_point{};
  for (int64_t turn = 0;; ++turn) {
    const uint64_t seen = word.load(std::memory_order_acquire);
    const TicketState state = compare_ticket(seen, expected);
    if (state == TicketState::kHere) return true;
    FaultKind kind = state == TicketState::kForeign ? FaultKind::kForeignTicket : FaultKind::kNone;
    if (turn < limits.spins && kind == FaultKind::kNone) {
      relax();
      continue;
    }
    if (fault_word.load(std::memory_order_acquire) != kNoFault) return false;
    if (kind == FaultKind::kNone) {
      const auto now = Clock::now();
      if (now >= deadline) kind = FaultKind::kTimeout;
      if (now >= next_exit_check) {
        const int32_t exited = find_exited(view, offset, expected, site, limits);
        if (exited >= 0) {
          kind = FaultKind::kPeerExited;
          site.peer = exited;
        }
        next_exit_check = now + kExitCheckPeriod;
      }
    }
    if (kind != FaultKind::kNone) {
      raise_fault(view, FaultRecord{.kind = kind,
                                    .rank = view.rank,
                                    .peer = site.peer,
                                    .lane = site.lane,
                                    .stage = static_cast<int32_t>(site.stage),
                                    .expected = expected,
                                    .seen = seen});
      return false;
    }
    if (turn < limits.spins + kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
}

}  // namespace echo::cpu
