// Ends waits for messages of Gloo, a few times a second, so that who waits may look at signals.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <list>
#include <mutex>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace echo::pg {

// One thread per process, started by the first wait. It sleeps without a limit when nobody has waited for a while, so
// that it costs an idle process nothing.
class Waker {
 public:
  struct Wait {
    c10d::Work* work = nullptr;
    bool is_long = false;  // a round has seen it
  };

  // While it lives, work.abort() is called every kSignalPeriod, but not at once: most waits are over by then.
  class Watch {
   public:
    explicit Watch(c10d::Work& work);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    Waker& waker_;
    std::list<Wait>::iterator place_;
  };

 private:
  Waker();
  // That of this process: a forked one has no thread of its parent's.
  static Waker& own();
  void run();

  const pid_t home_;
  std::mutex mutex_;
  std::condition_variable wanted_;
  bool asleep_ = false;
  std::list<Wait> waits_;
};

}  // namespace echo::pg
