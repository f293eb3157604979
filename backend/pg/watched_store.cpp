#include "watched_store.hpp"

#include <algorithm>
#include <thread>

#include <c10/util/Exception.h>

#include "signals.hpp"

namespace echo::pg {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{20};

}  // namespace

void wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, milliseconds timeout,
                   const std::function<void()>& check) {
  const Clock::time_point start = Clock::now();
  for (auto pause = kFirstPause; !store.check(keys); pause = std::min(2 * pause, kLongestPause)) {
    run_signal_handlers();
    check();
    TORCH_CHECK_WITH(DistBackendError, timeout.count() <= 0 || Clock::now() - start < timeout, "timed out after ",
                     timeout.count(), " ms");
    std::this_thread::sleep_for(pause);
  }
}

void WatchedStore::wait(const std::vector<std::string>& keys) { wait(keys, getTimeout()); }

void WatchedStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  wait_for_keys(*this, keys, timeout, [&] {
    const std::string exited = processes_->exited();
    // Asked in this order: what a process said before it ended counts.
    TORCH_CHECK_WITH(DistBackendError, exited.empty() || check(keys), exited);
  });
}

std::vector<uint8_t> WatchedStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

}  // namespace echo::pg
