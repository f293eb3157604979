#include "interruptible_work.hpp"

#include <algorithm>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <pybind11/pybind11.h>

#include "delegating_work.hpp"
#include "quantized_call.hpp"
#include "signals.hpp"
#include "waker.hpp"
#include "watched_wait.hpp"

namespace echo::pg {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr milliseconds kLook{200};

class InterruptibleWork : public DelegatingWork {
 public:
  InterruptibleWork(c10d::OpType type, WorkPtr inner, std::shared_ptr<GroupCore> core)
      : DelegatingWork(-1, type, std::move(inner)), core_(std::move(core)) {}

  void synchronize() override { inner_->synchronize(); }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }

  bool wait(milliseconds timeout) override {
    try {
      return wait_with_signals(*inner_, timeout);
    } catch (const pybind11::error_already_set&) {  // of a signal handler
      core_->leave(inner_);
      throw;
    }
  }

 protected:
  const std::shared_ptr<GroupCore> core_;
};

// A send or receive. Where its wait runs out of time Gloo breaks every connection of the group, so slices end by
// abort(), which makes the wait return false and changes nothing else but what the inner Work says of its completion.
class InterruptibleMessage : public InterruptibleWork {
 public:
  using InterruptibleWork::InterruptibleWork;

  // As Gloo has it, a message is complete only when it has been waited for.
  bool isCompleted() override { return done_; }
  std::exception_ptr exception() const override {
    const std::lock_guard lock(error_mutex_);
    return error_ ? error_ : inner_->exception();
  }
  void abort() override {
    aborted_ = true;
    inner_->abort();
  }

  bool wait(milliseconds timeout) override {
    // Before the message can fail: where no thread can be had for it, the message is as it was.
    std::optional<Waker::Watch> watch;
    if (!profiled_) watch.emplace(*inner_);
    try {
      const bool received = profiled_ ? wait_in_one(timeout) : wait_in_slices(timeout);
      done_ = true;
      return received;
    } catch (const pybind11::error_already_set&) {  // of a signal handler
      core_->leave(inner_);
      throw;
    } catch (...) {
      {
        const std::lock_guard lock(error_mutex_);
        error_ = std::current_exception();
      }
      done_ = true;
      throw;
    }
  }

 private:
  bool wait_in_slices(milliseconds timeout) {
    const Clock::time_point start = Clock::now();
    milliseconds limit = timeout, left = timeout;
    while (true) {
      try {
        if (inner_->wait(left)) return true;
      } catch (const std::exception& error) {
        throw_with_limit(error, left, limit);
      }
      if (aborted_.exchange(false)) return false;  // by the caller
      run_signal_handlers();
      if (limit == kNoTimeout) limit = milliseconds(core_->inner_timeout_ms.load());
      left = std::max(limit - std::chrono::duration_cast<milliseconds>(Clock::now() - start), milliseconds(1));
    }
  }

  // The profiler takes the end of the first slice for that of the message.
  bool wait_in_one(milliseconds timeout) {
    const auto received = std::make_shared<std::atomic<bool>>(false);
    run_on_thread([inner = inner_, timeout, received] { *received = inner->wait(timeout); }, [] {});
    return *received;
  }

  // Gloo names the limit of the last slice.
  [[noreturn]] static void throw_with_limit(const std::exception& error, milliseconds left, milliseconds limit) {
    std::string text = error.what();
    const std::string of_slice = c10::str("waiting ", left.count(), "ms");
    const size_t place = left == limit ? std::string::npos : text.find(of_slice);
    if (place == std::string::npos) throw;
    text.replace(place, of_slice.size(), c10::str("waiting ", limit.count(), "ms"));
    throw std::runtime_error(text);
  }

  const bool profiled_ = at::hasCallbacks();
  std::atomic<bool> done_{false};
  std::atomic<bool> aborted_{false};
  mutable std::mutex error_mutex_;
  std::exception_ptr error_;
};

// A Work that cannot be waited for in slices: it runs code of its own in wait().
class InterruptibleLambda : public InterruptibleWork {
 public:
  using InterruptibleWork::InterruptibleWork;

  bool wait(milliseconds timeout) override {
    run_on_thread([inner = inner_, timeout] { inner->wait(timeout); }, [this] { core_->leave(inner_); });
    return true;
  }
};

class ReduceScatterWork : public c10d::Work {
 public:
  struct Part {
    WorkPtr sum;
    at::Tensor share;  // of the sum, what belongs to this rank
    at::Tensor output;
  };

  ReduceScatterWork(std::vector<Part> parts, std::shared_ptr<GroupCore> core)
      : parts_(std::move(parts)), core_(std::move(core)) {}

  bool wait(milliseconds /*timeout*/) override {  // which Gloo's ignores, too
    for (const Part& part : parts_) {
      try {
        wait_with_signals(*part.sum);
      } catch (const pybind11::error_already_set&) {  // of a signal handler
        core_->leave(part.sum);
        throw;
      }
      part.output.copy_(part.share);
    }
    return true;
  }

 private:
  const std::vector<Part> parts_;
  const std::shared_ptr<GroupCore> core_;
};

bool fits(const at::Tensor& output, const at::Tensor& input, int64_t ranks) {
  if (!input.is_cpu() || !output.is_cpu() || input.layout() != at::kStrided || output.layout() != at::kStrided ||
      input.scalar_type() != output.scalar_type() || input.dim() == 0 || input.dim() != output.dim()) {
    return false;
  }
  return output.size(0) > 0 && output.size(0) * ranks == input.size(0) &&
         input.sizes().slice(1) == output.sizes().slice(1);
}

}  // namespace

void run_on_thread(std::function<void()> inner, const std::function<void()>& leave) {
  std::packaged_task<void()> task([inner = std::move(inner), state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    inner();
  });
  std::future<void> done = task.get_future();
  std::thread(std::move(task)).detach();
  while (done.wait_for(kLook) != std::future_status::ready) {
    try {
      run_signal_handlers();
    } catch (...) {
      leave();
      throw;
    }
  }
  done.get();
}

WorkPtr make_interruptible(WorkPtr work, const std::shared_ptr<GroupCore>& core) {
  if (!work) return work;
  const c10d::OpType type = work->retrieveOpType();
  if (c10d::isP2POp(type)) return c10::make_intrusive<InterruptibleMessage>(type, std::move(work), core);
  if (dynamic_cast<ReduceScatterWork*>(work.get()) != nullptr) return work;
  if (type == c10d::OpType::UNKNOWN) return c10::make_intrusive<InterruptibleLambda>(type, std::move(work), core);
  return c10::make_intrusive<InterruptibleWork>(type, std::move(work), core);
}

WorkPtr reduce_then_scatter(c10d::Backend& inner, const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options,
                            const std::shared_ptr<GroupCore>& core) {
  const int64_t ranks = inner.getSize();
  // Which other operations Gloo passes on to its all-reduce depends on torch's version.
  if (outputs.size() != inputs.size() || options.reduceOp != c10d::ReduceOp::SUM) return nullptr;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!fits(outputs[i], inputs[i], ranks)) return nullptr;
  }
  c10d::AllreduceOptions sum_options;
  sum_options.reduceOp = options.reduceOp;
  sum_options.timeout = options.timeout;
  std::vector<ReduceScatterWork::Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<at::Tensor> buffer{inputs[i].clone()};
    WorkPtr sum = inner.allreduce(buffer, sum_options);
    parts.push_back({std::move(sum), buffer[0].chunk(ranks)[inner.getRank()], outputs[i]});
  }
  return c10::make_intrusive<ReduceScatterWork>(std::move(parts), core);
}

}  // namespace echo::pg
