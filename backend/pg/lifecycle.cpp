// Opening and closing: what torch tells the group about itself, brackets, sequence numbers, time-outs, the end.
#include <algorithm>

#include "capture.hpp"
#include "devices_in_use.hpp"
#include "gil.hpp"
#include "process_group_echo.hpp"

namespace echo::pg {
namespace {

// How long the end of a group waits for a call under way: closing a healthy group lets it finish, aborting does not.
constexpr std::chrono::seconds kAbortPatience{1};

}  // namespace

void check_at_home(pid_t home) {
  TORCH_CHECK_WITH(DistBackendError, getpid() == home, "this process was forked from process ", home,
                   ", which made the process group; groups do not survive a fork. Start ranks with the spawn or "
                   "forkserver method, or make groups after the fork");
}

void ProcessGroupEcho::check_alive() const {
  check_at_home(home_);
  core_->look_at_devices();
  core_->fault.raise_if_set();
  TORCH_CHECK_WITH(DistBackendError, !closed_.load(), "group '", description(), "' has been destroyed");
}

BackendPtr ProcessGroupEcho::inner(c10::DeviceType type) {
  if (BackendPtr found = inner_.get(type)) return found;
  std::string known;
  for (const auto& [known_type, backend] : inner_.made())
    known += (known.empty() ? "" : ", ") + c10::DeviceTypeName(known_type, true);
  TORCH_CHECK_VALUE(false, "group '", description(), "' has no backend for ", c10::DeviceTypeName(type, true),
                    " tensors; it was made for: ", known);
}

// torch binds a device and sets the description without telling plugins, so the inner backend learns of it at its next
// use.
c10d::Backend& ProcessGroupEcho::open_inner(c10::DeviceType type) {
  check_alive();
  core_->forwarded->drop_ended();
  c10d::Backend& backend = *inner(type);  // lives as long as this group
  const auto bound = getBoundDeviceId();
  if (bound && bound->type() == type && backend.getBoundDeviceId() != bound) backend.setBoundDeviceId(bound);
  if (backend.getGroupDesc() != getGroupDesc()) backend.setGroupDesc(getGroupDesc());
  return backend;
}

c10::DeviceType ProcessGroupEcho::main_device() const {
  for (const auto& [type, backend] : inner_.made()) {
    if (type != c10::DeviceType::CPU) return type;
  }
  return c10::DeviceType::CPU;
}

c10::DeviceType ProcessGroupEcho::accelerator() {
  inner_.get(c10::DeviceType::CUDA);
  return main_device();
}

// torch does not say which device a barrier is for, and ranks must not come to different answers: whether one uses CUDA
// by now is no question to ask. Without a device it goes over the CPU's backend, after this rank has waited for its
// devices as a barrier of NCCL would.
c10::DeviceType ProcessGroupEcho::barrier_device(const c10d::BarrierOptions& options) {
  if (options.device) return options.device->type();
  if (!inner_.may_have_device() || !inner_.has_made(c10::DeviceType::CPU)) return main_device();
  if (prefers_device_barriers_ || !options.device_ids.empty() || bound_device()) return accelerator();
  const std::vector<c10::Device> devices = devices_in_use();
  const bool captured =
      std::any_of(devices.begin(), devices.end(), [](c10::Device device) { return current_capture(device) != 0; });
  return captured ? accelerator() : c10::DeviceType::CPU;
}

// NCCL's does, also one yet to be made.
bool ProcessGroupEcho::supportsCoalescing() const {
  const BackendsByDevice made = inner_.made();
  return (inner_.may_have_device() && made.size() == 1) ||
         std::any_of(made.begin(), made.end(), [](const auto& entry) { return entry.second->supportsCoalescing(); });
}

void ProcessGroupEcho::startCoalescing() {
  check_alive();
  {
    const std::lock_guard lock(bracket_mutex_);
    bracket_open_ = true;
    bracket_works_.clear();
  }
  for (const auto& [type, backend] : inner_.set_bracket(true)) {
    if (backend->supportsCoalescing()) open_inner(type).startCoalescing();
  }
}

// Works of inner backends that cannot coalesce are kept for the end of the bracket, since torch waits for nothing else
// then.
WorkPtr ProcessGroupEcho::collect(const c10d::Backend& inner, WorkPtr work) {
  const std::lock_guard lock(bracket_mutex_);
  if (bracket_open_ && work && !inner.supportsCoalescing()) bracket_works_.push_back(work);
  return work;
}

WorkPtr ProcessGroupEcho::endCoalescing() {
  const GilRelease no_gil;
  check_alive();
  std::vector<WorkPtr> works;
  for (const auto& [type, backend] : inner_.set_bracket(false)) {
    if (!backend->supportsCoalescing()) continue;
    if (WorkPtr work = backend->endCoalescing()) works.push_back(std::move(work));
  }
  {
    const std::lock_guard lock(bracket_mutex_);
    bracket_open_ = false;
    works.insert(works.end(), bracket_works_.begin(), bracket_works_.end());
    bracket_works_.clear();
  }
  if (works.size() == 1) return works.front();
  return c10::make_intrusive<WorkBracket>(getRank(), std::move(works));
}

void ProcessGroupEcho::setSequenceNumberForGroup() {
  for (const auto& [type, backend] : inner_.made()) backend->setSequenceNumberForGroup();
}

uint64_t ProcessGroupEcho::getSequenceNumberForGroup() {
  const GilRelease no_gil;
  uint64_t number = 0;
  for (const auto& [type, backend] : inner_.made()) number += backend->getSequenceNumberForGroup();
  const std::lock_guard lock(issue_mutex_);
  return number + calls_;
}

#if ECHO_TORCH_AT_LEAST(10)
void ProcessGroupEcho::setGroupUid(const std::string& pg_uid) {
  Backend::setGroupUid(pg_uid);
  inner_.set_uid(pg_uid);
}
#endif

void ProcessGroupEcho::setTimeout(std::chrono::milliseconds timeout) {
  if (core_->config.timeout_s <= 0) timeout_ms_ = timeout.count();
  core_->forwarded->timeout_ms = timeout.count();
  inner_.set_timeout(timeout);
  core_->wire.set_timeout(timeout);
}

c10d::ErrorType ProcessGroupEcho::getError() {
  check_at_home(home_);
  core_->look_at_devices();
  if (core_->fault.is_set()) return c10d::ErrorType::COMM_ERROR;
  for (const auto& [type, backend] : inner_.made()) {
    if (backend->getBackendName() != "nccl") continue;  // Gloo keeps no error state and throws here
    if (const auto error = backend->getError(); error != c10d::ErrorType::SUCCESS) return error;
  }
  return c10d::ErrorType::SUCCESS;
}

void ProcessGroupEcho::shutdown() { close(false); }

void ProcessGroupEcho::abort() { close(true); }

void ProcessGroupEcho::close(bool aborting) {
  const GilRelease no_gil;
  if (closed_.exchange(true) || !is_at_home()) return;
  core_->aborting = core_->aborting || aborting;
  if (core_->observer && core_->peer_fabric == nullptr) core_->observer({.step = Step::kClosing});
  core_->look_at_devices();
  const bool healthy = !aborting && !core_->fault.is_set();
  const std::chrono::milliseconds patience = healthy ? std::chrono::milliseconds(timeout_ms_.load()) : kAbortPatience;
  if (!healthy) {
    core_->wire.tear_down();
    if (PeerFabric* fabric = core_->peer_fabric) fabric->abort();
    // Of a failure the peers have heard where it happened: from the kernels or from the notice board.
    if (aborting) core_->cuda_fabrics.abort("the group was aborted");
  }
  worker_->stop(healthy, patience);
  core_->cuda_fabrics.close(healthy);
  if (healthy) core_->wire.shutdown();
  inner_.make_no_more();
  for (const auto& [type, backend] : inner_.made()) {
    if (aborting) {
      backend->abort();
    } else {
      backend->shutdown();
    }
  }
  log_destroyed();
}

}  // namespace echo::pg
