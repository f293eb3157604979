// Bounded waiting for a ticket on the device, and how a fault gets from one waiting thread to every rank and to the
// hosts.
//
// A waiter looks at its ticket all the time, every so often also for a fault of the group and at the clock, and seldom
// for what its host says (an abort, a peer whose process has exited): that lies in the host's memory, and reads from
// there hold up the releases of the whole device. Two H200s, 792 waiters that asked the host every 100 microseconds:
// calls of 1 GiB whose ranks began 0.1 ms apart took 19 ms instead of 1.1.
#pragma once

#include "../core/call_record.h"
#include "../core/protocol.h"
#include "ptx.cuh"

namespace echo::cuda {

// In pinned memory that host and device both address; lives as long as the process, because giving pinned memory back
// would wait for kernels that a lost peer holds up.
struct PeerHostWords {
  // Written by the host at any time, polled by waiting threads.
  uint32_t abort = 0;
  uint32_t unused = 0;
  uint64_t exited = 0;  // bit r: the process of rank r has exited
  // Written once by the first thread of this rank that met a fault, `is_set` last with release at system scope.
  uint32_t is_set = 0;
  uint32_t unused2 = 0;
  FaultRecord fault;
  CallRecord mine;    // of this rank, when it met the fault
  CallRecord theirs;  // what the peer that is in another call says of it; magic 0: nothing is known
};

// What the calls of a group carry on in device memory, so that nothing of it comes from the host.
struct GroupState {
  uint64_t call_number;
  uint64_t exact_calls;
  uint32_t blocks_done;  // of the call under way; back to 0 when all have left
  uint32_t in_use;       // a call is under way
  uint32_t fault_taken;  // a thread of this rank is reporting a fault
  uint32_t unused;
  CallRecord record;  // of the call under way where it needs max|x|, see write_record
};

// What a waiter knows of its surroundings; one per block, in shared memory. Slabs as mapped here.
struct WaitContext {
  SlabShape shape;
  std::byte* const* slabs;
  int32_t rank;
  int32_t lane;
  GroupState* group;
  PeerHostWords* words;
  CallRecord record;  // of this rank's call
  uint64_t deadline;  // of global_nanoseconds()
  uint32_t timeout_ms;
};

static __device__ __forceinline__ uint64_t* word_at(std::byte* slab, int64_t offset) {
  return reinterpret_cast<uint64_t*>(slab + offset);
}

static __device__ __forceinline__ uint64_t fault_word(const WaitContext& context) {
  return load_acquire_sys(word_at(context.slabs[context.rank], fault_offset()));
}

// True for one thread of this rank in the life of the group: the one that reports.
static __device__ __forceinline__ bool take_fault(const WaitContext& context) {
  return atomicExch(&context.group->fault_taken, 1u) == 0;
}

static __device__ __noinline__ void tell_host(const WaitContext& context, const FaultRecord& fault) {
  PeerHostWords* words = context.words;
  words->fault = fault;
  words->mine = context.record;
  words->theirs.magic = 0;
  if (fault.kind == FaultKind::kForeignTicket) {
    // One block of the peer sends its record, another may have sent the ticket: the record may still be on its way.
    constexpr uint64_t kPatienceNanoseconds = 50000000;
    const std::byte* slab = context.slabs[context.rank];
    const int32_t other = fault.rank == context.rank ? fault.peer : fault.rank;
    const auto parity = static_cast<int32_t>(context.record.call_number % kCallParities);
    const auto* word = reinterpret_cast<const uint64_t*>(slab + record_ticket_offset(other, parity));
    const uint64_t ticket = ticket_of(static_cast<uint32_t>(context.record.call_number), 0);
    const uint64_t until = global_nanoseconds() + kPatienceNanoseconds;
    while (load_acquire_sys(word) != ticket && global_nanoseconds() < until) __nanosleep(1000);
    if (load_acquire_sys(word) == ticket) {
      words->theirs = *reinterpret_cast<const CallRecord*>(slab + record_offset(context.shape, other, parity));
    }
  }
  store_release_sys(&words->is_set, 1u);
}

// To this rank's host and into every rank's slab (P3). Authors do not overwrite each other's records, and the word
// names one whose record is there: no atomics across the link are needed.
static __device__ __noinline__ void raise_fault(const WaitContext& context, FaultRecord fault) {
  if (!take_fault(context)) return;
  fault.rank = context.rank;
  fault.lane = context.lane;
  fault.timeout_ms = context.timeout_ms;
  tell_host(context, fault);
  for (int32_t rank = 0; rank < context.shape.world_size; ++rank) {
    std::byte* slab = context.slabs[rank];
    *reinterpret_cast<FaultRecord*>(slab + fault_record_offset(context.rank)) = fault;
    store_release_sys(word_at(slab, fault_offset()), uint64_t{1} + context.rank);
  }
}

// A fault that a peer wrote into this slab; `word` is what fault_word gave.
static __device__ __noinline__ void pass_on_fault(const WaitContext& context, uint64_t word) {
  if (!take_fault(context)) return;
  const auto author = static_cast<int32_t>(word - 1);
  tell_host(context, *reinterpret_cast<const FaultRecord*>(context.slabs[context.rank] + fault_record_offset(author)));
}

constexpr uint64_t kHostLookNanoseconds = 5000000;

// The rare part of waiting: false if waiting is over, the fault then raised or passed on. `ask_host_at`: when the host
// is to be asked next; 0 at first.
static __device__ __noinline__ bool may_go_on(const WaitContext& context, int32_t peer, Stage stage, int64_t offset,
                                              uint64_t expected, uint64_t seen, uint64_t& ask_host_at) {
  if (const uint64_t word = fault_word(context); word != 0) {
    pass_on_fault(context, word);
    return false;
  }
  FaultKind kind = FaultKind::kNone;
  if (compare_ticket(seen, expected) == TicketState::kForeign) kind = FaultKind::kForeignTicket;
  const uint64_t now = global_nanoseconds();
  const bool asks = ask_host_at != 0 && now >= ask_host_at;
  if (ask_host_at == 0 || asks) ask_host_at = now + kHostLookNanoseconds;
  if (kind == FaultKind::kNone && asks && load_acquire_sys(&context.words->abort) != 0) kind = FaultKind::kAborted;
  if (kind == FaultKind::kNone && asks && (load_acquire_sys(&context.words->exited) >> peer & 1) != 0) {
    // A peer that left right after its last store has delivered: look once more before blaming it.
    if (load_acquire_sys(word_at(context.slabs[context.rank], offset)) == expected) return true;
    kind = FaultKind::kPeerExited;
  }
  if (kind == FaultKind::kNone && now >= context.deadline) kind = FaultKind::kTimeout;
  if (kind == FaultKind::kNone) return true;
  raise_fault(
      context,
      FaultRecord{
          .kind = kind, .peer = peer, .stage = static_cast<int32_t>(stage), .expected = expected, .seen = seen});
  return false;
}

// Until the word at `offset` of this rank's slab is `expected` (acquire P1, P2); false after a fault, own or foreign.
// One thread; what it acquired holds for its whole block after a barrier. It looks without order and with pauses, and
// acquires once: an acquire discards the multiprocessor's first-level cache, which other blocks there work from.
static __device__ __forceinline__ bool wait_for_ticket(const WaitContext& context, int32_t peer, Stage stage,
                                                       int64_t offset, uint64_t expected) {
  constexpr uint32_t kLooksBetweenChecks = 256;
  constexpr uint32_t kPauseNanoseconds = 32;
  const uint64_t* word = word_at(context.slabs[context.rank], offset);
  uint64_t ask_host_at = 0;
  for (uint32_t look = 1;; ++look) {
    const uint64_t seen = load_relaxed_sys(word);
    const TicketState state = compare_ticket(seen, expected);
    if (state == TicketState::kHere) {
      load_acquire_sys(word);
      return true;
    }
    if (state == TicketState::kNotYet && look % kLooksBetweenChecks != 0) {
      __nanosleep(kPauseNanoseconds);
      continue;
    }
    if (!may_go_on(context, peer, stage, offset, expected, seen, ask_host_at)) return false;
  }
}

}  // namespace echo::cuda
