// Lanes of a group: a lane is a sequence of calls each waited for before the next is issued [paper 5]; a call issued
// before that runs in a lane of its own.
//
// Taken and freed in program order only (issue, wait, or the caller's Work going away), never when a call happens to
// finish, so that all ranks agree.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace echo::pg {

class LaneTable {
 public:
  // The smallest free lane.
  int32_t take() {
    const std::lock_guard lock(mutex_);
    for (size_t lane = 0; lane < taken_.size(); ++lane) {
      if (taken_[lane]) continue;
      taken_[lane] = true;
      return static_cast<int32_t>(lane);
    }
    taken_.push_back(true);
    return static_cast<int32_t>(taken_.size() - 1);
  }

  void free(int32_t lane) {
    const std::lock_guard lock(mutex_);
    taken_[static_cast<size_t>(lane)] = false;
  }

 private:
  std::mutex mutex_;
  std::vector<bool> taken_;
};

}  // namespace echo::pg
