// One call over peer memory as one kernel. A block is a lane: it walks its tiles, and at step t it encodes, pushing
// tile t and reducing and handing on tile t-d, and stores tile t-2d, while the other lanes of the device are at other
// steps.
//
//   tensor, state   read and written in place; a group is read by push or reduce before tail stores it, in one block
//   own slab        slots that the peers fill, read here behind acquired tickets
//   peers' slabs    written only: codes first, then a barrier of the block, then one release of the ticket
//
// An owner's code goes into a slot of its own slab too, so that tail treats all segments alike.
//
// Residual "group" is known only after the sum. Either tail updates the averages, for which it reads contribution and
// state again, or the kernel keeps what an update needs (keeps_for_update), which a kernel of its own then does beside
// the caller's work (update_kernel.cuh). Bytes of memory per 16-bit element, s of an average's and 0.53 of codes, at
// two ranks and without what the ring of codes takes:
//
//   in one   tensor 2 read, 2 read again, 2 written; c s read, s read again; all averages read and written
//   apart    tensor 2 read, 2 kept, 2 written; c s read; a peer's half of the codes 0.27 kept
//   update   2 and 0.53 read of what was kept; all averages read and written
//
// The owner's half of the codes is kept in place of that slot. Two bf16 averages: 16, 8.3 and 10.5 bytes.
#pragma once

#include "peer_tasks.cuh"

namespace echo::cuda {

// Half of the lanes store first, so that at any time some lanes use the link and others the memory. They store a tile
// later, so that what they wait for has a whole step to arrive.
__device__ __forceinline__ bool stores_first() { return 2 * blockIdx.x >= gridDim.x; }

// Walks the tiles of a lane: the same number of steps on all ranks, empty tiles included. Returns the first tile that
// was not stored: all were, or there was a fault.
//
// Why the slots of protocol.h are enough in either order, with barriers of the block between waiting, encoding,
// releasing and storing:
//
//   gathers   2d+1: tail(k-1-2d) comes before the release of push(k), at the step before or first thing at this one
//   pushes    2d: before a lane pushes tile k it has waited for push(k-d), which a peer releases after its reduce(k-2d)
//   own       d+1: encode of tile k writes over tile k-1-d, which was stored at the step before or first thing at this
template <typename Tasks>
__device__ __forceinline__ int32_t walk_tiles(const Tasks& lane) {
  const bool late = stores_first();
  const int32_t behind = 2 * kLookAhead + (late ? 1 : 0);
  if (threadIdx.x / kWarpLanes == kPrepareWarp) lane.prepare(0, -behind);
#pragma unroll 1
  for (int32_t step = 0; step < lane.tiles + behind; ++step) {
    const int32_t reduced = step - kLookAhead;
    const int32_t stored = step - behind;
    if (!lane.wait_for_both(late ? -1 : reduced, stored)) return stored;
#pragma unroll 1
    for (int32_t half = 0; half < 2; ++half) {
      if (late != (half == 0)) {
        lane.encode(step);
        __syncthreads();
        if (threadIdx.x / kWarpLanes == kReleaseWarp) lane.hand_over(step);
        // Nobody looks at the parts of the step before this one any more.
        if (threadIdx.x / kWarpLanes == kPrepareWarp) lane.prepare(step + 1, stored + 1);
      } else {
        lane.store(step);
        if (late && !lane.wait_for_both(reduced, -1)) return stored + 1;
      }
    }
  }
  return lane.tiles;
}

template <DType kDType, int kBits, StateKind kState, Residual kResidual, int kAverages, bool kPair, Kind kKind>
__global__ void __launch_bounds__(kWarpLanes* peer_warps(kState, kResidual, kAverages, kKind),
                                  (peer_blocks(kState, kKind))) peer_kernel(const __grid_constant__ PeerJob job) {
  __shared__ WaitContext context;
  __shared__ OpenCall call;
  __shared__ StepParts steps[2];
  static_assert(sizeof(context) + sizeof(call) + sizeof(steps) <= kPeerStaticBytes);
  const auto tiles = static_cast<int32_t>((job.cut.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
  int32_t stored = 0;
  const PeerLane lane{job, context, call, steps, tiles};
  if (open_peer_call(job, context, call)) {
    stored = walk_tiles(LaneTasks<kDType, kBits, kState, kResidual, kAverages, kPair, kKind>(lane));
  }
  if (stored < tiles) {
    fill_tiles_with_nan<kDType>(job, lane.tile(stored < 0 ? 0 : stored), gridDim.x);
  } else if (threadIdx.x == 0) {
    job.sequences[blockIdx.x] = call.first + static_cast<uint64_t>(tiles);
  }
  close_peer_call<kDType>(job);
}

}  // namespace echo::cuda
