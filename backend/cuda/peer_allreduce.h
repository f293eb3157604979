// The composition over peer memory on CUDA devices: one kernel per call, in which every lane (a block) walks its tiles
// through push, reduce, gather and tail, writing codes straight into the peers' slabs.
//
// No torch. Nothing here blocks or allocates after construction, so calls may be captured into a CUDA graph: sequence
// and call numbers live in device memory and advance in the kernel; a captured call can be replayed any number of
// times, mixed with others.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../core/call_record.h"
#include "../core/protocol.h"
#include "../core/site.h"

namespace echo::cuda {

struct PeerCall {
  Site site;  // device pointers; rescale_log2 is not read, the ranks agree on it in the kernel
  Direction direction = Direction::kForward;
  bool rescale = false;
  uint64_t exact_calls = 0;  // all-reduces that the group forwarded since its previous quantized call on this fabric
  CallShape shape;
  std::chrono::nanoseconds timeout{0};
  void* stream = nullptr;  // a cudaStream_t
  // kept_bytes(site.plan) bytes on the device, 16-byte aligned, where the call keeps what update() then needs, instead
  // of updating the averages itself. For calls that can_keep.
  std::byte* kept = nullptr;
};

// How far a rank has counted. Tickets hold the low halves.
struct Counters {
  uint64_t tiles = 0;  // of the first lane; all lanes of a call that fills them have equally many
  uint64_t calls = 0;
};

// Pinned words between the host and the kernels; defined in peer_wait.cuh.
struct PeerHostWords;

// The shape of the slabs of a group: `multiprocessors` is the smallest count among the ranks' devices, so that every
// lane of every kernel is resident at once on each of them. slot_bytes 0: the workspace is too small.
SlabShape peer_shape(int32_t world_size, int32_t multiprocessors, int64_t workspace_bytes);

// One rank's end of the protocol. Calls are collective, and serial in device order: a caller on another stream waits by
// event for the call before.
class PeerGroup {
 public:
  // `slabs` are device memory as mapped on the current device, slab_bytes(shape) each, zeroed before any rank learned
  // of them; slabs[rank] is this rank's own. They outlive this object. Loads every kernel, so that none is loaded while
  // another waits for a peer. Throws std::runtime_error with CUDA's reason.
  PeerGroup(SlabShape shape, int32_t rank, std::vector<std::byte*> slabs);
  ~PeerGroup();
  PeerGroup(const PeerGroup&) = delete;
  PeerGroup& operator=(const PeerGroup&) = delete;

  const SlabShape& shape() const { return shape_; }

  // From where all lanes count their tiles, and the group its calls: for tests, which start near the end of what a
  // ticket can hold. Leaves in this rank's slab the tickets that its peers would have left by then. On all ranks alike,
  // and while no call of any rank is under way; later calls and replays, of graphs recorded before too, count on.
  void count_from(Counters counters);
  Counters counters() const;

  // Enqueues this rank's part of a call. After a fault the kernel fills what it still owes of the tensor with NaN and
  // leaves; every later one does so at once. Throws std::runtime_error where CUDA refuses the launch.
  void all_reduce(const PeerCall& call);

  // True if a call may have `kept`: residual "group", and a kernel for it. The same bytes either way, and the peers do
  // not notice.
  static bool can_keep(const PeerCall& call);

  // Enqueues on `stream`, a cudaStream_t, the update that a call with `kept` has left, from what it kept alone: the
  // tensor may hold anything by then. Not before the call; the state's next use and that of `kept` not before this.
  // After a fault of the group it does nothing. Uses memory of this object until it has run.
  void update(const PeerCall& call, void* stream);

  // The first fault that a kernel of this rank met or was told of; kind kNone if there is none. Never blocks, never
  // calls CUDA; any thread.
  FaultRecord fault() const;
  // In words, for `fault().kind != kNone`; names the ranks, the stage, and for a foreign ticket both calls.
  std::string describe_fault() const;

  // Words that waiting kernels poll: they fault with kAborted, or with kPeerExited once they wait for that peer. Any
  // thread, never blocks.
  void abort();
  void report_exit(int32_t peer);

  // Bytes that one call puts into peers' slabs, counted as on the wire: whole tiles with their padding.
  int64_t wire_bytes(const PeerCall& call) const;

 private:
  SlabShape shape_;
  int32_t rank_;
  std::vector<std::byte*> slabs_;
  PeerHostWords* words_ = nullptr;  // lives as long as the process
  std::byte* state_ = nullptr;      // on the device: GroupState, then the lanes' sequence numbers
};

}  // namespace echo::cuda
