// The c10d backend: all-reduces that the policy chooses run quantized, everything else goes to inner backends
// unchanged.
//
//   allreduce -> decide (policy) -> quantized: book pass and site, take lane and state, run on the worker or a stream
//                                -> exact:     the inner backend's own Work
//
// One instance may serve several device types, each with an inner backend. The order in which quantized calls are
// issued on the host is the order on all ranks; `issue_mutex_` keeps it while a call takes its number, its lane and its
// place in the queue.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "derived_groups.hpp"
#include "device_work.hpp"
#include "inner_groups.hpp"
#include "lanes.hpp"
#include "pass_tracker.hpp"
#include "plan_check.hpp"
#include "quantized_call.hpp"
#include "settings.hpp"
#include "state_pool.hpp"
#include "stream_order.hpp"
#include "torch_version.hpp"
#include "work.hpp"
#include "worker.hpp"

namespace echo::pg {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

// The dtype's name in torch, as options and facts have it.
std::string_view dtype_name(at::ScalarType dtype);

// Bytes of the elements; sparse tensors count as none.
int64_t dense_bytes(const Tensors& tensors);

// Throws c10::DistBackendError in any process but `home`, in which the group was made.
void check_at_home(pid_t home);

struct GroupSetup {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  Config config;
  BackendsByDevice inner;        // for forwarded calls
  InnerGroups::Make make_later;  // that of CUDA tensors, if it is not among them
  WireGroups::Make make_wire;
  GroupDeriver deriver;
  std::shared_ptr<const Processes> processes;
  std::chrono::milliseconds timeout{0};        // of echo's own exchanges
  std::chrono::milliseconds inner_timeout{0};  // of the inner backends
  bool prefers_device_barriers = false;        // barriers without a device go over the accelerator's backend
};

// What _stats() reports, taken at one moment.
struct GroupReport {
  std::string group;
  std::string fabric;
  std::string fabric_reason;  // why calls do without peer memory, empty if they do not or were told to
  std::string fault;
  StatsSnapshot counts;
  int64_t state_bytes = 0;
  int64_t workspace_bytes = 0;
  std::array<int64_t, kDirections> passes{};
  std::array<int64_t, kDirections> sites{};
  std::array<int64_t, kDirections> last_sites{};
};

class ProcessGroupEcho : public c10d::Backend {
 public:
  // Throws c10::ValueError for a configuration that makes no sense.
  explicit ProcessGroupEcho(GroupSetup setup);
  ~ProcessGroupEcho() override;

  // --- quantized or exact: process_group_echo.cpp, issue.cpp and group_report.cpp ---
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;

  // Quantizes whatever the policy says. Throws c10::ValueError for tensors that cannot be quantized. A group of one
  // rank and an empty tensor need no exchange: they are complete at once.
  WorkPtr all_reduce_quantized(const at::Tensor& tensor, bool async_op, std::optional<Direction> direction);

  // What allreduce() would do with this tensor if it were called here and now.
  Decision explain(const at::Tensor& tensor, const std::string& op);

  void new_pass(Direction direction);

  // Between passes: how many sites the forward pass had that was the last, which `early_sites` as a fraction refers to;
  // empty if there was none. Nothing else outlives a pass.
  std::optional<int64_t> last_forward_sites();
  // As if such a pass had gone before. Throws c10::ValueError once the group has quantized.
  void resume_after(int64_t forward_sites);

  // For benchmarks: look-ahead of later calls over peer memory on CPU, in tiles; the default is kLookAhead, 0 takes
  // the overlap out. Equal on all ranks. Throws c10::ValueError outside [0, kLookAhead].
  void set_look_ahead(int64_t tiles);
  // The device's current stream waits for the update that the latest call has left to a stream of its own, if any.
  void join_update(c10::Device device);

  GroupReport report();
  std::vector<SiteErrors> site_errors(Direction direction) const { return core_->diagnostics.errors(direction); }
  std::string description() const;
  const Config& config() const { return core_->config; }
  // Of its ranks, by rank; empty where the ranks were not introduced.
  const std::vector<std::string>& introductions() const { return core_->reports.processes()->introductions(); }
  // Throws c10::ValueError if there is none.
  BackendPtr inner(c10::DeviceType type);
  // For tests, before the first quantized call.
  void observe(Observer observer);
  // For tests: the fabric over peer memory of a CUDA device; an error before the first quantized call on it.
  CudaFabric& cuda_fabric(c10::Device device) const;

  // --- life cycle: lifecycle.cpp ---
  void shutdown() override;
  void abort() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
#if ECHO_TORCH_AT_LEAST(10)
  void setGroupUid(const std::string& pg_uid) override;
#endif
  c10d::ErrorType getError() override;
  bool supportsCoalescing() const override;
  bool supportsTimeEstimation() const override { return false; }

  // --- derived groups: derived_groups.cpp ---
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  // Null on ranks that are not among `ranks`. torch up to 2.13 calls it once per device type with one store, and gets
  // the same group each time. Throws c10::ValueError for a rank out of range; what making the group throws.
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& options) override;
  BackendPtr merge(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& options,
                   const int& rank, const int& size) override;
#if ECHO_TORCH_AT_LEAST(10)
  bool supportsShrinking() const override { return true; }
  BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                    const c10::intrusive_ptr<Options>& options) override;
#endif

  // --- forwarded: passthrough.cpp ---
  const std::string getBackendName() const override { return "echo"; }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;
  void eagerConnectSingleDevice(at::Device device) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex index) override;
#if ECHO_TORCH_AT_LEAST(12)
  void suspend() override;
  void resume() override;
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;
#endif
#if ECHO_TORCH_AT_LEAST(14)
  // The names that torch prefers from now on; it gives each older name the newer one as its default and the reverse.
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& options) override;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) override;
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                            std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;
#endif

 private:
  struct CallOptions {
    bool async_op = true;
    std::chrono::milliseconds timeout{0};
    std::optional<Direction> direction;
    uint64_t capture = 0;  // names the recording that the current stream takes part in, 0 for none
  };

  // What calls on one device share.
  struct DeviceStreams {
    explicit DeviceStreams(c10::Device device);

    c10::Stream side;   // asynchronous calls run there
    c10::Event ready;   // recorded where such a call was made
    StreamOrder order;  // of calls over the wire
    std::shared_ptr<EventPool> events = std::make_shared<EventPool>();
  };

  // The inner backend for a device type, after telling it what torch told this one. Raises if the group has failed or
  // was closed.
  c10d::Backend& open_inner(c10::DeviceType type);
  void check_alive() const;
  // False in a process forked from the one that made the group: it has neither its threads nor its shared memory, and
  // its locks may be held for ever.
  bool is_at_home() const { return getpid() == home_; }
  // The inner backend of the accelerator if one was made by now, else the only one.
  c10::DeviceType main_device() const;
  // The same for what only accelerators have: made now if it was to be made later.
  c10::DeviceType accelerator();
  c10::DeviceType barrier_device(const c10d::BarrierOptions& options);
  std::optional<c10::Device> bound_device();
  BackendPtr derive(const DerivedGroup& wanted);

  template <typename Operation>
  WorkPtr forward(c10::DeviceType type, Operation&& operation);
  // CPU tensors over Gloo go in parts whose waits can end; everything else by `operation`.
  WorkPtr forward_reduce_scatter(const Tensors& outputs, const Tensors& inputs,
                                 const c10d::ReduceScatterOptions& options,
                                 const std::function<WorkPtr(c10d::Backend&)>& operation);
  WorkPtr hand_out(const c10d::Backend& inner, c10::DeviceType type, WorkPtr work);
  WorkPtr collect(const c10d::Backend& inner, WorkPtr work);

  CallFacts facts_of(const at::Tensor& tensor, std::string_view op, const CallOrigin& origin, uint64_t capture);
  bool can_be_captured(c10::Device device) const;
  GroupKind group_kind();
  WorkPtr allreduce_exact(Tensors& tensors, const c10d::AllreduceOptions& options, const std::string& reason,
                          const CallOrigin& origin);
  WorkPtr issue(const at::Tensor& tensor, const CallOptions& options, const CallOrigin& origin);
  QuantizedCall prepare(const at::Tensor& tensor, const CallOptions& options, const CallOrigin& origin, int32_t lane);
  WorkPtr run_on_worker(QuantizedCall call, std::unique_lock<std::recursive_mutex>& issue_lock);
  WorkPtr run_on_stream(QuantizedCall call, const CallOptions& options);
  CallName name_call(const at::Tensor& tensor, const std::string& reason = {}) const;
  void check_capture(c10::Device device) const;
  DeviceStreams& streams_of(c10::Device device);
  std::function<void(std::chrono::milliseconds)> watch(const QuantizedCall& call);

  PeerFabric::Setup peer_setup(std::chrono::milliseconds timeout) const;
  StoreRounds rounds(const std::string& name, std::chrono::milliseconds timeout) const;
  void check_plan(const Tensors& tensors, const Decision& decision);
  void choose_fabric(QuantizedCall& call, c10::Device device, std::chrono::milliseconds timeout);
  CudaFabrics::Member cuda_member(std::chrono::milliseconds timeout) const;
  // Collective at the first call on a CUDA device: why its kernels cannot run on all ranks, empty if they can.
  std::string agree_on_code(const at::Tensor& tensor, std::chrono::milliseconds timeout);
  void take_vote(c10::Device device, std::chrono::milliseconds timeout);
  void log_first_call(c10::Device device, int64_t state_bytes, const std::string& fabric);
  void warn_if_idle(int64_t passes);
  void note_reduce_scatter();
  // Counts an all-reduce of a kind that is never quantized.
  void note_exact(const char* reason, const Tensors& tensors, const c10d::ReduceOp& op);
  void log_call(const Tensors& tensors, std::string_view op, const CallOrigin& origin, const Decision& decision) const;
  void log_destroyed();
  void close(bool aborting);

  const pid_t home_ = getpid();
  const std::shared_ptr<GroupCore> core_;
  const PolicyRules rules_;
  const c10::intrusive_ptr<c10d::Store> store_;
  InnerGroups inner_;
  const bool prefers_device_barriers_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<bool> closed_{false};

  // Guards what follows, up to the lanes. Recursive because the first call runs signal handlers while it waits for its
  // peers, and one of them may ask for statistics.
  std::recursive_mutex issue_mutex_;
  PassTracker passes_;
  StatePool states_;
  uint64_t calls_ = 0;           // quantized calls issued
  uint64_t exact_calls_ = 0;     // all-reduces forwarded
  int64_t reduce_scatters_ = 0;  // in a module's forward
  bool idle_warned_ = false;
  std::string classified_description_;
  std::optional<GroupKind> kind_;
  std::shared_ptr<const std::string> name_;  // description(), as of the latest call
  std::unordered_map<c10::Device, std::unique_ptr<DeviceStreams>> streams_;
  const std::shared_ptr<LaneTable> lanes_ = std::make_shared<LaneTable>();
  std::optional<PlanCheck> plan_check_;  // with diagnostics

  const GroupDeriver deriver_;
  struct LatestDerived {
    c10::weak_intrusive_ptr<c10d::Store> store;
    c10::weak_intrusive_ptr<c10d::Backend> group;
  };
  std::mutex derived_mutex_;
  std::optional<LatestDerived> derived_;

  std::mutex bracket_mutex_;
  bool bracket_open_ = false;
  std::vector<WorkPtr> bracket_works_;

  const std::shared_ptr<Worker> worker_ = std::make_shared<Worker>();
};

}  // namespace echo::pg
