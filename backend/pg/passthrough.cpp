// Every other operation goes to the inner backend of its tensors' device, under the same name and with the caller's own
// options; what the inner backend returns is returned, for CPU tensors in a Work whose wait Ctrl-C ends, and what it
// throws is thrown.
#include "devices_in_use.hpp"
#include "gil.hpp"
#include "interruptible_work.hpp"
#include "process_group_echo.hpp"

namespace echo::pg {
namespace {

// The device of an operation is that of its first tensor; an operation without any goes to `otherwise`.
c10::DeviceType device_of(const Tensors& tensors, c10::DeviceType otherwise) {
  return tensors.empty() ? otherwise : tensors.front().device().type();
}

c10::DeviceType device_of(const TensorLists& lists, c10::DeviceType otherwise) {
  for (const Tensors& tensors : lists) {
    if (!tensors.empty()) return tensors.front().device().type();
  }
  return otherwise;
}

}  // namespace

template <typename Operation>
WorkPtr ProcessGroupEcho::forward(c10::DeviceType type, Operation&& operation) {
  const GilRelease no_gil;
  c10d::Backend& inner = open_inner(type);
  core_->stats.add_other();
  return hand_out(inner, type, operation(inner));
}

WorkPtr ProcessGroupEcho::hand_out(const c10d::Backend& inner, c10::DeviceType type, WorkPtr work) {
  if (type == c10::DeviceType::CPU) work = make_interruptible(std::move(work), core_->forwarded);
  return collect(inner, std::move(work));
}

WorkPtr ProcessGroupEcho::forward_reduce_scatter(const Tensors& outputs, const Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& options,
                                                 const std::function<WorkPtr(c10d::Backend&)>& operation) {
  return forward(device_of(inputs, main_device()), [&](c10d::Backend& inner) {
    WorkPtr work;
    if (inner.getBackendName() == "gloo") {
      work = reduce_then_scatter(inner, outputs, inputs, options, core_->forwarded);
    }
    return work ? work : operation(inner);
  });
}

WorkPtr ProcessGroupEcho::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return forward(device_of(tensors, main_device()), [&](auto& inner) { return inner.broadcast(tensors, options); });
}

WorkPtr ProcessGroupEcho::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const GilRelease no_gil;
  const c10::DeviceType type = device_of(tensors, main_device());
  c10d::Backend& inner = open_inner(type);
  note_exact("sparse tensor", tensors, options.reduceOp);
  return hand_out(inner, type, inner.allreduce_sparse(tensors, options));
}

WorkPtr ProcessGroupEcho::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const GilRelease no_gil;
  const c10::DeviceType type = device_of(tensors, main_device());
  c10d::Backend& inner = open_inner(type);
  note_exact("several tensors", tensors, options.reduceOp);
  return hand_out(inner, type, inner.allreduce_coalesced(tensors, options));
}

WorkPtr ProcessGroupEcho::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return forward(device_of(tensors, main_device()), [&](auto& inner) { return inner.reduce(tensors, options); });
}

WorkPtr ProcessGroupEcho::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return forward(device_of(inputs, main_device()),
                 [&](auto& inner) { return inner.allgather(outputs, inputs, options); });
}

WorkPtr ProcessGroupEcho::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  return forward(input.device().type(), [&](auto& inner) { return inner._allgather_base(output, input, options); });
}

WorkPtr ProcessGroupEcho::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  return forward(device_of(inputs, main_device()),
                 [&](auto& inner) { return inner.allgather_coalesced(outputs, inputs, options); });
}

WorkPtr ProcessGroupEcho::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  return forward(device_of(inputs, main_device()),
                 [&](auto& inner) { return inner.allgather_into_tensor_coalesced(outputs, inputs, options); });
}

WorkPtr ProcessGroupEcho::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return forward(device_of(inputs, main_device()), [&](auto& inner) { return inner.gather(outputs, inputs, options); });
}

WorkPtr ProcessGroupEcho::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  return forward(device_of(outputs, main_device()),
                 [&](auto& inner) { return inner.scatter(outputs, inputs, options); });
}

WorkPtr ProcessGroupEcho::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  note_reduce_scatter();
  const c10::DeviceType type = device_of(outputs, device_of(inputs, main_device()));
  return forward(type, [&](auto& inner) { return inner.reduce_scatter(outputs, inputs, options); });
}

WorkPtr ProcessGroupEcho::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  note_reduce_scatter();
  return forward_reduce_scatter({output}, {input}, options,
                                [&](auto& inner) { return inner._reduce_scatter_base(output, input, options); });
}

WorkPtr ProcessGroupEcho::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  note_reduce_scatter();
  return forward_reduce_scatter(outputs, inputs, options, [&](auto& inner) {
    return inner.reduce_scatter_tensor_coalesced(outputs, inputs, options);
  });
}

WorkPtr ProcessGroupEcho::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  return forward(input.device().type(),
                 [&](auto& inner) { return inner.alltoall_base(output, input, output_sizes, input_sizes, options); });
}

WorkPtr ProcessGroupEcho::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return forward(device_of(inputs, main_device()),
                 [&](auto& inner) { return inner.alltoall(outputs, inputs, options); });
}

WorkPtr ProcessGroupEcho::send(Tensors& tensors, int destination, int tag) {
  return forward(device_of(tensors, main_device()), [&](auto& inner) { return inner.send(tensors, destination, tag); });
}

WorkPtr ProcessGroupEcho::recv(Tensors& tensors, int source, int tag) {
  return forward(device_of(tensors, main_device()), [&](auto& inner) { return inner.recv(tensors, source, tag); });
}

WorkPtr ProcessGroupEcho::recvAnysource(Tensors& tensors, int tag) {
  return forward(device_of(tensors, main_device()), [&](auto& inner) { return inner.recvAnysource(tensors, tag); });
}

WorkPtr ProcessGroupEcho::barrier(const c10d::BarrierOptions& options) {
  const c10::DeviceType type = barrier_device(options);
  if (type == c10::DeviceType::CPU && inner_.may_have_device()) {
    const GilRelease no_gil;
    wait_for_current_streams(devices_in_use());
  }
  return forward(type, [&](auto& inner) { return inner.barrier(options); });
}

// Only Gloo has it, so it is a matter of the CPU whatever the group is for.
void ProcessGroupEcho::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const GilRelease no_gil;
  const c10::DeviceType type = inner_.has_made(c10::DeviceType::CPU) ? c10::DeviceType::CPU : main_device();
  c10d::Backend& backend = open_inner(type);
  if (type != c10::DeviceType::CPU) return backend.monitoredBarrier(options, wait_all_ranks);
  // It waits for messages in the call itself.
  run_on_thread([inner = inner(type), options, wait_all_ranks] { inner->monitoredBarrier(options, wait_all_ranks); },
                [this](std::future<void> running) { core_->forwarded->leave_thread(std::move(running)); });
}

// torch asks the outer backend whether there are hooks, without a virtual call: the marker makes it say yes.
void ProcessGroupEcho::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  open_inner(accelerator()).registerOnCompletionHook(std::move(hook));
  onCompletionHook_ = [](const std::shared_ptr<c10d::WorkInfo>&) {};
}

void ProcessGroupEcho::waitForPendingWorks() {
  const GilRelease no_gil;
  open_inner(accelerator()).waitForPendingWorks();
}

void ProcessGroupEcho::enableCollectivesTiming() { open_inner(accelerator()).enableCollectivesTiming(); }

void ProcessGroupEcho::eagerConnectSingleDevice(at::Device device) {
  const GilRelease no_gil;
  open_inner(device.type()).eagerConnectSingleDevice(device);
}

std::shared_ptr<c10::Allocator> ProcessGroupEcho::getMemAllocator() {
  return open_inner(accelerator()).getMemAllocator();
}

at::Tensor ProcessGroupEcho::allocateTensor(long size, at::TensorOptions options) {
  return open_inner(options.device().type()).allocateTensor(size, options);
}

bool ProcessGroupEcho::supportsTensorAlloc(c10::DeviceIndex index) {
  return inner(accelerator())->supportsTensorAlloc(index);
}

#if ECHO_TORCH_AT_LEAST(12)
void ProcessGroupEcho::suspend() { open_inner(accelerator()).suspend(); }

void ProcessGroupEcho::resume() { open_inner(accelerator()).resume(); }

std::unordered_map<std::string, uint64_t> ProcessGroupEcho::getMemoryStats() {
  return open_inner(accelerator()).getMemoryStats();
}
#endif

#if ECHO_TORCH_AT_LEAST(14)
// Not left to the defaults: those of two backends that call each other's older names share one guard against endless
// recursion, and gather_single has no older name that an inner backend of torch implements.
WorkPtr ProcessGroupEcho::all_gather_single(at::Tensor& output, at::Tensor& input,
                                            const c10d::AllgatherOptions& options) {
  return forward(input.device().type(), [&](auto& inner) { return inner.all_gather_single(output, input, options); });
}

WorkPtr ProcessGroupEcho::all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  return forward(device_of(inputs, main_device()),
                 [&](auto& inner) { return inner.all_gather_single_coalesced(outputs, inputs, options); });
}

WorkPtr ProcessGroupEcho::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) {
  return forward(input.device().type(), [&](auto& inner) { return inner.gather_single(output, input, options); });
}

WorkPtr ProcessGroupEcho::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& options) {
  return forward_reduce_scatter({output}, {input}, options,
                                [&](auto& inner) { return inner.reduce_scatter_single(output, input, options); });
}

WorkPtr ProcessGroupEcho::reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  return forward_reduce_scatter(outputs, inputs, options, [&](auto& inner) {
    return inner.reduce_scatter_single_coalesced(outputs, inputs, options);
  });
}

WorkPtr ProcessGroupEcho::all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                            std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  return forward(input.device().type(), [&](auto& inner) {
    return inner.all_to_all_single(output, input, output_sizes, input_sizes, options);
  });
}

void ProcessGroupEcho::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  for (const auto& [type, backend] : inner_.made()) backend->addEphemeralTimeout(timeout);
}

void ProcessGroupEcho::registerAbortHook(int64_t hook_id, c10d::AbortHook hook) {
  open_inner(accelerator()).registerAbortHook(hook_id, std::move(hook));
}

void ProcessGroupEcho::unregisterAbortHook(int64_t hook_id) { open_inner(accelerator()).unregisterAbortHook(hook_id); }
#endif

}  // namespace echo::pg
