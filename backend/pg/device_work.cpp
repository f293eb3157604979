#include "device_work.hpp"

#include <chrono>
#include <thread>
#include <utility>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "gil.hpp"

namespace echo::pg {
namespace {

constexpr std::chrono::microseconds kPoll{50};

}  // namespace

WorkOnDevice::WorkOnDevice(DeviceCall call) : Work(call.what.rank, c10d::OpType::ALLREDUCE), call_(std::move(call)) {}

WorkOnDevice::~WorkOnDevice() {
  free_lane();
  if (call_.done && call_.events) call_.events->give_back(std::move(*call_.done));
}

void WorkOnDevice::free_lane() {
  const std::lock_guard lock(own_mutex_);
  if (call_.lanes) std::exchange(call_.lanes, nullptr)->free(call_.lane);
}

bool WorkOnDevice::isCompleted() { return call_.captured || !call_.done || call_.done->query(); }

bool WorkOnDevice::isSuccess() const { return exception() == nullptr; }

std::exception_ptr WorkOnDevice::exception() const {
  try {
    call_.raise_fault();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

bool WorkOnDevice::wait(std::chrono::milliseconds timeout) {
  const GilRelease no_gil;
  free_lane();
  if (call_.done) {
    const c10::impl::VirtualGuardImpl impl(call_.stream.device_type());
    call_.done->block(impl.getStream(call_.stream.device()));
  }
  if (timeout != kNoTimeout && !call_.captured) wait_for_device(timeout);
  call_.raise_fault();
  return true;
}

void WorkOnDevice::wait_for_device(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!isCompleted()) {
    TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < deadline, call_.what.text(),
                     " did not finish within the ", timeout.count(), " ms that wait() was given; it goes on");
    std::this_thread::sleep_for(kPoll);
  }
}

void WorkOnDevice::abort() { TORCH_CHECK(false, "a single call of echo cannot be aborted; abort its group"); }

// Made when it is asked for, since few callers do. It records events of its own behind the call.
c10::intrusive_ptr<c10::ivalue::Future> WorkOnDevice::getFuture() {
  const std::lock_guard lock(own_mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{call_.tensor.device()});
  const c10::StreamGuard guard(call_.stream);
  future_->markCompleted(c10::IValue(std::vector<at::Tensor>{call_.tensor}));
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkOnDevice::getFutureResult() {
  const auto outcome = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
  const auto result = isSuccess() ? c10d::WorkResult::SUCCESS : c10d::WorkResult::COMM_ERROR;
  outcome->markCompleted(c10::IValue(static_cast<uint8_t>(result)));
  return outcome;
}

}  // namespace echo::pg
