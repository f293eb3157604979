// The first failure of a group. A faulted group never resumes: its ranks no longer agree on what has been exchanged.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include <c10/util/Exception.h>

namespace echo::pg {

class GroupFault {
 public:
  bool is_set() const { return set_.load(std::memory_order_acquire); }

  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }

  // Keeps the first text; true if this was it.
  bool set(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (is_set()) return false;
    text_ = text;
    set_.store(true, std::memory_order_release);
    return true;
  }

  // The same failure, told better.
  void replace(const std::string& text) {
    const std::lock_guard lock(mutex_);
    text_ = text;
  }

  void raise_if_set() const {
    if (!is_set()) return;
    TORCH_CHECK_WITH(DistBackendError, false,
                     "this group has failed and does not resume; make a new one. First failure: ", text());
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> set_{false};
  std::string text_;
};

}  // namespace echo::pg
