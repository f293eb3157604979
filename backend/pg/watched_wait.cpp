#include "watched_wait.hpp"

#include <algorithm>
#include <optional>

#include "signals.hpp"

namespace echo::pg {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// What a process sent before it ended may still complete the work, and an error of Gloo's own leaves nothing behind.
constexpr milliseconds kLastMessages{1000};

// Waits in slices until the work is complete, and calls `look` between them, which returns true to give up; then false.
template <typename Look>
bool wait_in_slices(c10d::Work& work, milliseconds timeout, Look&& look) {
  const Clock::time_point start = Clock::now();
  while (true) {
    milliseconds slice = kSignalPeriod;
    if (timeout != kNoTimeout) {
      const auto left = timeout - std::chrono::duration_cast<milliseconds>(Clock::now() - start);
      slice = std::clamp(left, milliseconds(1), kSignalPeriod);  // 0 is no limit to it
    }
    try {
      work.wait(slice);
      return true;
    } catch (...) {
      if (work.isCompleted()) break;
      if (timeout != kNoTimeout && Clock::now() - start >= timeout) throw;
    }
    run_signal_handlers();
    if (look()) return false;
  }
  work.wait(kNoTimeout);  // complete: throws its own error, if it has one
  return true;
}

}  // namespace

bool wait_with_signals(c10d::Work& work, milliseconds timeout) {
  return wait_in_slices(work, timeout, [] { return false; });
}

std::string wait_while_all_live(c10d::Work& work, const Processes& processes, milliseconds timeout) {
  std::optional<Clock::time_point> noticed;
  std::string exited;
  const bool complete = wait_in_slices(work, timeout, [&] {
    exited = processes.exited();
    if (exited.empty()) return false;
    if (!noticed) noticed = Clock::now();
    return Clock::now() - *noticed >= kLastMessages;
  });
  return complete ? std::string() : exited;
}

}  // namespace echo::pg
