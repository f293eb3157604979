// One thread per group on which its quantized calls on CPU tensors run, in the order in which they were issued: the
// order is the same on all ranks, which is what makes their exchanges meet.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace echo::pg {

class Worker {
 public:
  // Called exactly once: with true to do the work, with false if the worker stops before its turn. Must not throw.
  using Job = std::function<void(bool run)>;

  Worker() = default;
  ~Worker() { stop(false, std::chrono::seconds(1)); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // The thread starts with the first job.
  void enqueue(Job job);

  // True on the worker's own thread, where a callback of a future may issue a call: waiting for the queue there would
  // never end.
  bool is_this_thread() const;

  // How long the job under way has been running, zero if none is.
  std::chrono::milliseconds running_for() const;

  // Ends the thread: when the queue is empty (`drain`) or after the job under way. A thread that takes longer than
  // `patience` is left to itself; it owns all that its job needs.
  void stop(bool drain, std::chrono::milliseconds patience);

 private:
  struct Shared {
    mutable std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> queue;
    std::thread::id thread;
    bool stopping = false;
    bool running = false;
    bool ended = false;
    std::chrono::steady_clock::time_point started;
  };

  static void run(const std::shared_ptr<Shared>& shared);

  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::thread thread_;  // guarded by shared_->mutex
};

}  // namespace echo::pg
