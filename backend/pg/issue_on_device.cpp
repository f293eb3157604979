// Quantized calls on device tensors: the stream they run on, their order among each other, and what a graph can record.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "gil.hpp"
#include "process_group_echo.hpp"

namespace echo::pg {

ProcessGroupEcho::DeviceStreams::DeviceStreams(c10::Device device)
    : side(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      ready(device.type()) {}

ProcessGroupEcho::DeviceStreams& ProcessGroupEcho::streams_of(c10::Device device) {
  std::unique_ptr<DeviceStreams>& streams = streams_[device];
  if (!streams) streams = std::make_unique<DeviceStreams>(device);
  return *streams;
}

// What a recording cannot hold is refused before anything of the call reaches the stream.
void ProcessGroupEcho::check_capture(c10::Device device) const {
  TORCH_CHECK(core_->cuda_fabrics.outcome(device) != nullptr, "the first quantized all_reduce of group '", *name_,
              "' on ", device, " sets up peer memory, which cannot be done while a CUDA graph is recorded: run one ",
              "warm-up pass of the same calls in eager mode first");
  TORCH_CHECK(!core_->config.diagnostics, "a quantized all_reduce of group '", *name_, "' cannot be recorded into a ",
              "CUDA graph with diagnostics=True, which reads every result on the host");
}

void ProcessGroupEcho::join_update(c10::Device device) {
  const GilRelease no_gil;
  const std::lock_guard lock(issue_mutex_);
  const auto* const outcome = device.is_cuda() ? core_->cuda_fabrics.outcome(device) : nullptr;
  if (outcome == nullptr || !outcome->fabric) return;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  // A call's turn, though there is none: the next one waits for this stream, which alone knows of the update then.
  StreamOrder::Turn turn(CudaFabrics::order_of(device), stream, 0);
  CudaFabrics::join_update(*outcome->fabric, stream, false);
  turn.finish();
}

// Asynchronous calls run on a stream of the group's own, others on the caller's. Calls share buffers and state, and
// over peer memory the device, so each waits for the one before.
WorkPtr ProcessGroupEcho::run_on_stream(QuantizedCall call, const CallOptions& options) {
  const c10::Device device = call.tensor.device();
  const c10::impl::VirtualGuardImpl impl(device.type());
  const c10::Stream callers = impl.getStream(device);
  DeviceStreams& streams = streams_of(device);
  const c10::Stream stream = options.async_op ? streams.side : callers;
  DeviceCall done{.tensor = call.tensor,
                  .stream = stream,
                  .what = call.what,
                  .captured = call.captured,
                  .lane = call.site.key.lane,
                  .lanes = lanes_,
                  .done = std::nullopt,
                  .events = streams.events,
                  .raise_fault = [core = core_] {
                    core->look_at_devices();
                    core->fault.raise_if_set();
                  }};
  try {
    if (options.async_op) {
      streams.ready.record(callers);
      streams.ready.block(stream);
    }
    StreamOrder& order = call.cuda_peer != nullptr ? CudaFabrics::order_of(device) : streams.order;
    StreamOrder::Turn turn(order, stream, options.capture);
    if (call.cuda_peer != nullptr) CudaFabrics::join_update(*call.cuda_peer, stream, options.capture != 0);
    call.stream = stream;
    const c10::StreamGuard guard(stream);
    run_quantized(*core_, call);
    turn.finish();
  } catch (...) {
    lanes_->free(done.lane);
    throw;
  }
  // The state's memory goes back to the pool's allocator without regard to who used it last.
  if (call.wire.state.defined() && !options.capture) {
    impl.recordDataPtrOnStream(call.wire.state.storage().data_ptr(), stream);
  }
  if (options.async_op) {
    impl.recordDataPtrOnStream(call.tensor.storage().data_ptr(), stream);
    done.done = streams.events->take(device.type());
    done.done->record(stream);
  }
  return c10::make_intrusive<WorkOnDevice>(std::move(done));
}

}  // namespace echo::pg
