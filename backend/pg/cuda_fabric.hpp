// Peer memory between the GPUs of one host: the vote on whether to use it, the slabs, and the watch over the peers. In
// builds with CUDA only; cuda_fabrics.hpp is what the rest of the backend sees.
//
// The vote goes as that of peer_fabric.hpp: rounds over the store that every rank takes part in whatever it found, so
// that all end with peer memory of one shape or with one reason for doing without.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../core/moment.h"
#include "../cpu/shared_memory.h"
#include "../cuda/peer_allreduce.h"
#include "../cuda/peer_memory.h"
#include "deferred_update.hpp"
#include "fault_reports.hpp"
#include "notice_board.hpp"

namespace echo::pg {

class StoreRounds;

class CudaFabric {
 public:
  struct Setup {
    c10::intrusive_ptr<c10d::Store> store;
    std::string name;  // of the vote, apart from other votes of the group
    c10::Device device{c10::kCUDA, 0};
    int32_t rank = 0;
    int32_t size = 1;
    int64_t workspace_bytes = 0;
    bool allow_shared_gpu = false;
    std::chrono::milliseconds timeout{0};
    const FaultReports* reports = nullptr;
    Observer observer;  // for tests
  };

  // Either a fabric, or the reason, equal on all ranks, why there is none.
  struct Vote {
    std::shared_ptr<CudaFabric> fabric;
    std::string reason;
  };

  // Collective over the store. Throws c10::DistBackendError where a rank does not answer in time.
  static Vote make(const Setup& setup);

  // Leaves what close() has not given back to the end of the process.
  ~CudaFabric();

  // Enqueues a call on `stream`, whose exact_calls counts from the beginning of the group; returns the bytes that it
  // puts into peers' memory. `state` owns call.site.state. `captured`: a graph records it. `observe`: for tests, may be
  // empty. Pre: join_update.
  int64_t all_reduce(cuda::PeerCall call, const at::Tensor& state, const c10::Stream& stream, bool captured,
                     const std::function<void(Step)>& observe);

  // `stream` waits until the update that the latest call has left to a stream of its own has run: before the next call,
  // and before anything else that reads the state.
  void join_update(const c10::Stream& stream, bool captured);

  // The fault that ended this fabric, in words; empty if there is none. Never blocks, calls no CUDA.
  std::string fault_text() const;

  // Ends all waiting, here and on the peers, who learn the reason.
  void abort(const std::string& reason);

  // Gives the memory back once nobody uses it any more: own calls are done, `calls_done`, and every peer has closed its
  // mappings or is gone. Waits a few seconds for that; where it does not come about, the memory stays.
  void close(bool calls_done);

  // For tests: see cuda::PeerGroup.
  void count_from(cuda::Counters counters);
  cuda::Counters counters() const;

  int64_t slab_bytes() const { return echo::slab_bytes(shape_); }

  // Bytes that calls keep for their updates.
  int64_t kept_bytes() const { return kept_bytes_; }

 private:
  explicit CudaFabric(const Setup& setup);

  std::string offer();
  std::string map_peers(const std::vector<std::string>& offers);
  std::string try_writes(cuda::PeerTrial& trial);
  std::string try_reads(cuda::PeerTrial& trial);
  std::string make_group();
  std::string open_together(StoreRounds& rounds);
  void close_together(StoreRounds& rounds, bool slabs_in_use);
  void unmap_peers();
  void watch();
  void stop_watch();

  const c10::Device device_;
  const int32_t rank_;
  SlabShape shape_;
  std::vector<cuda::PeerSlab> slabs_;  // by rank
  std::shared_ptr<const Processes> processes_;
  const Observer observer_;  // of the vote
  NoticeBoard board_;

  // close() alone takes it exclusively. Others share it: a launch may wait for room in the device's queue, and an abort
  // must not wait for that launch. Calls follow each other by the issue lock of their process group.
  mutable std::shared_mutex group_mutex_;
  std::unique_ptr<cuda::PeerGroup> group_;
  uint64_t exact_calls_ = 0;  // of the group before its latest call on this fabric
  bool captured_ = false;     // a graph holds calls
  DeferredUpdate update_;
  std::atomic<int64_t> kept_bytes_{0};

  std::mutex watch_mutex_;
  std::condition_variable watch_ends_;
  bool stopping_ = false;
  std::thread watcher_;
};

}  // namespace echo::pg
