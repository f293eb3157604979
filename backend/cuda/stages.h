// The stages on CUDA memory: what echo::cpu::Stages does, byte for byte, enqueued on a stream.
//
// Nothing here blocks, allocates or reads device memory on the host, so every call may be captured into a CUDA graph.
// What the ranks agreed on in their call records stays on the device, in a CallState that the stages read: a
// disagreement is known to them before it is known to the host. All functions work on the current device and throw
// std::runtime_error if CUDA refuses a launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../core/call_record.h"
#include "../core/site.h"
#include "../core/tile.h"

namespace echo::cuda {

// What open_call makes of the records of all ranks; in device memory, 8-byte aligned, valid until the last stage of the
// call has run.
struct CallState {
  int32_t rescale_log2 = 0;
  uint32_t fault = 0;  // not 0: ranks disagree now or did before; push and reduce do nothing, tail delivers NaN
};

// The first disagreement that a group met, in pinned memory that host and device both address. One per group.
struct Disagreement {
  uint32_t is_set = 0;  // written last, with release at system scope; read_disagreement acquires it
  int32_t rank = 0;
  int32_t peer = 0;
  uint32_t unused = 0;
  CallRecord mine;    // of `rank`
  CallRecord theirs;  // of `peer`
};

// A fresh one, is_set == 0. It lives as long as the process: giving pinned memory back would wait for kernels that a
// lost peer holds up.
Disagreement* create_disagreement();

// True, and the record copied to `out`, if the group has met a disagreement. Never blocks; any thread.
bool read_disagreement(const Disagreement* disagreement, Disagreement* out);

// In words, as echo::describe_mismatch; empty if there is none.
std::string describe_disagreement(const Disagreement* disagreement);

// One call as every stage sees it. site.tensor and site.state are device pointers; site.rescale_log2 is not read,
// agreed->rescale_log2 is.
struct Call {
  Site site;
  const CallState* agreed = nullptr;
  void* stream = nullptr;  // a cudaStream_t
};

// The ranks' copies of a tile lie from `base` on in rank order, stride_bytes apart; rank `absent` has no place there.
struct PeerTiles {
  const std::byte* base = nullptr;
  int64_t stride_bytes = 0;
  int32_t absent = kNoneAbsent;

  static constexpr int32_t kNoneAbsent = 0x7fffffff;
};

// *out = record, with max|x| of the whole tensor in it if `rescale`. `out` is device memory, 16-byte aligned.
void write_record(const Call& call, const CallRecord& record, bool rescale, CallRecord* out);

// Why the current device can run none of the kernels, as CUDA has it: this build has code neither for it nor for an
// older one that the driver could translate. Empty if it can.
std::string missing_code();

// Loads the kernels of write_record on the current device, so that none is loaded while another waits for a peer.
void load_opening_kernels();

// Pre: `records` holds the record of every rank. Post: *agreed is what they amount to; at the first disagreement of the
// group also *disagreement. A group that has met one stays faulted. Calls of one group must follow each other in stream
// order.
void open_call(const Call& call, const CallRecord* records, CallState* agreed, Disagreement* disagreement);

// Contracts of echo::cpu::Stages. Tensors need the alignment of their element type, tiles and state 16 bytes.
void push(const Call& call, GroupRange groups, int64_t tile_groups, std::byte* tile);
void reduce(const Call& call, GroupRange groups, int64_t tile_groups, PeerTiles peers, std::byte* tile);
void tail(const Call& call, GroupRange groups, int64_t tile_groups, const std::byte* tile);

}  // namespace echo::cuda
