// The composition without peer memory: codes travel through the collectives of an inner backend, for CPU and CUDA
// tensors alike.
//
// Knows c10d::Backend and c10d::Work and nothing else of c10d.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../core/call_record.h"
#include "../core/moment.h"
#include "../core/site.h"

namespace echo::cuda {
struct Disagreement;
}

namespace echo::wire {

struct Call {
  at::Tensor tensor;  // contiguous; holds the result afterwards
  at::Tensor state;   // byte tensor on the tensor's device, undefined without feedback
  Plan plan;
  Direction direction = Direction::kForward;
  bool rescale = false;                        // exchange max|x| and rescale by a power of two
  uint64_t call_number = 0;                    // quantized calls of the group before this one
  uint64_t exact_calls = 0;                    // all-reduces of the group forwarded before this one
  int64_t workspace_bytes = 64 << 20;          // limit for all buffers of the call together
  cuda::Disagreement* disagreement = nullptr;  // CUDA tensors: where the device leaves word that ranks disagree
  Observer observer;                           // for tests
  std::chrono::milliseconds timeout{0};        // of each inner collective; 0: the inner backend's own
  std::function<void(c10d::Work&)> wait;       // for an inner collective; empty: its own wait()
};

// What one rank puts on the wire for other ranks; the same on all ranks.
struct Receipt {
  int64_t wire_bytes = 0;     // codes and parameters with their padding, and the call records
  int64_t padding_bytes = 0;  // wire_bytes minus 2(P-1)/P * N * w (rounded up), where w = bits/8 + parameter bytes / g
};

// Buffers kept between the calls of a group, so that memory is touched for the first time only once. Calls that share
// one must not overlap in time. CUDA tensors do without: their allocator reuses memory in stream order.
struct Workspace {
  at::Tensor bytes;
};

// Of a call that put `sent` bytes on the wire.
Receipt receipt_for(const Plan& plan, int64_t sent);

// The tensor's sizes, for the ranks to compare.
CallShape shape_of(const Call& call);

// The call as the stages see it.
Site site_of(const Call& call);

// A pure function of the call's shape, so that statistics can be checked against it.
Receipt expected_bytes(const Plan& plan, int64_t tile_groups);

// Collective over `inner`. For CPU tensors it blocks until the result is there; for CUDA tensors it enqueues on the
// current stream. Throws c10::DistBackendError where ranks disagree on the call (the tensor is then as it was), and
// whatever the inner backend throws (the tensor is then filled with NaN, since part of it may have been overwritten).
Receipt all_reduce(const Call& call, c10d::Backend& inner, Workspace& workspace);

}  // namespace echo::wire
