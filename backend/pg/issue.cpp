// How a quantized call is issued: under the issue lock it gets its fabric, its place in its pass, its lane and its
// state; then it runs on the worker (CPU tensors) or is enqueued on a stream (device tensors, issue_on_device.cpp).
#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <pybind11/pybind11.h>

#include <algorithm>

#include "../core/tile.h"
#include "gil.hpp"
#include "process_group_echo.hpp"
#include "signals.hpp"
#include "store_rounds.hpp"
#include "watched_wait.hpp"

namespace echo::pg {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSayWaitingAfter{30'000};

// Inner exchanges have their own time limit, several of them in a row make a call; one that runs much longer is stuck
// inside the inner backend.
constexpr int kStuckFactor = 3;

// Elements that share memory cannot hold a result. Dimensions sorted by stride must each step over all that the smaller
// ones span; the rare interleaved layouts that fail this without overlapping are refused too.
bool may_overlap(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return false;
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.push_back(d);
  }
  std::sort(dims.begin(), dims.end(), [&](int64_t x, int64_t y) { return tensor.stride(x) < tensor.stride(y); });
  int64_t span = 0;
  for (const int64_t d : dims) {
    if (tensor.stride(d) <= span) return true;
    span += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return false;
}

std::string cause_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

// For a handler: ends the group over a call that failed before anything of it ran, and throws. `refuses`: the call is
// refused instead, on all ranks alike, and the group goes on.
[[noreturn]] void fail_preparing(GroupCore& core, const CallName& what, bool refuses) {
  constexpr const char* kPhase = "preparing the call";
  try {
    throw;
  } catch (const pybind11::error_already_set&) {  // of a signal handler
    core.aborting = true;                         // the peers are told, but not asked
    fail_call(core, what, kPhase, "interrupted by a signal on this rank");
    throw;
  } catch (const std::exception& error) {
    if (refuses) throw;
    std::rethrow_exception(fail_call(core, what, kPhase, cause_of(error)));
  }
}

}  // namespace

// Callers hold the issue lock.
CallName ProcessGroupEcho::name_call(const at::Tensor& tensor, const std::string& reason) const {
  return CallName{.rank = getRank(),
                  .size = getSize(),
                  .number = reason.empty() ? calls_ : exact_calls_,
                  .numel = tensor.numel(),
                  .dtype = dtype_name(tensor.scalar_type()),
                  .group = name_,
                  .reason = reason};
}

WorkPtr ProcessGroupEcho::issue(const at::Tensor& tensor, const CallOptions& options, const CallOrigin& origin) {
  TORCH_CHECK_VALUE(!may_overlap(tensor), "all_reduce got a tensor whose elements may share memory (sizes ",
                    tensor.sizes(), ", strides ", tensor.strides(), "); clone it first");
  open_inner(tensor.device().type());
  std::unique_lock lock(issue_mutex_);
  if (options.capture != 0) check_capture(tensor.device());
  const CallName what = name_call(tensor);
  const int32_t lane = lanes_->take();
  QuantizedCall call;
  try {
    call = prepare(tensor, options, origin, lane);
  } catch (...) {
    lanes_->free(lane);
    fail_preparing(*core_, what, options.capture != 0);  // nothing was recorded
  }
  call.what = what;
  ++calls_;
  core_->stats.add_quantized(tensor.numel() * static_cast<int64_t>(tensor.element_size()));
  const bool first = calls_ == 1;
  const int64_t state_bytes = first ? states_.total_bytes() : 0;
  const char* const fabric = call.peer != nullptr || call.cuda_peer != nullptr ? "peer" : "wire";
  WorkPtr work = tensor.is_cpu() ? run_on_worker(std::move(call), lock) : run_on_stream(std::move(call), options);
  if (lock.owns_lock()) lock.unlock();
  if (first) log_first_call(tensor.device(), state_bytes, fabric);
  return work;
}

QuantizedCall ProcessGroupEcho::prepare(const at::Tensor& tensor, const CallOptions& options, const CallOrigin& origin,
                                        int32_t lane) {
  QuantizedCall call;
  call.tensor = tensor;
  call.captured = options.capture != 0;
  const Config& config = core_->config;
  const milliseconds timeout = options.timeout.count() > 0 ? options.timeout : milliseconds(timeout_ms_.load());
  choose_fabric(call, tensor.device(), timeout);
  // A device's first stream takes memory. Where there is none the call fails here, and the peers are told; the fabric,
  // whose error says how much is free, asks before.
  if (!tensor.is_cpu()) streams_of(tensor.device());

  const SiteTicket ticket = passes_.book(origin, options.direction);
  if (ticket.starts_pass) states_.start_pass(ticket.direction, call.captured);
  call.site = MeasuredSite{.direction = ticket.direction,
                           .starts_pass = ticket.starts_pass,
                           .site = ticket.index,
                           .key = SlotKey{.lane = lane,
                                          .half = ticket.half,
                                          .numel = tensor.numel(),
                                          .dtype = quantizable_dtype(tensor.scalar_type())}};

  wire::Call& wire = call.wire;
  wire.plan = make_plan(config, PlanRequest{.numel = tensor.numel(),
                                            .rank = getRank(),
                                            .world_size = getSize(),
                                            .dtype = quantizable_dtype(tensor.scalar_type()),
                                            .early = is_early_site(ticket, passes_.forward_sites(), config.early_count,
                                                                   config.early_fraction),
                                            .recompute = ticket.direction == Direction::kRecompute});
  if (wire.plan.feedback.enabled) {
    const Slot slot =
        states_.acquire(ticket.direction, call.site.key, echo::state_bytes(wire.plan), tensor.device(), call.captured);
    wire.plan.first_site = slot.first_site;
    wire.state = slot.bytes;
  }
  wire.direction = ticket.direction;
  wire.rescale = wants_rescale(config, wire.plan, ticket.direction);
  wire.call_number = calls_;
  wire.exact_calls = exact_calls_;
  wire.workspace_bytes = config.workspace_bytes;
  wire.timeout = timeout;
  wire.observer = core_->observer;
  if (tensor.is_cpu()) {
    wire.wait = [processes = core_->reports.processes()](c10d::Work& work) {
      const std::string exited = wait_while_all_live(work, *processes);
      TORCH_CHECK_WITH(DistBackendError, exited.empty(), exited);
    };
  } else {
    wire.disagreement = core_->device_fault.word();
  }
  return call;
}

PeerFabric::Setup ProcessGroupEcho::peer_setup(milliseconds timeout) const {
  return {.store = store_,
          .rank = getRank(),
          .size = getSize(),
          .workspace_bytes = core_->config.workspace_bytes,
          .timeout = timeout,
          .reports = &core_->reports,
          .observer = core_->observer};
}

// The first call on a kind of memory takes the vote on it, on all ranks.
void ProcessGroupEcho::choose_fabric(QuantizedCall& call, c10::Device device, milliseconds timeout) {
  const Config& config = core_->config;
  if (config.fabric != "wire") {
    if (device.is_cpu() ? !core_->peer : core_->cuda_fabrics.outcome(device) == nullptr) take_vote(device, timeout);
    if (device.is_cpu()) {
      call.peer = core_->peer->fabric.get();
    } else {
      call.cuda_peer = core_->cuda_fabrics.outcome(device)->fabric.get();
    }
  }
  if ((call.peer != nullptr || call.cuda_peer != nullptr) && !config.diagnostics) return;
  if (!core_->wire.has(device)) {
    // Its construction does not say who is missing.
    const std::string type = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
    rounds("wire/" + type, timeout).exchange("");
  }
  call.inner = core_->wire.get(device);
}

CudaFabrics::Member ProcessGroupEcho::cuda_member(milliseconds timeout) const {
  return {.store = store_,
          .rank = getRank(),
          .size = getSize(),
          .timeout = timeout,
          .reports = &core_->reports,
          .observer = core_->observer};
}

// A build has no code for some GPUs, and those of one group may differ: all ranks are asked at the first call on a
// device that would be quantized.
std::string ProcessGroupEcho::agree_on_code(const at::Tensor& tensor, milliseconds timeout) {
  const c10::Device device = tensor.device();
  if (!device.is_cuda()) return {};
  open_inner(device.type());
  const std::lock_guard lock(issue_mutex_);
  if (const std::string* known = core_->cuda_fabrics.code_obstacle(device)) return *known;
  std::string obstacle;
  try {
    obstacle = core_->cuda_fabrics.vote_on_code(
        device, cuda_member(timeout.count() > 0 ? timeout : milliseconds(timeout_ms_.load())));
  } catch (...) {
    fail_preparing(*core_, name_call(tensor), false);
  }
  if (!obstacle.empty() && getRank() == 0) {
    emit_notice("group " + description() + ": all-reduces of CUDA tensors are forwarded: " + obstacle, "warning");
  }
  return obstacle;
}

void ProcessGroupEcho::take_vote(c10::Device device, milliseconds timeout) {
  const Config& config = core_->config;
  std::string reason;
  if (device.is_cpu()) {
    core_->peer = PeerFabric::make(peer_setup(timeout));
    core_->peer_fabric = core_->peer->fabric.get();
    reason = core_->peer->reason;
  } else {
    reason = core_->cuda_fabrics.vote(device, config, cuda_member(timeout)).reason;
  }
  TORCH_CHECK_WITH(DistBackendError, reason.empty() || config.fabric != "peer", "fabric='peer' was asked for, but ",
                   reason);
  if (!reason.empty() && getRank() == 0) {
    emit_notice("group " + description() + ": no peer memory, codes go through the inner backend: " + reason,
                "warning");
  }
}

WorkPtr ProcessGroupEcho::run_on_worker(QuantizedCall call, std::unique_lock<std::recursive_mutex>& issue_lock) {
  auto completion = std::make_shared<Completion>(call.tensor);
  WorkDetails details;
  details.what = call.what;
  details.lane = call.site.key.lane;
  details.lanes = lanes_;
  details.while_waiting = watch(call);
  auto work = c10::make_intrusive<WorkEcho>(completion, std::move(details));
  // Profilers keep their state per thread; it is costly to carry over, so only for them.
  auto profiled = at::hasCallbacks() ? std::make_shared<at::ThreadLocalState>() : nullptr;
  auto shared_call = std::make_shared<QuantizedCall>(std::move(call));
  Worker::Job job = [core = core_, completion, shared_call, profiled](bool run) {
    try {
      std::optional<at::ThreadLocalStateGuard> guard;
      if (profiled) guard.emplace(*profiled);
      TORCH_CHECK_WITH(DistBackendError, run, shared_call->what.text(),
                       " never ran: its group was shut down or aborted");
      run_quantized(*core, *shared_call);
    } catch (...) {
      completion->fail(std::current_exception());
      return;
    }
    completion->succeed();
  };
  if (worker_->is_this_thread()) {
    issue_lock.unlock();
    job(true);
  } else {
    worker_->enqueue(std::move(job));
  }
  return work;
}

// While a caller waits: says so once it takes long, and gives up when the call hangs where no time limit reaches it, or
// when a signal handler raises. The group ends then, since its peers must not wait for a rank that has left the call.
std::function<void(milliseconds)> ProcessGroupEcho::watch(const QuantizedCall& call) {
  const milliseconds limit = call.wire.timeout * kStuckFactor + kSayWaitingAfter;
  return [home = home_, weak = std::weak_ptr(core_), worker = std::weak_ptr(worker_), what = call.what, limit,
          said = std::make_shared<std::atomic<bool>>(false)](milliseconds waited) {
    check_at_home(home);
    const std::shared_ptr<GroupCore> core = weak.lock();
    if (!core) return;  // the call is over, and so is the group
    unless_interrupted(run_signal_handlers, [&] {
      core->aborting = true;  // the peers are told, but not asked
      fail_call(*core, what, "waiting", "interrupted by a signal on this rank");
    });
    if (waited >= kSayWaitingAfter && !said->exchange(true)) {
      emit_notice(c10::str(what.text(), " has waited ", waited.count() / 1000, " s for the other ranks"), "warning");
    }
    const auto alive = worker.lock();
    if (alive && alive->running_for() > limit) {
      std::rethrow_exception(fail_call(*core, what, "exchange", "stuck in the inner backend, beyond its time limit"));
    }
  };
}

void ProcessGroupEcho::log_first_call(c10::Device device, int64_t state_bytes, const std::string& fabric) {
  if (getRank() != 0) return;
  const Config& config = core_->config;
  emit(LogEvent{"first_quantized",
                {{"group", description()},
                 {"rank", int64_t{getRank()}},
                 {"size", int64_t{getSize()}},
                 {"fabric", fabric},
                 {"bits", config.bits},
                 {"quantizer", config.quantizer},
                 {"rotation_size", config.rotation_size},
                 {"feedback", config.feedback},
                 {"state_bytes", state_bytes},
                 {"device", device.str()}}});
}

}  // namespace echo::pg
