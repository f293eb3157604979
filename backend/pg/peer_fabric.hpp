// Peer memory between the ranks of one host for CPU tensors: the vote on whether to use it, the slabs, and the threads
// of the lanes.
//
// The vote goes through the group's store, in rounds that every rank takes part in whatever it found: all ranks end
// with peer memory of one shape, or all with the same reason for doing without.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../cpu/peer_allreduce.h"
#include "../cpu/shared_memory.h"
#include "fault_reports.hpp"

namespace echo::pg {

// Threads that stand by for the lanes of a group beyond the first, which runs on the caller's thread.
class LaneThreads {
 public:
  explicit LaneThreads(int32_t lanes);
  ~LaneThreads();

  // Calls body(lane) for every lane and returns when all have returned; throws what one of them threw.
  void run(const std::function<void(int32_t)>& body);

 private:
  void serve(int32_t lane);
  void stop();

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void(int32_t)>* body_ = nullptr;
  uint64_t round_ = 0;
  int32_t busy_ = 0;
  std::exception_ptr failure_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

class PeerFabric {
 public:
  struct Setup {
    c10::intrusive_ptr<c10d::Store> store;
    int32_t rank = 0;
    int32_t size = 1;
    int64_t workspace_bytes = 0;
    std::chrono::milliseconds timeout{0};
    const FaultReports* reports = nullptr;
    Observer observer;
  };

  // Either a fabric, or the reason, equal on all ranks, why there is none.
  struct Vote {
    std::unique_ptr<PeerFabric> fabric;
    std::string reason;
  };

  ~PeerFabric();
  PeerFabric(const PeerFabric&) = delete;
  PeerFabric& operator=(const PeerFabric&) = delete;

  // Collective over the store. Throws where a rank does not answer in time, or has exited.
  static Vote make(const Setup& setup);

  // One call; throws c10::DistBackendError with the fault after which this fabric is of no more use.
  void all_reduce(cpu::PeerCall call);

  // Ends all waiting, here and on the peers.
  void abort() { group_->abort(); }

  int64_t wire_bytes(const Plan& plan) const { return group_->wire_bytes(plan); }
  int64_t slab_bytes() const { return memory_.front().bytes(); }

 private:
  PeerFabric() = default;

  std::vector<cpu::SharedMemory> memory_;  // own slab first, then those of the peers
  std::shared_ptr<const Processes> processes_;
  std::unique_ptr<cpu::PeerGroup> group_;
  std::unique_ptr<LaneThreads> lanes_;
  Observer observer_;
  int32_t spins_ = 0;  // of a waiter, before it yields
};

}  // namespace echo::pg
