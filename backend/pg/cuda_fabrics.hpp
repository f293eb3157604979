// Peer memory of a group by device, as the rest of the backend sees it; builds without CUDA have none.
//
// A vote is taken at the first call on a device. The n-th device that a rank uses in a group belongs to the n-th of
// every other rank.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../wire/allreduce.h"
#include "fault_reports.hpp"
#include "settings.hpp"
#include "stream_order.hpp"

namespace echo::pg {

class CudaFabric;

class CudaFabrics {
 public:
  struct Member {
    c10::intrusive_ptr<c10d::Store> store;
    int32_t rank = 0;
    int32_t size = 1;
    std::chrono::milliseconds timeout{0};
    const FaultReports* reports = nullptr;
    Observer observer;  // for tests
  };

  // A vote's outcome: a fabric, or why there is none.
  struct Outcome {
    std::shared_ptr<CudaFabric> fabric;
    std::string reason;
  };

  // Why the kernels of this build do not run on this process's device, empty if they do.
  static std::string missing_code(c10::Device device);

  // Collective: the same for the devices of all ranks, found out once. Callers hold the group's issue lock.
  std::string_view vote_on_code(c10::Device device, const Member& member);
  // What that vote came to; nullptr where none was taken yet.
  const std::string* code_obstacle(c10::Device device) const;

  // Of a device on which no call was made yet: nullptr.
  const Outcome* outcome(c10::Device device) const;

  // Collective: takes the vote. Callers hold the group's issue lock.
  const Outcome& vote(c10::Device device, const Config& config, const Member& member);

  // Enqueues a call on `stream`. Callers hold the turn of order_of(device).
  static wire::Receipt all_reduce(CudaFabric& fabric, const wire::Call& call, const c10::Stream& stream, bool captured);

  // See CudaFabric::join_update. By the same callers, before the call or anything else that reads the state.
  static void join_update(CudaFabric& fabric, const c10::Stream& stream, bool captured);

  // Kernels that wait for peers may fill a device, and two of them of different groups could then wait for each other
  // across ranks: one such call at a time per device and process, whatever the group.
  static StreamOrder& order_of(c10::Device device);

  // For tests: how far a fabric has counted, as tiles of its first lane and as calls; and from where it is to count,
  // on all ranks alike and while no call of any rank is under way.
  static std::pair<uint64_t, uint64_t> counters(const CudaFabric& fabric);
  static void count_from(CudaFabric& fabric, uint64_t tiles, uint64_t calls);

  // The rest is for any thread and never blocks, close() apart.

  // The first fault of any fabric, in words; empty if there is none.
  std::string fault_text() const;
  void abort(const std::string& reason);
  // Gives memory back where nobody can use it any more; see CudaFabric::close. `healthy`: the group has not failed.
  void close(bool healthy);
  int64_t slab_bytes() const;
  // Bytes that calls keep for updates on a stream of their own.
  int64_t kept_bytes() const;
  // Why calls on some device do without peer memory, empty if none does.
  std::string refusal() const;
  bool has_fabric() const;

 private:
  mutable std::mutex mutex_;
  std::map<c10::DeviceIndex, std::string> code_obstacles_;  // entries never go, as in the next
  std::map<c10::DeviceIndex, Outcome> outcomes_;
  std::atomic<bool> any_{false};  // a fabric exists
};

}  // namespace echo::pg
