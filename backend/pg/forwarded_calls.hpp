// What the Works of a group's forwarded CPU calls share with it. They may outlive the group, and keep nothing else of
// it: above all the calls that were given up by Ctrl-C.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace echo::pg {

class ForwardedCalls {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  std::atomic<int64_t> timeout_ms{0};  // of calls that bring none
  // Any call ever: the end of the group waits for none then, since later ones may queue behind it.
  std::atomic<bool> gave_up{false};

  // Gives up a call in which the inner backend still waits. Until it has ended it is kept: a peer that comes finds the
  // tensors in their place. Of these ways the first is for collectives, whose isCompleted() tells when that is; the
  // second for messages that nobody else holds any more; the third for what waits on a thread of its own.
  void leave(WorkPtr collective);
  void leave_message(WorkPtr message);
  void leave_thread(std::future<void> running);

  // Lets go of what has ended by now. To be called by later calls; costs nothing where nothing was given up. Messages
  // are looked at once in kMessagePeriod, for kMessageLook each.
  void drop_ended();

  // What is kept by now, to be destroyed after the inner backend.
  std::vector<WorkPtr> take_kept();

  static constexpr std::chrono::milliseconds kMessagePeriod{1000};
  static constexpr std::chrono::milliseconds kMessageLook{2};

 private:
  struct Left {
    std::vector<WorkPtr> collectives;
    std::vector<WorkPtr> messages;
    std::vector<std::future<void>> threads;

    bool empty() const { return collectives.empty() && messages.empty() && threads.empty(); }
  };

  // What has ended, taken out of what was left, so that it is destroyed without the lock. Messages do not tell.
  Left take_ended();
  void look_at_messages();

  std::mutex mutex_;
  std::atomic<bool> any_{false};
  Left left_;                                        // guarded by the mutex, as is what follows
  std::chrono::steady_clock::time_point next_look_;  // at messages
};

}  // namespace echo::pg
