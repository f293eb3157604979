// What one call over peer memory works on: the job of all lanes, the tiles of a rank's segment, and the groups of a
// tile as the warps of a block take them.
#pragma once

#include "../core/protocol.h"
#include "peer_wait.cuh"
#include "stage_device.cuh"

namespace echo::cuda {

constexpr int kPeerThreads = 128;
constexpr int kPeerWarps = kPeerThreads / kWarpLanes;

struct PeerJob {
  Site site;
  StateLayout state_layout;
  SlabShape shape;
  CallRecord record;  // call_number and exact_calls as far as the host knows them: 0 and what was forwarded since
  bool rescale;
  bool partial;     // the tensor's last group is
  int64_t groups;   // of the tensor; like the next, counted once, on the host: it takes divisions
  int64_t segment;  // groups that a rank owns
  int64_t tile_groups;
  int64_t tiles;  // of a segment
  uint64_t timeout_ns;
  GroupState* group;
  uint64_t* sequences;  // per lane: tiles finished so far
  PeerHostWords* words;
  std::byte* slabs[kMaxPeerRanks];
};

// ---- groups of a tile ---------------------------------------------------------------------------------------------

// The tile that the block works on in one stage.
struct TileAt {
  GroupRange groups;
  int64_t room;  // groups that its slot has room for
};

__device__ __forceinline__ TileAt tile_of(const PeerJob& job, int32_t owner, int64_t tile) {
  return TileAt{tile_range(job.groups, job.segment, owner, tile, job.tile_groups),
                min_i64(job.tile_groups, job.segment - tile * job.tile_groups)};
}

// What a kernel is made for: any plan and any ranks, or only plans that kind_of calls hot, where what is rare is out of
// line, so that the instructions of all stages fit the caches.
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

// The groups of a tile, dealt out to the warps of the block.
template <Spread kSpread, StateKind kState, Kind kKind>
struct TileWalk {
  const PeerJob& job;
  Lane<kSpread> lane;
  int32_t full;   // groups that are whole
  int32_t dense;  // tasks, so many groups side by side in a warp, that leave no lane without a group
  int32_t tasks;  // all of them; the tensor's partial group is one alone, so that all lanes agree on whether to rotate

  __device__ __forceinline__ TileWalk(const PeerJob& job, const GroupRange& groups, int32_t rescale_log2)
      : job(job), lane(make_lane<kSpread>(job.site, job.state_layout, groups.begin, rescale_log2)) {
    const bool partial = job.partial && groups.end == job.groups && groups.begin < groups.end;
    full = static_cast<int32_t>(groups.end - groups.begin) - (partial ? 1 : 0);
    const int32_t shift = 5 - lane.lanes_log2;
    const bool lanes_full = job.site.plan.codec.group_elems == kLaneElems << lane.lanes_log2;
    dense = lanes_full && (kKind == Kind::kAny || lane.tensor_aligned) ? full >> shift : 0;
    tasks = ((full + side_by_side() - 1) >> shift) + (partial ? 1 : 0);
    if constexpr (kKind != Kind::kAny) {
      lane.scale_up = 1.0f;
      lane.scale_down = 1.0f;
      lane.tensor_aligned = true;
      lane.is_signed = false;
      lane.quick_clip = true;
      lane.corrected = kState != StateKind::kNone;
      lane.state = StateDType::kBFloat16;
    }
  }

  __device__ __forceinline__ int32_t side_by_side() const { return kWarpLanes >> lane.lanes_log2; }
  __device__ __forceinline__ int32_t mine() const {
    return (static_cast<int32_t>(threadIdx.x) % kWarpLanes) >> lane.lanes_log2;
  }

  __device__ __forceinline__ GroupAt dense_group(int32_t task) const {
    const Codec& codec = job.site.plan.codec;
    const bool rotated = kKind == Kind::kAny ? is_rotated(codec, codec.group_elems) : kKind == Kind::kHotRotated;
    return GroupAt{
        .slot = task * side_by_side() + mine(), .elems = codec.group_elems, .rotated = rotated, .dense = true};
  }

  __device__ __forceinline__ GroupAt any_group(int32_t task) const {
    if (task < dense) return dense_group(task);
    const Codec& codec = job.site.plan.codec;
    const int32_t first = task * side_by_side();
    GroupAt at;
    if (first < full) {
      at.slot = first + mine();
      at.elems = at.slot < full ? codec.group_elems : 0;
      at.rotated = is_rotated(codec, codec.group_elems);
    } else {
      at.slot = full;
      at.elems = mine() == 0 ? group_elems_at(job.site.plan, job.groups - 1) : 0;
    }
    return at;
  }

  // Calls body(at, what load(at) gave) for this warp's dense tasks, the next one loaded while one is worked on, and
  // rest(task) for others. All lanes of a warp make the same calls.
  template <typename Load, typename Body, typename Rest>
  __device__ __forceinline__ void run(Load load, Body body, Rest rest) const {
    int32_t task = static_cast<int32_t>(threadIdx.x) / kWarpLanes;
    if (kKind != Kind::kAny && task < dense) {
      GroupAt at = dense_group(task);
      auto loaded = load(at);
#pragma unroll 1
      while (true) {
        task += kPeerWarps;
        GroupAt here = at;
        here.dense = true;
        here.rotated = kKind == Kind::kHotRotated;
        auto now = loaded;
        if (task < dense) {
          at = dense_group(task);
          loaded = load(at);
        }
        body(here, now);
        if (task >= dense) break;
      }
    }
#pragma unroll 1
    for (; task < tasks; task += kPeerWarps) rest(task);
  }
};

}  // namespace echo::cuda
