#include "store_answer.hpp"

#include <algorithm>
#include <future>
#include <system_error>
#include <thread>

#include <c10/util/Exception.h>

#include "signals.hpp"

namespace echo::pg {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// An error shall come at most 5 s after its time-out, and one that asks in vain does so about thrice, beside the time
// that it waits for reports of the other ranks.
constexpr milliseconds kGrace{500};
constexpr std::chrono::hours kForEver{24 * 365};

}  // namespace

bool ask(std::function<void()> question, milliseconds limit) {
  const auto task = std::make_shared<std::packaged_task<void()>>(std::move(question));
  std::future<void> outcome = task->get_future();
  const Clock::time_point deadline = Clock::now() + limit;
  try {
    std::thread([task] { (*task)(); }).detach();
  } catch (const std::system_error&) {
    (*task)();  // no more threads are to be had
  }
  while (outcome.wait_until(std::min(deadline, Clock::now() + kSignalPeriod)) != std::future_status::ready) {
    run_signal_handlers();
    if (Clock::now() >= deadline) return false;
  }
  outcome.get();
  return true;
}

milliseconds left_to_ask(Clock::time_point start, milliseconds timeout) {
  if (timeout.count() <= 0) return kForEver;
  const auto left = std::chrono::duration_cast<milliseconds>(start + timeout - Clock::now());
  return std::max(left, milliseconds{0}) + kGrace;
}

void require_answer(bool answered) { TORCH_CHECK_WITH(DistBackendError, answered, "the store does not answer"); }

}  // namespace echo::pg
