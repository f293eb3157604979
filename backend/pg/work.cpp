#include "work.hpp"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include "gil.hpp"
#include "signals.hpp"

namespace echo::pg {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

}  // namespace

Completion::Completion(at::Tensor tensor)
    : tensor_(std::move(tensor)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

void Completion::succeed() noexcept {
  try {
    future_->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}));
  } catch (...) {
    // What a callback throws is its own affair: the call itself has succeeded.
  }
  finish(nullptr);
}

void Completion::fail(std::exception_ptr error) noexcept {
  try {
    future_->setErrorIfNeeded(error);
  } catch (...) {
  }
  finish(std::move(error));
}

void Completion::finish(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (done_) return;
  error_ = std::move(error);
  done_ = true;
  done_changed_.notify_all();
}

bool Completion::is_done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

std::exception_ptr Completion::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool Completion::wait_until(Clock::time_point deadline) const {
  std::unique_lock lock(mutex_);
  return done_changed_.wait_until(lock, deadline, [&] { return done_; });
}

WorkEcho::WorkEcho(std::shared_ptr<Completion> completion, WorkDetails details)
    : Work(details.what.rank, c10d::OpType::ALLREDUCE),
      completion_(std::move(completion)),
      details_(std::move(details)) {}

WorkEcho::~WorkEcho() { free_lane(); }

void WorkEcho::free_lane() {
  const std::lock_guard lock(mutex_);
  if (details_.lanes) std::exchange(details_.lanes, nullptr)->free(details_.lane);
}

bool WorkEcho::isCompleted() { return completion_->is_done(); }

bool WorkEcho::isSuccess() const { return completion_->is_done() && completion_->error() == nullptr; }

std::exception_ptr WorkEcho::exception() const { return completion_->error(); }

std::vector<at::Tensor> WorkEcho::result() {
  TORCH_CHECK(completion_->is_done(), "result() of an all_reduce that is not complete; call wait() first");
  return {completion_->tensor()};
}

void WorkEcho::synchronize() { wait(kNoTimeout); }

bool WorkEcho::wait(milliseconds timeout) {
  const GilRelease no_gil;
  wait_for_host(timeout);
  free_lane();
  if (const std::exception_ptr error = completion_->error()) std::rethrow_exception(error);
  return true;
}

void WorkEcho::wait_for_host(milliseconds timeout) {
  const auto start = Clock::now();
  const auto waited = [&] { return std::chrono::duration_cast<milliseconds>(Clock::now() - start); };
  while (!completion_->wait_until(timeout == kNoTimeout ? Clock::now() + kSignalPeriod
                                                        : std::min(Clock::now() + kSignalPeriod, start + timeout))) {
    TORCH_CHECK_WITH(DistBackendError, timeout == kNoTimeout || waited() < timeout, details_.what.text(),
                     " did not finish within the ", timeout.count(), " ms that wait() was given; it goes on");
    if (details_.while_waiting) details_.while_waiting(waited());
  }
}

void WorkEcho::blockCurrentStream() { wait(kNoTimeout); }

void WorkEcho::abort() { TORCH_CHECK(false, "a single call of echo cannot be aborted; abort its group"); }

c10::intrusive_ptr<c10::ivalue::Future> WorkEcho::getFuture() { return completion_->future(); }

c10::intrusive_ptr<c10::ivalue::Future> WorkEcho::getFutureResult() {
  const auto outcome = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
  completion_->future()->addCallback([outcome](c10::ivalue::Future& future) {
    const auto result = future.hasError() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
    outcome->markCompleted(c10::IValue(static_cast<uint8_t>(result)));
  });
  return outcome;
}

uint64_t WorkEcho::getSequencenumber() const { return details_.what.number; }

WorkBracket::WorkBracket(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts)
    : Work(rank, c10d::OpType::COALESCED), parts_(std::move(parts)) {}

bool WorkBracket::isCompleted() {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
}

bool WorkBracket::isSuccess() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isSuccess(); });
}

std::exception_ptr WorkBracket::exception() const {
  for (const auto& part : parts_) {
    if (const std::exception_ptr error = part->exception()) return error;
  }
  return nullptr;
}

void WorkBracket::synchronize() {
  for (const auto& part : parts_) part->synchronize();
}

bool WorkBracket::wait(milliseconds timeout) {
  const GilRelease no_gil;
  for (const auto& part : parts_) part->wait(timeout);
  return true;
}

void WorkBracket::blockCurrentStream() {
  for (const auto& part : parts_) part->blockCurrentStream();
}

void WorkBracket::abort() {
  for (const auto& part : parts_) part->abort();
}

}  // namespace echo::pg
