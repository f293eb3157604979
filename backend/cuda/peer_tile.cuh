// What one call over peer memory works on: the job of all lanes, and what its blocks do at a step: parts, each a tile
// of one rank's segment, whose groups the warps take as tasks.
#pragma once

#include "../core/protocol.h"
#include "peer_wait.cuh"
#include "stage_device.cuh"

namespace echo::cuda {

constexpr int32_t kMaxPeerDevices = 16;  // of one host, each with all others' memory mapped

struct PeerJob {
  Site site;
  StateLayout state_layout;
  SlabShape shape;
  CallRecord record;  // call_number and exact_calls as far as the host knows them: 0 and what was forwarded since
  bool rescale;
  bool partial;     // the tensor's last group is
  int64_t groups;   // of the tensor; like the next, counted once, on the host: it takes divisions
  int64_t segment;  // groups that a rank owns
  TileCut cut;
  float sure_steps;  // sure_steps_inside of the codec
  uint64_t timeout_ns;
  GroupState* group;
  uint64_t* sequences;  // per lane: tiles finished so far
  PeerHostWords* words;
  std::byte* kept;  // what the update needs that comes after the call (core/tile.h); null: the call updates
  std::byte* kept_codes;
  std::byte* kept_params;
  std::byte* slabs[kMaxPeerDevices];
};

// ---- kinds of kernels -----------------------------------------------------------------------------------------------

// What a kernel is made for: any plan, or only plans that kind_of calls hot, for which it has the loops of
// quick_device.cuh.
enum class Kind { kAny, kHot, kHotRotated };

// Hot: 16-bit elements, groups that fill their lanes, no rescale, unsigned codes that 16-bit integers can clamp, and
// either no feedback or 4 bits with a state to correct by, in int8 or bf16.
inline Kind kind_of(const Plan& plan, bool rescale) {
  const Codec& codec = plan.codec;
  const Feedback& fb = plan.feedback;
  const bool lanes_full = (codec.group_elems & (codec.group_elems - 1)) == 0 && codec.group_elems >= kLaneElems;
  const bool quick = codec.quantizer != Quantizer::kSymmetric && codec.clip >= kSmallestQuickClip && !rescale;
  const bool state = codec.bits == 4 && !plan.first_site &&
                     (fb.state_dtype == StateDType::kInt8 || fb.state_dtype == StateDType::kBFloat16);
  if (plan.dtype == DType::kFloat32 || !lanes_full || !quick || (fb.enabled && !state)) return Kind::kAny;
  return codec.rotation_log2 > 0 ? Kind::kHotRotated : Kind::kHot;
}

// Blocks of one multiprocessor, for which a kernel's registers leave room: so many lanes a call may have.
constexpr int peer_blocks(StateKind state, Kind kind) {
  return kind != Kind::kAny && state != StateKind::kWide ? 3 : 2;
}
constexpr int kMostPeerBlocks = 3;

// A kernel that keeps what an update needs, which comes after it, instead of updating averages itself: for residual
// "group" alone. It has 0 averages to update.
constexpr bool keeps_for_update(StateKind state, Residual residual, int averages) {
  return state != StateKind::kNone && residual == Residual::kGroup && averages == 0;
}

// Warps of a block. A kernel that keeps needs no more registers than one without state, whatever the state: where the
// number of blocks, on which ranks agree, is that of the kernel that updates, its blocks have more warps instead.
constexpr int kPeerWarps = 4;
constexpr int peer_warps(StateKind state, Residual residual, int averages, Kind kind) {
  return keeps_for_update(state, residual, averages) ? kPeerWarps * kMostPeerBlocks / peer_blocks(state, kind)
                                                     : kPeerWarps;
}

// Shared memory that the blocks of a multiprocessor may ask for: all, without what each has besides, its own variables
// and a KiB that CUDA keeps.
constexpr int kPeerStaticBytes = 5 << 10;
constexpr int kPeerDynamicBytes =
    static_cast<int>(kPeerDeviceSharedBytes) - kMostPeerBlocks * (kPeerStaticBytes + (1 << 10));

// ---- parts and tasks ------------------------------------------------------------------------------------------------

// A tile of one rank's segment as a block handles it at a step: encoded for its owner, summed up by it, or stored. In
// shared memory, written by one thread.
struct PeerPart {
  GroupRange groups;
  int64_t first_elem;
  std::byte* tile;          // the one written, in its owner's slab, or the one that is stored
  std::byte* gathered;      // of a part that is encoded: where its owner gathers what this rank sums up at the step
  const std::byte* pushed;  // of a part that this rank sums up: the tile that the first other rank pushed
  int32_t room;             // groups that its slot has room for
  int32_t params;           // from its codes to its parameters
  int32_t full;             // groups that are whole
  int32_t dense;  // tasks, so many groups side by side in a warp, that the quick loops may take: no lane lacks a group
  int32_t tasks;  // all of them, with the one of the tensor's partial group
  int32_t owner;
};

// Without the places in slabs.
__device__ __forceinline__ PeerPart make_part(const PeerJob& job, int32_t owner, int64_t tile) {
  const Codec& codec = job.site.plan.codec;
  PeerPart part;
  const int64_t begin = tile_begin(job.cut, tile);
  const int64_t end = min_i64(job.segment, tile_begin(job.cut, tile + 1));
  part.groups = segment_range(job.groups, job.segment, owner, begin, end);
  part.first_elem = part.groups.begin * codec.group_elems;
  part.room = static_cast<int32_t>(end - begin);
  part.params = static_cast<int32_t>(params_offset(codec, part.room));
  const bool partial = job.partial && part.groups.end == job.groups && part.groups.begin < part.groups.end;
  part.full = static_cast<int32_t>(part.groups.end - part.groups.begin) - (partial ? 1 : 0);
  const int32_t side_log2 = kWarpLanesLog2 - lanes_log2_of(codec);  // of the groups that a task has
  part.dense = reinterpret_cast<uintptr_t>(job.site.tensor) % 16 == 0 ? part.full >> side_log2 : 0;
  part.tasks = ((part.full + (1 << side_log2) - 1) >> side_log2) + (partial ? 1 : 0);
  part.owner = owner;
  return part;
}

// Of what is kept: the codes of the part's groups.
__device__ __forceinline__ TileView<std::byte> kept_view(const PeerJob& job, const PeerPart& part) {
  const Codec& codec = job.site.plan.codec;
  return TileView<std::byte>{job.kept_codes + part.groups.begin * code_bytes(codec),
                             job.kept_params + part.groups.begin * param_bytes(codec)};
}

template <typename Byte>
__device__ __forceinline__ TileView<Byte> own_view(const PeerPart& part) {
  return TileView<Byte>{part.tile, part.tile + part.params};
}
// Where the owner of the step's part `turn` gathers what this rank sums up. Pre: `part` is the first of the step's
// encoded parts, behind which the others lie.
__device__ __forceinline__ TileView<std::byte> gathered_view(const PeerPart& part, int32_t turn) {
  std::byte* const tile = (&part)[turn].gathered;
  return TileView<std::byte>{tile, tile + part.params};
}
__device__ __forceinline__ TileView<const std::byte> first_pushed(const PeerPart& part) {
  return TileView<const std::byte>{part.pushed, part.pushed + part.params};
}

// What the other ranks pushed of a part that this rank sums up.
template <int kBits>
__device__ __forceinline__ Copies<kBits> pushed_copies(const PeerJob& job, const PeerPart& part) {
  const Plan& plan = job.site.plan;
  return {plan, part.room, {part.pushed, kDevicePushSlots * job.shape.slot_bytes, plan.rank}};
}

}  // namespace echo::cuda
