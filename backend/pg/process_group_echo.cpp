// Which calls run quantized, and what the others are told. How a quantized call runs is in issue.cpp, what the group
// says of itself in group_report.cpp.
#include "process_group_echo.hpp"

#include <ATen/ATen.h>

#include "../cpu/stages.h"
#include "capture.hpp"
#include "forwarded_work.hpp"
#include "gil.hpp"

namespace echo::pg {
namespace {

std::string_view op_name(const c10d::ReduceOp& op) {
  constexpr std::string_view kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  const auto index = static_cast<size_t>(op.op_);
  return index < std::size(kNames) ? kNames[index] : "UNUSED";
}

void notice_missing_cuda(std::string_view reason) {
  static std::atomic<bool> said{false};
  if (reason == "built without CUDA" && !said.exchange(true)) {
    emit_notice("echo was built without CUDA: all-reduces of CUDA tensors are forwarded", "warning");
  }
}

}  // namespace

ProcessGroupEcho::ProcessGroupEcho(GroupSetup setup)
    : Backend(setup.rank, setup.size),
      core_((validate(setup.config),
             std::make_shared<GroupCore>(setup.config,
                                         GroupCore::Ranks{setup.store, setup.rank, setup.size, setup.processes},
                                         std::move(setup.make_wire)))),
      rules_(make_policy_rules(core_->config)),
      store_(std::move(setup.store)),
      inner_(std::move(setup.inner), std::move(setup.make_later)),
      prefers_device_barriers_(setup.prefers_device_barriers),
      timeout_ms_(setup.timeout.count()),
      deriver_(std::move(setup.deriver)) {
  TORCH_CHECK_VALUE(!inner_.made().empty(), "echo needs an inner backend for at least one device type");
  core_->forwarded->timeout_ms = setup.inner_timeout.count();
  if (core_->config.diagnostics) plan_check_.emplace(rounds("plan", std::chrono::milliseconds(timeout_ms_.load())));
}

void ProcessGroupEcho::observe(Observer observer) {
  const std::lock_guard lock(issue_mutex_);
  core_->observer = std::move(observer);
}

CudaFabric& ProcessGroupEcho::cuda_fabric(c10::Device device) const {
  const auto* const outcome = core_->cuda_fabrics.outcome(device);
  TORCH_CHECK_VALUE(outcome != nullptr && outcome->fabric, "no calls over peer memory were made on ", device);
  return *outcome->fabric;
}

ProcessGroupEcho::~ProcessGroupEcho() {
  if (!is_at_home()) {
    // What it has would join threads that this process does not have: left to the end of the process.
    new std::shared_ptr<GroupCore>(core_);
    new std::shared_ptr<Worker>(worker_);
    inner_.leave_behind();
    for (auto& [device, streams] : streams_) streams.release();
    return;
  }
  // The destructors of inner backends join threads that may want the GIL.
  const GilRelease no_gil;
  worker_->stop(false, std::chrono::seconds(1));
  core_->wire.tear_down();
  BackendsByDevice inner = inner_.take_all();
  if (core_->forwarded->gave_up) leave_to_thread(std::move(inner), core_->forwarded->take_kept());
}

std::string_view dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kDouble:
      return "float64";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kShort:
      return "int16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kBool:
      return "bool";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:
      return c10::toString(dtype);
  }
}

int64_t dense_bytes(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.layout() == at::kStrided) bytes += tensor.numel() * static_cast<int64_t>(tensor.element_size());
  }
  return bytes;
}

std::string ProcessGroupEcho::description() const {
  const std::string& desc = getGroupDesc();
  return desc.empty() || desc == "undefined" ? getGroupUid() : desc;
}

// torch sets the description after it has made the backend, so it is read at every call.
GroupKind ProcessGroupEcho::group_kind() {
  const std::lock_guard lock(issue_mutex_);
  if (!kind_ || classified_description_ != getGroupDesc()) {
    classified_description_ = getGroupDesc();
    kind_ = classify_group(rules_, classified_description_);
    name_ = std::make_shared<const std::string>(description());
  }
  return *kind_;
}

// Over peer memory: one kernel that brings its own counters. The wire's records would be those of the recording.
bool ProcessGroupEcho::can_be_captured(c10::Device device) const {
  if (!device.is_cuda() || core_->config.fabric == "wire") return false;
  const CudaFabrics::Outcome* outcome = core_->cuda_fabrics.outcome(device);
  return outcome == nullptr || outcome->fabric != nullptr;
}

CallFacts ProcessGroupEcho::facts_of(const at::Tensor& tensor, std::string_view op, const CallOrigin& origin,
                                     uint64_t capture) {
  CallFacts facts;
  facts.op = op;
  facts.dtype = dtype_name(tensor.scalar_type());
  facts.device_obstacle = device_obstacle(c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true));
  if (const std::string* known = tensor.is_cuda() ? core_->cuda_fabrics.code_obstacle(tensor.device()) : nullptr) {
    facts.device_obstacle = *known;
  }
  facts.on_cuda = tensor.is_cuda();
  facts.numel = tensor.numel();
  facts.ndim = tensor.dim();
  if (facts.ndim > 0) facts.row_elems = tensor.size(-1);
  facts.group_size = getSize();
  facts.group = group_kind();
  facts.context = origin.context;
  facts.role = origin.role;
  facts.sparse = tensor.layout() != at::kStrided;
  facts.exact = origin.exact;
  facts.capturing = capture != 0 && !can_be_captured(tensor.device());
  facts.parameter_gradient = origin.parameter_gradient;
  facts.hooks = origin.hooks;
  {
    const std::lock_guard lock(issue_mutex_);
    facts.hand_set = passes_.hand_direction().has_value();
  }
  const std::lock_guard lock(bracket_mutex_);
  facts.coalesced = bracket_open_;
  return facts;
}

WorkPtr ProcessGroupEcho::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const GilRelease no_gil;
  check_alive();
  TORCH_CHECK_VALUE(!tensors.empty(), "all_reduce was given no tensor");
  const CallOrigin origin = current_origin();
  const uint64_t capture = current_capture(tensors[0].device());
  CallFacts facts = facts_of(tensors[0], op_name(options.reduceOp), origin, capture);
  facts.tensors = static_cast<int64_t>(tensors.size());
  Decision decision = decide(rules_, facts);
  if (decision.quantize && capture == 0) {
    if (std::string obstacle = agree_on_code(tensors[0], options.timeout); !obstacle.empty()) {
      decision = {.quantize = false, .reason = std::move(obstacle)};
    }
  }
  if (logs_calls()) log_call(tensors, facts.op, origin, decision);
  if (plan_check_ && capture == 0 && getSize() > 1) check_plan(tensors, decision);
  if (!decision.quantize) return allreduce_exact(tensors, options, decision.reason, origin);
  return issue(tensors[0],
               {.async_op = options.asyncOp, .timeout = options.timeout, .direction = {}, .capture = capture}, origin);
}

WorkPtr ProcessGroupEcho::allreduce_exact(Tensors& tensors, const c10d::AllreduceOptions& options,
                                          const std::string& reason, const CallOrigin& origin) {
  c10d::Backend& inner = open_inner(tensors[0].device().type());
  core_->stats.add_forwarded(reason, dense_bytes(tensors));
  notice_missing_cuda(reason);
  int64_t passes = 0;
  CallName what;
  {
    const std::lock_guard lock(issue_mutex_);
    // Within exact() the caller wants nothing quantized.
    if (!origin.exact) passes = passes_.book_exact(origin);
    what = name_call(tensors[0], reason);
    ++exact_calls_;
  }
  warn_if_idle(passes);
  if (!tensors[0].is_cpu()) return collect(inner, inner.allreduce(tensors, options));
  const auto rename = [weak = std::weak_ptr(core_), what](const std::string& cause) {
    const std::string text = what.text() + " failed: " + cause;
    const std::shared_ptr<GroupCore> core = weak.lock();  // none: the group has ended before
    const bool asks = core && !core->aborting;
    TORCH_CHECK_WITH(DistBackendError, false, text,
                     asks ? core->reports.exchange(text, GroupFate::kSurvives) : std::string());
  };
  WorkPtr work;
  try {
    work = inner.allreduce(tensors, options);
  } catch (const c10::Error&) {
    throw;  // a wrong call
  } catch (const std::exception& error) {
    rename(error.what());
  }
  return collect(inner, c10::make_intrusive<ForwardedWork>(getRank(), std::move(work), core_->reports.processes(),
                                                           rename, core_->forwarded));
}

// What is compared says all that must be equal; bits and pass follow from it, or from what quantized calls compare.
void ProcessGroupEcho::check_plan(const Tensors& tensors, const Decision& decision) {
  std::string plan = decision.quantize ? "a quantized all_reduce of" : "an exact all_reduce of";
  for (const at::Tensor& tensor : tensors) plan += c10::str(" ", tensor.sizes(), " ", dtype_name(tensor.scalar_type()));
  CallName what;
  {
    const std::lock_guard lock(issue_mutex_);
    what = name_call(tensors[0], decision.quantize ? std::string() : decision.reason);
  }
  std::string cause;
  try {
    cause = plan_check_->differs(plan, decision.reason, getRank());
  } catch (const c10::Error& error) {
    cause = error.what_without_backtrace();
  }
  if (!cause.empty()) std::rethrow_exception(fail_call(*core_, what, "comparing plans", cause));
}

StoreRounds ProcessGroupEcho::rounds(const std::string& name, std::chrono::milliseconds timeout) const {
  return {store_, name, getRank(), getSize(), timeout, core_->reports};
}

WorkPtr ProcessGroupEcho::all_reduce_quantized(const at::Tensor& tensor, bool async_op,
                                               std::optional<Direction> direction) {
  const GilRelease no_gil;
  check_alive();
  const CallOrigin origin = current_origin();
  const uint64_t capture = current_capture(tensor.device());
  const CallFacts facts = facts_of(tensor, "SUM", origin, capture);
  TORCH_CHECK_VALUE(quantizable_elem_bytes(facts.dtype) > 0, "all_reduce got a tensor of dtype ", facts.dtype,
                    ", but only bfloat16, float16 and float32 can be quantized");
  TORCH_CHECK_VALUE(!facts.sparse, "all_reduce got a tensor of layout ", tensor.layout(), ", but needs a dense one");
  TORCH_CHECK_VALUE(facts.device_obstacle.empty(), "all_reduce got a tensor on ", tensor.device(), ": ",
                    facts.device_obstacle);
  TORCH_CHECK_VALUE(!facts.coalesced, "all_reduce cannot be quantized inside a coalescing bracket");
  TORCH_CHECK_VALUE(!facts.capturing, "all_reduce over the wire cannot be quantized while a stream records a graph");
  open_inner(tensor.device().type());
  if (getSize() == 1 || tensor.numel() == 0) {
    auto completion = std::make_shared<Completion>(tensor);
    completion->succeed();
    WorkDetails details;
    {
      const std::lock_guard lock(issue_mutex_);
      details.what = name_call(tensor);
    }
    return c10::make_intrusive<WorkEcho>(std::move(completion), std::move(details));
  }
  // With ECHO_OFF=1 the ranks did not even introduce themselves.
  if (facts.exact || introductions().empty()) {
    Tensors tensors{tensor};
    c10d::AllreduceOptions options;
    options.asyncOp = async_op;
    return allreduce_exact(tensors, options, decide(rules_, facts).reason, origin);
  }
  if (capture == 0) {
    const std::string obstacle = agree_on_code(tensor, c10d::kUnsetTimeout);
    TORCH_CHECK_VALUE(obstacle.empty(), "all_reduce got a tensor on ", tensor.device(), ": ", obstacle);
  }
  return issue(tensor,
               {.async_op = async_op, .timeout = c10d::kUnsetTimeout, .direction = direction, .capture = capture},
               origin);
}

Decision ProcessGroupEcho::explain(const at::Tensor& tensor, const std::string& op) {
  const GilRelease no_gil;
  CallFacts facts = facts_of(tensor, op, current_origin(), current_capture(tensor.device()));
  std::string missing;
  // Before the first call the other ranks' devices are not known.
  if (facts.on_cuda && facts.device_obstacle.empty()) missing = CudaFabrics::missing_code(tensor.device());
  if (!missing.empty()) facts.device_obstacle = missing;
  return decide(rules_, facts);
}

void ProcessGroupEcho::new_pass(Direction direction) {
  const GilRelease no_gil;
  const std::lock_guard lock(issue_mutex_);
  passes_.announce(direction);
}

std::optional<int64_t> ProcessGroupEcho::last_forward_sites() {
  const GilRelease no_gil;
  const std::lock_guard lock(issue_mutex_);
  return passes_.completed_forward_sites();
}

void ProcessGroupEcho::resume_after(int64_t forward_sites) {
  const GilRelease no_gil;
  const std::lock_guard lock(issue_mutex_);
  TORCH_CHECK_VALUE(forward_sites >= 0, "forward_sites is ", forward_sites, ", but must not be negative");
  TORCH_CHECK_VALUE(calls_ == 0,
                    "a state can be loaded before the group's first quantized all_reduce alone; it has made ", calls_);
  passes_.resume_after(forward_sites);
}

void ProcessGroupEcho::set_look_ahead(int64_t tiles) {
  TORCH_CHECK_VALUE(tiles >= 0 && tiles <= kLookAhead, "look-ahead is ", tiles, ", but must be from 0 to ", kLookAhead,
                    " tiles");
  core_->look_ahead = static_cast<int32_t>(tiles);
}

void ProcessGroupEcho::note_exact(const char* reason, const Tensors& tensors, const c10d::ReduceOp& op) {
  core_->stats.add_forwarded(reason, dense_bytes(tensors));
  if (logs_calls() && !tensors.empty()) log_call(tensors, op_name(op), current_origin(), Decision{false, reason});
}

}  // namespace echo::pg
