#include "worker.hpp"

#include <pthread.h>

namespace echo::pg {

void Worker::enqueue(Job job) {
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->stopping) {
      shared_->queue.push_back(std::move(job));
      if (!thread_.joinable()) {
        thread_ = std::thread([shared = shared_] { run(shared); });
        shared_->thread = thread_.get_id();
      }
      shared_->changed.notify_all();
      return;
    }
  }
  job(false);
}

void Worker::run(const std::shared_ptr<Shared>& shared) {
  pthread_setname_np(pthread_self(), "echo-worker");
  std::unique_lock lock(shared->mutex);
  while (true) {
    shared->changed.wait(lock, [&] { return shared->stopping || !shared->queue.empty(); });
    if (shared->queue.empty()) break;
    Job job = std::move(shared->queue.front());
    shared->queue.pop_front();
    shared->running = true;
    shared->started = std::chrono::steady_clock::now();
    lock.unlock();
    job(true);
    job = nullptr;  // what it holds goes before the next job, and without the lock
    lock.lock();
    shared->running = false;
  }
  shared->ended = true;
  shared->changed.notify_all();
}

bool Worker::is_this_thread() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->thread == std::this_thread::get_id();
}

std::chrono::milliseconds Worker::running_for() const {
  const std::lock_guard lock(shared_->mutex);
  if (!shared_->running) return std::chrono::milliseconds(0);
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - shared_->started);
}

void Worker::stop(bool drain, std::chrono::milliseconds patience) {
  std::deque<Job> dropped;
  std::thread finished;
  {
    std::unique_lock lock(shared_->mutex);
    shared_->stopping = true;
    if (!drain) dropped.swap(shared_->queue);
    shared_->changed.notify_all();
    const bool own_thread = shared_->thread == std::this_thread::get_id();
    if (thread_.joinable() && !own_thread) {
      shared_->changed.wait_for(lock, patience, [&] { return shared_->ended; });
    }
    if (shared_->ended) {
      finished = std::move(thread_);
    } else if (thread_.joinable()) {
      thread_.detach();
    }
  }
  if (finished.joinable()) finished.join();
  for (Job& job : dropped) job(false);
}

}  // namespace echo::pg
