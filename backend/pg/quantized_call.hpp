// One quantized all-reduce from the moment its plan is fixed: what the worker or a stream runs, and what happens when
// it fails.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "../core/tuning.h"
#include "../wire/allreduce.h"
#include "call_name.hpp"
#include "cuda_fabrics.hpp"
#include "device_fault.hpp"
#include "diagnostics.hpp"
#include "fault.hpp"
#include "fault_reports.hpp"
#include "forwarded_calls.hpp"
#include "peer_fabric.hpp"
#include "settings.hpp"
#include "stats.hpp"
#include "wire_groups.hpp"

namespace echo::pg {

// What the calls of a group share. Outlives the process group while a call is under way on a thread that could not be
// stopped.
struct GroupCore {
  struct Ranks {
    c10::intrusive_ptr<c10d::Store> store;
    int32_t rank = 0;
    int32_t size = 1;
    std::shared_ptr<const Processes> processes;
  };

  GroupCore(Config group_config, const Ranks& ranks, WireGroups::Make make_wire)
      : config(std::move(group_config)),
        reports(ranks.store, ranks.rank, ranks.size, ranks.processes),
        wire(std::move(make_wire)) {}

  const Config config;
  const FaultReports reports;
  std::atomic<bool> aborting{false};  // by this rank's own will: what the others say is of no interest
  const std::shared_ptr<ForwardedCalls> forwarded = std::make_shared<ForwardedCalls>();
  GroupFault fault;
  DeviceFault device_fault;
  GroupStats stats;
  WireGroups wire;
  std::optional<PeerFabric::Vote> peer;  // of CPU tensors; empty before their first call. Guarded by the issue lock
  Observer observer;                     // of the vote and the calls; tests set it before the first call
  std::atomic<PeerFabric*> peer_fabric{nullptr};  // that of the vote, for those who end the group without the lock
  CudaFabrics cuda_fabrics;                       // of CUDA tensors
  wire::Workspace workspace;                      // used by one call at a time
  std::atomic<int64_t> workspace_bytes{0};
  Diagnostics diagnostics;
  // Of calls over peer memory on CPU; below kLookAhead only where a benchmark asks what the overlap is worth.
  std::atomic<int32_t> look_ahead{kLookAhead};

  // Faults the group if devices have met what the host does not know of yet. Never blocks, calls no CUDA.
  void look_at_devices();
};

struct QuantizedCall {
  at::Tensor tensor;                  // the caller's, any strides without overlap
  PeerFabric* peer = nullptr;         // the exchange goes over peer memory of the host,
  CudaFabric* cuda_peer = nullptr;    // or of its devices,
  BackendPtr inner;                   // or else over this
  wire::Call wire;                    // tensor not set yet
  std::optional<c10::Stream> stream;  // device tensors: the current stream, where the call is enqueued
  bool captured = false;              // it is recorded into a graph
  MeasuredSite site;
  CallName what;
};

// Collective; afterwards call.tensor holds the result. On failure the group is faulted, its exchange torn down, and
// c10::DistBackendError thrown.
void run_quantized(GroupCore& core, QuantizedCall& call);

// Faults the group and hears what the other ranks have to say of it; returns the error to raise for this call.
std::exception_ptr fail_call(GroupCore& core, const CallName& what, const std::string& stage, const std::string& cause);

}  // namespace echo::pg
