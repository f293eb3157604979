// Works of calls that echo runs itself on its worker; those of device tensors are in device_work.hpp, and forwarded
// calls return the inner backend's own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "call_name.hpp"
#include "lanes.hpp"

namespace echo::pg {

// How one call ended; shared by the caller's Work and by whoever runs the call.
class Completion {
 public:
  explicit Completion(at::Tensor tensor);

  // The future first, so that whoever has waited finds it done. Its callbacks run on the calling thread.
  void succeed() noexcept;
  void fail(std::exception_ptr error) noexcept;

  bool is_done() const;
  std::exception_ptr error() const;

  // Waits until done or until `deadline`; false if the deadline passed.
  bool wait_until(std::chrono::steady_clock::time_point deadline) const;

  const at::Tensor& tensor() const { return tensor_; }
  const c10::intrusive_ptr<c10::ivalue::Future>& future() const { return future_; }

 private:
  void finish(std::exception_ptr error);

  at::Tensor tensor_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  mutable std::mutex mutex_;
  mutable std::condition_variable done_changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

struct WorkDetails {
  CallName what;
  int32_t lane = 0;
  std::shared_ptr<LaneTable> lanes;  // the lane goes back to it when the caller has waited; null if none was taken
  // Called while a caller waits, a few times a second; throws if waiting longer is pointless or not wanted.
  std::function<void(std::chrono::milliseconds waited)> while_waiting;
};

// The caller's handle. Its destruction frees the lane, so nobody else may keep one: the worker holds the Completion
// only.
class WorkEcho : public c10d::Work {
 public:
  WorkEcho(std::shared_ptr<Completion> completion, WorkDetails details);
  ~WorkEcho() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;

 private:
  void wait_for_host(std::chrono::milliseconds timeout);
  void free_lane();

  std::shared_ptr<Completion> completion_;
  WorkDetails details_;
};

// Several Works as one: what a coalescing bracket returns for operations of a backend that cannot coalesce.
class WorkBracket : public c10d::Work {
 public:
  WorkBracket(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

}  // namespace echo::pg
