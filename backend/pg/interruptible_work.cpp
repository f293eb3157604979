#include "interruptible_work.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <pybind11/pybind11.h>

#include "delegating_work.hpp"
#include "signals.hpp"
#include "waker.hpp"
#include "watched_wait.hpp"

namespace echo::pg {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class InterruptibleWork : public DelegatingWork {
 public:
  InterruptibleWork(c10d::OpType type, WorkPtr inner, std::shared_ptr<ForwardedCalls> calls)
      : DelegatingWork(-1, type, std::move(inner)), calls_(std::move(calls)) {}

  void synchronize() override { inner_->synchronize(); }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }

  bool wait(milliseconds timeout) override {
    return unless_interrupted([&] { return wait_with_signals(*inner_, timeout); }, [&] { calls_->leave(inner_); });
  }

 protected:
  const std::shared_ptr<ForwardedCalls> calls_;
};

// A send or receive. Where its wait runs out of time Gloo breaks every connection of the group, so slices end by
// abort(), which makes the wait return false and changes nothing else but what the inner Work says of its completion.
class InterruptibleMessage : public InterruptibleWork {
 public:
  using InterruptibleWork::InterruptibleWork;

  // From here on nobody can wait for it any more, and only its end frees its tensor.
  ~InterruptibleMessage() override {
    if (given_up_ && !done_) calls_->leave_message(inner_);
  }

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
    const bool in_one = profiled_;
    if (!in_one) watch.emplace(*inner_);
    bool interrupted = false;
    try {
      const bool received = unless_interrupted([&] { return in_one ? wait_in_one(timeout) : wait_in_slices(timeout); },
                                               [&] { interrupted = given_up_ = calls_->gave_up = true; });
      done_ = true;
      return received;
    } catch (...) {
      if (!interrupted) fail(std::current_exception());
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
      if (limit == kNoTimeout) limit = milliseconds(calls_->timeout_ms.load());
      left = std::max(limit - std::chrono::duration_cast<milliseconds>(Clock::now() - start), milliseconds(1));
    }
  }

  // The profiler takes the end of the first slice for that of the message, so Ctrl-C alone ends one: a thread that
  // waited on until the time-out would break the connections then.
  bool wait_in_one(milliseconds timeout) {
    const auto received = std::make_shared<std::atomic<bool>>(false);
    run_on_thread([inner = inner_, timeout, received] { *received = inner->wait(timeout); },
                  [&](std::future<void> running) {
                    inner_->abort();
                    running.wait();
                    done_ = received->load();
                    profiled_ = false;
                  });
    return *received;
  }

  void fail(std::exception_ptr error) {
    const std::lock_guard lock(error_mutex_);
    error_ = std::move(error);
    done_ = true;
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

  std::atomic<bool> profiled_{at::hasCallbacks()};
  std::atomic<bool> given_up_{false};
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
    run_on_thread([inner = inner_, timeout] { inner->wait(timeout); },
                  [this](std::future<void> running) { calls_->leave_thread(std::move(running)); });
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

  ReduceScatterWork(std::vector<Part> parts, std::shared_ptr<ForwardedCalls> calls)
      : parts_(std::move(parts)), calls_(std::move(calls)) {}

  bool wait(milliseconds /*timeout*/) override {  // which Gloo's ignores, too
    for (const Part& part : parts_) {
      unless_interrupted([&] { return wait_with_signals(*part.sum); }, [&] { calls_->leave(part.sum); });
      part.output.copy_(part.share);
    }
    return true;
  }

 private:
  const std::vector<Part> parts_;
  const std::shared_ptr<ForwardedCalls> calls_;
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

void run_on_thread(std::function<void()> inner, const std::function<void(std::future<void>)>& leave) {
  std::packaged_task<void()> task([inner = std::move(inner), state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    inner();
  });
  std::future<void> done = task.get_future();
  std::thread(std::move(task)).detach();
  while (done.wait_for(kSignalPeriod) != std::future_status::ready) {
    unless_interrupted(run_signal_handlers, [&] { leave(std::move(done)); });
  }
  done.get();
}

WorkPtr make_interruptible(WorkPtr work, const std::shared_ptr<ForwardedCalls>& calls) {
  if (!work) return work;
  const c10d::OpType type = work->retrieveOpType();
  if (c10d::isP2POp(type)) return c10::make_intrusive<InterruptibleMessage>(type, std::move(work), calls);
  if (dynamic_cast<ReduceScatterWork*>(work.get()) != nullptr) return work;
  if (type == c10d::OpType::UNKNOWN) return c10::make_intrusive<InterruptibleLambda>(type, std::move(work), calls);
  return c10::make_intrusive<InterruptibleWork>(type, std::move(work), calls);
}

WorkPtr reduce_then_scatter(c10d::Backend& inner, const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options,
                            const std::shared_ptr<ForwardedCalls>& calls) {
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
  return c10::make_intrusive<ReduceScatterWork>(std::move(parts), calls);
}

}  // namespace echo::pg
