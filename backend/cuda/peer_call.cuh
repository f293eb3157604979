// What a block does before and after its tiles: it opens the call, with the ranks' records and their agreement on the
// rescale where there is one, and closes it.
#pragma once

#include "../core/reduce.h"
#include "peer_tile.cuh"

namespace echo::cuda {

// What a block knows of the call once it is open. In shared memory: stages need the registers.
struct OpenCall {
  uint32_t hash;
  uint64_t first;  // the lane's sequence number of its first tile
  int32_t rescale_log2;
  uint32_t largest;  // bits of max|x| over all ranks
  bool publishes;    // this block tells the peers of the call
};

// This rank's record to everyone (P2), by one lane.
__device__ __forceinline__ void publish_record(const PeerJob& job, const CallRecord& record) {
  const auto peer = static_cast<int32_t>(threadIdx.x);
  if (peer >= job.shape.world_size) return;
  const auto parity = static_cast<int32_t>(record.call_number % kCallParities);
  std::byte* slab = job.slabs[peer];
  *reinterpret_cast<CallRecord*>(slab + record_offset(job.shape, job.site.plan.rank, parity)) = record;
  store_release_sys(word_at(slab, record_ticket_offset(job.site.plan.rank, parity)),
                    ticket_of(static_cast<uint32_t>(record.call_number), 0));
}

// The largest max|x| of all ranks, waited for by one thread per rank; false after a fault.
__device__ __forceinline__ bool agree_on_rescale(const PeerJob& job, const WaitContext& context, OpenCall& call) {
  const auto peer = static_cast<int32_t>(threadIdx.x);
  if (peer >= job.shape.world_size) return true;
  const auto parity = static_cast<int32_t>(context.record.call_number % kCallParities);
  const uint64_t ticket = ticket_of(static_cast<uint32_t>(context.record.call_number), 0);
  if (!wait_for_ticket(context, peer, Stage::kPush, record_ticket_offset(peer, parity), ticket)) return false;
  const auto* theirs =
      reinterpret_cast<const CallRecord*>(context.slabs[context.rank] + record_offset(job.shape, peer, parity));
  atomicMax(&call.largest, theirs->max_magnitude);
  return true;
}

// By one thread; false if the group has failed before.
__device__ __forceinline__ bool begin_call(const PeerJob& job, WaitContext& context, OpenCall& call) {
  context.shape = job.shape;
  context.slabs = job.slabs;
  context.rank = job.site.plan.rank;
  context.lane = static_cast<int32_t>(blockIdx.x);
  context.group = job.group;
  context.words = job.words;
  context.deadline = global_nanoseconds() + job.timeout_ns;
  context.timeout_ms = static_cast<uint32_t>(min(job.timeout_ns / 1000000, uint64_t{0xffffffffu}));
  context.record = job.record;
  context.record.call_number = job.group->call_number;
  context.record.exact_calls += job.group->exact_calls;
  if (job.rescale) context.record.max_magnitude = job.group->record.max_magnitude;
  call = OpenCall{.hash = ticket_hash(context.record),
                  .first = job.sequences[blockIdx.x],
                  .rescale_log2 = 0,
                  .largest = 0,
                  .publishes = blockIdx.x == 0};
  if (const uint64_t word = fault_word(context); word != 0) {
    pass_on_fault(context, word);
    return false;
  }
  // Calls of a group follow each other on the device; a replay on a stream that nobody ordered may not.
  if (blockIdx.x == 0 && atomicExch(&job.group->in_use, 1u) != 0) {
    call.publishes = false;  // the record there is that of the call that it overlaps
    raise_fault(context, FaultRecord{.kind = FaultKind::kOverlap});
    return false;
  }
  return true;
}

__device__ __forceinline__ bool open_peer_call(const PeerJob& job, WaitContext& context, OpenCall& call) {
  const bool begun = threadIdx.x != 0 || begin_call(job, context, call);
  const bool stopped = __syncthreads_or(!begun) != 0;
  // After a fault too, so that a peer that met another call can say which.
  if (call.publishes) publish_record(job, context.record);
  if (stopped) return false;
  if (!job.rescale) return true;
  if (__syncthreads_or(!agree_on_rescale(job, context, call)) != 0) return false;
  if (threadIdx.x == 0) call.rescale_log2 = rescale_exponent(call.largest);
  __syncthreads();
  return true;
}

// NaN in every rank's segment of the tensor, in tile `first` and each `stride` tiles further on. By a block.
template <DType kDType>
__device__ __noinline__ void fill_tiles_with_nan(const PeerJob& job, int64_t first, int64_t stride) {
  for (int64_t tile = first; tile < job.cut.tiles; tile += stride) {
    for (int32_t owner = 0; owner < job.shape.world_size; ++owner) {
      const GroupRange groups =
          segment_range(job.groups, job.segment, owner, tile_begin(job.cut, tile), tile_begin(job.cut, tile + 1));
      fill_with_nan<kDType>(job.site, groups, threadIdx.x, blockDim.x);
    }
  }
}

// The last block to leave moves the group on to its next call. After a fault the lanes that were done before it have
// stored what is right, the others NaN: it makes all of it NaN, since every other block has stored what it will.
template <DType kDType>
__device__ __forceinline__ void close_peer_call(const PeerJob& job) {
  __syncthreads();
  bool is_last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&job.group->blocks_done, 1u) + 1 == gridDim.x;
    __threadfence();
  }
  if (__syncthreads_or(is_last) == 0) return;
  const bool failed = threadIdx.x == 0 && *static_cast<volatile uint32_t*>(&job.group->fault_taken) != 0;
  if (__syncthreads_or(failed) != 0) {
    fill_tiles_with_nan<kDType>(job, 0, 1);
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  job.group->blocks_done = 0;
  job.group->call_number += 1;
  job.group->exact_calls += job.record.exact_calls;
  __threadfence();
  job.group->in_use = 0;
}

}  // namespace echo::cuda
