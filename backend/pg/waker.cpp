#include "waker.hpp"

#include <unistd.h>

#include <atomic>
#include <thread>

#include "signals.hpp"

namespace echo::pg {
namespace {

constexpr int kIdleRounds = 25;  // without a wait, before the thread sleeps

}  // namespace

Waker::Waker() : home_(getpid()) {
  std::thread([this] { run(); }).detach();
}

Waker& Waker::own() {
  static std::atomic<Waker*> current{nullptr};
  static std::mutex* const making = new std::mutex();
  Waker* found = current.load(std::memory_order_acquire);
  if (found != nullptr && found->home_ == getpid()) return *found;
  const std::lock_guard lock(*making);
  found = current.load(std::memory_order_acquire);
  if (found == nullptr || found->home_ != getpid()) {
    found = new Waker();  // never destroyed, as its thread is never joined
    current.store(found, std::memory_order_release);
  }
  return *found;
}

Waker::Watch::Watch(c10d::Work& work) : waker_(own()) {
  const std::lock_guard lock(waker_.mutex_);
  place_ = waker_.waits_.insert(waker_.waits_.end(), Wait{&work});
  if (waker_.asleep_) waker_.wanted_.notify_one();
}

Waker::Watch::~Watch() {
  const std::lock_guard lock(waker_.mutex_);
  waker_.waits_.erase(place_);
}

void Waker::run() {
  int idle = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    idle = waits_.empty() ? idle + 1 : 0;
    if (idle > kIdleRounds) {
      asleep_ = true;
      wanted_.wait(lock, [this] { return !waits_.empty(); });
      asleep_ = false;
      idle = 0;
    }
    lock.unlock();
    std::this_thread::sleep_for(kSignalPeriod);
    lock.lock();
    for (Wait& wait : waits_) {
      if (wait.is_long) {
        try {
          wait.work->abort();
        } catch (...) {  // a Work that cannot be aborted is waited for in one
        }
      }
      wait.is_long = true;
    }
  }
}

}  // namespace echo::pg
