// How a quantized call is issued: under the issue lock it gets its inner group, its place in its pass, its lane and its
// state; then it runs on the worker (CPU tensors) or is enqueued on a stream (device tensors).
#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "../core/tile.h"
#include "gil.hpp"
#include "process_group_echo.hpp"
#include "store_rounds.hpp"

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

}  // namespace

std::string ProcessGroupEcho::describe_call(const at::Tensor& tensor) const {
  return c10::str("rank ", getRank(), " of ", getSize(), ": quantized all_reduce number ", calls_, " (", tensor.numel(),
                  " elements, ", dtype_name(tensor.scalar_type()), ") of group '", description(), "'");
}

WorkPtr ProcessGroupEcho::issue(const at::Tensor& tensor, const CallOptions& options, const CallOrigin& origin) {
  TORCH_CHECK_VALUE(!may_overlap(tensor), "all_reduce got a tensor whose elements may share memory (sizes ",
                    tensor.sizes(), ", strides ", tensor.strides(), "); clone it first");
  open_inner(tensor.device().type());
  std::unique_lock lock(issue_mutex_);
  const std::string what = describe_call(tensor);
  WorkDetails details;
  details.rank = getRank();
  details.call_number = calls_;
  details.what = what;
  details.lane = lanes_->take();
  details.lanes = lanes_;
  QuantizedCall call;
  try {
    call = prepare(tensor, options, origin, details.lane);
  } catch (const std::exception& error) {
    lanes_->free(details.lane);
    std::rethrow_exception(fail_call(*core_, what, "preparing the call", cause_of(error)));
  }
  call.what = what;
  ++calls_;
  core_->stats.add_quantized(tensor.numel() * static_cast<int64_t>(tensor.element_size()));
  const bool first = calls_ == 1;
  const int64_t state_bytes = states_.total_bytes();
  const std::string fabric = call.peer != nullptr ? "peer" : "wire";
  const std::string refusal = core_->peer && call.peer == nullptr ? core_->peer->reason : "";
  details.while_waiting = watch(call);
  WorkPtr work = tensor.is_cpu() ? run_on_worker(std::move(call), std::move(details), lock)
                                 : run_on_stream(std::move(call), std::move(details), options.async_op);
  if (lock.owns_lock()) lock.unlock();
  if (first) log_first_call(tensor.device(), state_bytes, fabric, refusal);
  return work;
}

QuantizedCall ProcessGroupEcho::prepare(const at::Tensor& tensor, const CallOptions& options, const CallOrigin& origin,
                                        int32_t lane) {
  QuantizedCall call;
  call.tensor = tensor;
  const Config& config = core_->config;
  const milliseconds timeout = options.timeout.count() > 0 ? options.timeout : milliseconds(timeout_ms_.load());
  call.peer = peer_fabric(tensor.device(), timeout);
  if (call.peer == nullptr || config.diagnostics) {
    const std::string type = c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true);
    if (!core_->wire.has(tensor.device())) {
      // Its construction does not say who is missing.
      StoreRounds(store_, "wire/" + type, getRank(), getSize(), timeout).exchange("");
    }
    call.inner = core_->wire.get(tensor.device());
  }

  const SiteTicket ticket = passes_.book(origin, options.direction);
  if (ticket.starts_pass) states_.start_pass(ticket.direction);
  call.site = MeasuredSite{
      .direction = ticket.direction,
      .starts_pass = ticket.starts_pass,
      .site = ticket.index,
      .key = SlotKey{.lane = lane, .numel = tensor.numel(), .dtype = quantizable_dtype(tensor.scalar_type())}};

  wire::Call& wire = call.wire;
  wire.plan = make_plan(config, PlanRequest{.numel = tensor.numel(),
                                            .rank = getRank(),
                                            .world_size = getSize(),
                                            .dtype = quantizable_dtype(tensor.scalar_type()),
                                            .early = is_early_site(ticket, passes_.forward_sites(), config.early_count,
                                                                   config.early_fraction)});
  if (wire.plan.feedback.enabled) {
    const Slot slot = states_.acquire(ticket.direction, call.site.key, echo::state_bytes(wire.plan), tensor.device());
    wire.plan.first_site = slot.first_site;
    wire.state = slot.bytes;
  }
  wire.direction = ticket.direction;
  wire.rescale = wants_rescale(config, wire.plan, ticket.direction);
  wire.call_number = calls_;
  wire.exact_calls = exact_calls_;
  wire.workspace_bytes = config.workspace_bytes;
  wire.timeout = timeout;
  if (!tensor.is_cpu()) wire.disagreement = core_->device_fault.word();
  return call;
}

PeerFabric::Setup ProcessGroupEcho::peer_setup(milliseconds timeout) const {
  return {.store = store_,
          .rank = getRank(),
          .size = getSize(),
          .workspace_bytes = core_->config.workspace_bytes,
          .timeout = timeout,
          .observer = core_->peer_observer};
}

// Peer memory for a device's tensors, nullptr where the wire carries them. The first call takes the vote, on all ranks.
PeerFabric* ProcessGroupEcho::peer_fabric(c10::Device device, milliseconds timeout) {
  const Config& config = core_->config;
  if (config.fabric == "wire") return nullptr;
  if (!device.is_cpu()) {
    TORCH_CHECK_WITH(DistBackendError, config.fabric != "peer", "fabric='peer' serves CPU tensors only, not ",
                     device.str());
    return nullptr;
  }
  if (!core_->peer) {
    core_->peer = PeerFabric::make(peer_setup(timeout));
    core_->peer_fabric = core_->peer->fabric.get();
    TORCH_CHECK_WITH(DistBackendError, core_->peer->fabric || config.fabric != "peer",
                     "fabric='peer' was asked for, but ", core_->peer->reason);
  }
  return core_->peer->fabric.get();
}

WorkPtr ProcessGroupEcho::run_on_worker(QuantizedCall call, WorkDetails details,
                                        std::unique_lock<std::mutex>& issue_lock) {
  auto completion = std::make_shared<Completion>(call.tensor, std::vector<c10::Device>{});
  auto work = c10::make_intrusive<WorkEcho>(completion, std::move(details));
  // Profilers keep their state per thread; it is costly to carry over, so only for them.
  auto profiled = at::hasCallbacks() ? std::make_shared<at::ThreadLocalState>() : nullptr;
  auto shared_call = std::make_shared<QuantizedCall>(std::move(call));
  Worker::Job job = [core = core_, completion, shared_call, profiled](bool run) {
    try {
      std::optional<at::ThreadLocalStateGuard> guard;
      if (profiled) guard.emplace(*profiled);
      TORCH_CHECK_WITH(DistBackendError, run, shared_call->what, " never ran: its group was shut down or aborted");
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

c10::Stream ProcessGroupEcho::side_stream(c10::Device device) {
  const auto found = side_streams_.find(device);
  if (found != side_streams_.end()) return found->second;
  const c10::impl::VirtualGuardImpl impl(device.type());
  return side_streams_.emplace(device, impl.getStreamFromGlobalPool(device, /*isHighPriority=*/true)).first->second;
}

// Asynchronous calls run on a stream of the group's own, others on the caller's. Calls share buffers and state, so each
// waits for the one before.
WorkPtr ProcessGroupEcho::run_on_stream(QuantizedCall call, WorkDetails details, bool async_op) {
  const c10::Device device = call.tensor.device();
  const c10::impl::VirtualGuardImpl impl(device.type());
  const c10::Stream callers = impl.getStream(device);
  const c10::Stream stream = async_op ? side_stream(device) : callers;
  if (async_op) {
    c10::Event ready(device.type());
    ready.record(callers);
    ready.block(stream);
  }
  if (last_event_ && *last_stream_ != stream) last_event_->block(stream);

  const at::Tensor tensor = call.tensor;
  auto completion = std::make_shared<Completion>(tensor, std::vector<c10::Device>{device});
  const c10::StreamGuard guard(stream);
  try {
    run_quantized(*core_, call);
  } catch (...) {
    lanes_->free(details.lane);
    throw;
  }
  if (async_op) {
    impl.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    if (call.wire.state.defined()) impl.recordDataPtrOnStream(call.wire.state.storage().data_ptr(), stream);
  }
  last_event_.emplace(device.type());
  last_event_->record(stream);
  last_stream_ = stream;
  completion->succeed();

  details.device_done.emplace(device.type());
  details.device_done->record(stream);
  auto work = c10::make_intrusive<WorkEcho>(std::move(completion), std::move(details));
  if (!async_op) work->wait();
  return work;
}

// While a caller waits: says so once it takes long, and gives up when the call hangs where no time limit reaches it.
std::function<void(milliseconds)> ProcessGroupEcho::watch(const QuantizedCall& call) {
  const milliseconds limit = call.wire.timeout * kStuckFactor + kSayWaitingAfter;
  return [core = core_, worker = std::weak_ptr(worker_), what = call.what, limit,
          said = std::make_shared<std::atomic<bool>>(false)](milliseconds waited) {
    if (waited >= kSayWaitingAfter && !said->exchange(true)) {
      emit_notice(c10::str(what, " has waited ", waited.count() / 1000, " s for the other ranks"), "warning");
    }
    const auto alive = worker.lock();
    if (alive && alive->running_for() > limit) {
      std::rethrow_exception(fail_call(*core, what, "exchange", "stuck in the inner backend, beyond its time limit"));
    }
  };
}

void ProcessGroupEcho::log_first_call(c10::Device device, int64_t state_bytes, const std::string& fabric,
                                      const std::string& refusal) {
  if (getRank() != 0) return;
  if (!refusal.empty()) {
    emit_notice("group " + description() + ": no peer memory, codes go through the inner backend: " + refusal,
                "warning");
  }
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
