#include "watched_wait.hpp"

#include <algorithm>
#include <optional>

#include "signals.hpp"

namespace echo::pg {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLook{200};
// What a process sent before it ended may still complete the work, and an error of Gloo's own leaves nothing behind.
constexpr milliseconds kLastMessages{1000};

}  // namespace

std::string wait_while_all_live(c10d::Work& work, const Processes& processes, milliseconds timeout) {
  const Clock::time_point start = Clock::now();
  std::optional<Clock::time_point> noticed;
  while (true) {
    milliseconds slice = kLook;
    if (timeout != kNoTimeout) {
      const auto left = timeout - std::chrono::duration_cast<milliseconds>(Clock::now() - start);
      slice = std::clamp(left, milliseconds(1), kLook);  // 0 is no limit to it
    }
    try {
      work.wait(slice);
      return {};
    } catch (...) {
      if (work.isCompleted()) break;
      if (timeout != kNoTimeout && Clock::now() - start >= timeout) throw;
    }
    run_signal_handlers();
    std::string exited = processes.exited();
    if (exited.empty()) continue;
    if (!noticed) noticed = Clock::now();
    if (Clock::now() - *noticed >= kLastMessages) return exited;
  }
  work.wait(kNoTimeout);  // complete: throws its own error, if it has one
  return {};
}

}  // namespace echo::pg
