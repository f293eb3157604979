// An exact all-reduce of CPU tensors: Gloo's own Work in all but its errors, which name neither ranks nor the call.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "delegating_work.hpp"
#include "forwarded_calls.hpp"
#include "signals.hpp"
#include "watched_wait.hpp"

namespace echo::pg {

class ForwardedWork : public DelegatingWork {
 public:
  // Throws the error to raise in place of the one under way.
  using Rename = std::function<void(const std::string& cause)>;

  // Keeps of its group `calls` alone: without its processes, after its end, no exit of them ends a wait.
  ForwardedWork(int rank, c10::intrusive_ptr<c10d::Work> inner, std::weak_ptr<const Processes> processes, Rename rename,
                std::shared_ptr<ForwardedCalls> calls)
      : DelegatingWork(rank, c10d::OpType::ALLREDUCE, std::move(inner)),
        processes_(std::move(processes)),
        rename_(std::move(rename)),
        calls_(std::move(calls)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    std::string exited;
    try {
      exited = unless_interrupted([&] { return wait_for_inner(timeout); }, [&] { calls_->leave(inner_); });
    } catch (const pybind11::error_already_set&) {
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
      calls_->leave(inner_);
      rename_(exited);
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }

 private:
  std::string wait_for_inner(std::chrono::milliseconds timeout) {
    if (const auto processes = processes_.lock()) return wait_while_all_live(*inner_, *processes, timeout);
    wait_with_signals(*inner_, timeout);
    return {};
  }

  const std::weak_ptr<const Processes> processes_;
  const Rename rename_;
  const std::shared_ptr<ForwardedCalls> calls_;
};

}  // namespace echo::pg
