#include "quantized_call.hpp"

#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include "../cpu/stages.h"

namespace echo::pg {
namespace {

// A result is written through raw pointers or below autograd: no graph, no version counter, inference tensors allowed,
// as in any collective.
struct BelowAutograd {
  c10::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
};

bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_neg(); }

// What this rank adds to its contribution, as fp32 on the host; undefined where nothing is added.
at::Tensor correction_of(const wire::Call& call) {
  if (!call.state.defined() || call.plan.first_site) return {};
  const at::Tensor state = call.state.cpu();
  at::Tensor correction = at::empty({call.plan.numel}, at::kFloat);
  Site site;
  site.plan = call.plan;
  site.state = state.data_ptr();
  cpu::active_stages().correction(site, correction.data_ptr<float>());
  return correction;
}

// Over peer memory: the same plan and the same state, other hands.
wire::Receipt exchange_with_peers(const GroupCore& core, QuantizedCall& call) {
  const wire::Call& wire = call.wire;
  cpu::PeerCall peer_call;
  peer_call.site = wire::site_of(wire);
  peer_call.direction = wire.direction;
  peer_call.rescale = wire.rescale;
  peer_call.call_number = wire.call_number;
  peer_call.exact_calls = wire.exact_calls;
  peer_call.shape = wire::shape_of(wire);
  peer_call.limits.timeout = wire.timeout;
  peer_call.look_ahead = core.look_ahead;
  call.peer->all_reduce(std::move(peer_call));
  return wire::receipt_for(wire.plan, call.peer->wire_bytes(wire.plan));
}

wire::Receipt exchange_by(GroupCore& core, QuantizedCall& call) {
  if (call.peer != nullptr) return exchange_with_peers(core, call);
  if (call.cuda_peer != nullptr) {
    return CudaFabrics::all_reduce(*call.cuda_peer, call.wire, *call.stream, call.captured);
  }
  return wire::all_reduce(call.wire, *call.inner, core.workspace);
}

void exchange(GroupCore& core, QuantizedCall& call) {
  Diagnostics::Before before;
  if (core.config.diagnostics) {
    before = Diagnostics::measure_before(call.wire.tensor, correction_of(call.wire), *call.inner, call.wire.wait);
  }
  const wire::Receipt receipt = exchange_by(core, call);
  core.workspace_bytes = core.workspace.bytes.defined() ? core.workspace.bytes.numel() : 0;
  core.stats.add_wire(receipt.wire_bytes, receipt.padding_bytes);
  if (core.config.diagnostics) core.diagnostics.measure_after(call.site, before, call.wire.tensor);
}

// Text of the exception under way, without the C++ backtrace that torch appends.
std::string current_cause() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

void GroupCore::look_at_devices() {
  if (std::string text = device_fault.text(); !text.empty()) {
    fault.set(reports.name() + ": a quantized all_reduce over the wire failed on the device: " + text);
  }
  if (std::string text = cuda_fabrics.fault_text(); !text.empty()) {
    fault.set(reports.name() + ": a quantized all_reduce over peer memory failed on the device: " + text);
  }
}

void run_quantized(GroupCore& core, QuantizedCall& call) {
  core.fault.raise_if_set();
  RECORD_FUNCTION("echo::all_reduce", c10::ArrayRef<const c10::IValue>{});
  const BelowAutograd below;
  const char* stage = "copying the contribution";
  try {
    call.wire.tensor = is_plain(call.tensor) ? call.tensor : call.tensor.resolve_neg().contiguous();
    stage = "exchange";
    exchange(core, call);
    stage = "copying the result";
    if (!call.wire.tensor.is_same(call.tensor)) call.tensor.copy_(call.wire.tensor);
    call.inner.reset();
  } catch (...) {
    const std::string cause = current_cause();
    call.inner.reset();
    std::rethrow_exception(fail_call(core, call.what, stage, cause));
  }
}

std::exception_ptr fail_call(GroupCore& core, const CallName& what, const std::string& stage,
                             const std::string& cause) {
  std::string text = what.text() + " failed (" + stage + "): " + cause;
  const bool first = core.fault.set(text);
  core.wire.tear_down();
  if (PeerFabric* fabric = core.peer_fabric) fabric->abort();
  core.cuda_fabrics.abort(text);
  if (first && !core.aborting) {
    text += core.reports.exchange(text, GroupFate::kEnds);
    core.fault.replace(text);
  }
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, uint32_t{__LINE__}}, text));
}

}  // namespace echo::pg
