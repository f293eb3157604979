// An exact all-reduce of CPU tensors: Gloo's own Work in all but its errors, which name neither ranks nor the call.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "delegating_work.hpp"
#include "watched_wait.hpp"

namespace echo::pg {

class ForwardedWork : public DelegatingWork {
 public:
  // Throws the error to raise in place of the one under way.
  using Rename = std::function<void(const std::string& cause)>;

  // `leave` is called where nobody waits any more for what Gloo still waits in.
  ForwardedWork(int rank, c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<const Processes> processes,
                Rename rename, std::function<void()> leave)
      : DelegatingWork(rank, c10d::OpType::ALLREDUCE, std::move(inner)),
        processes_(std::move(processes)),
        rename_(std::move(rename)),
        leave_(std::move(leave)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    std::string exited;
    try {
      exited = wait_while_all_live(*inner_, *processes_, timeout);
    } catch (const pybind11::error_already_set&) {  // of a signal handler
      leave_();
      throw;
    } catch (const c10::DistError& error) {
      if (!inner_->isCompleted()) throw;  // only the caller's own limit is over
      rename_(error.what_without_backtrace());
    } catch (const c10::Error&) {
      throw;  // a wrong call, which Gloo may notice as late as this
    } catch (const std::exception& error) {
      if (!inner_->isCompleted()) throw;
      rename_(error.what());
    }
    if (!exited.empty()) {
      leave_();
      rename_(exited);
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }

 private:
  const std::shared_ptr<const Processes> processes_;
  const Rename rename_;
  const std::function<void()> leave_;
};

}  // namespace echo::pg
