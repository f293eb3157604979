// Works of calls on device tensors: all is enqueued when they are made, and what waits is a stream.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "call_name.hpp"
#include "lanes.hpp"

namespace echo::pg {

// Events of one device that works have done with, for works to come: making one costs the host more than recording it.
class EventPool {
 public:
  c10::Event take(c10::DeviceType type) {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return c10::Event(type);
    c10::Event event = std::move(free_.back());
    free_.pop_back();
    return event;
  }

  void give_back(c10::Event event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(event));
  }

 private:
  std::mutex mutex_;
  std::vector<c10::Event> free_;
};

struct DeviceCall {
  at::Tensor tensor;
  c10::Stream stream;  // on which the call was enqueued
  CallName what;
  bool captured = false;  // recorded into a graph: nothing has run
  int32_t lane = 0;
  std::shared_ptr<LaneTable> lanes;
  std::optional<c10::Event> done;     // recorded behind the call; a call on the caller's own stream needs none
  std::shared_ptr<EventPool> events;  // where `done` goes back to
  std::function<void()> raise_fault;  // throws if the group has failed, as far as devices have said so by now
};

// wait() makes the current stream wait; given a limit it also waits on the host. A fault of the group is raised by
// every way of waiting that comes after it.
class WorkOnDevice : public c10d::Work {
 public:
  explicit WorkOnDevice(DeviceCall call);
  ~WorkOnDevice() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return {call_.tensor}; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return call_.what.number; }

 private:
  void wait_for_device(std::chrono::milliseconds timeout);
  void free_lane();

  DeviceCall call_;
  std::mutex own_mutex_;  // guards the lane and the future
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace echo::pg
