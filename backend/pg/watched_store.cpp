#include "watched_store.hpp"

#include <algorithm>
#include <thread>

#include <c10/util/Exception.h>

#include "signals.hpp"
#include "store_answer.hpp"

namespace echo::pg {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{20};

}  // namespace

void wait_for_keys(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<std::string>& keys,
                   milliseconds timeout, const std::function<void()>& check) {
  const Clock::time_point start = Clock::now();
  const auto there = [&] {
    const auto answer = answer_within(left_to_ask(start, timeout), [store, keys] { return store->check(keys); });
    require_answer(answer.has_value());
    return *answer;
  };
  for (auto pause = kFirstPause; !there(); pause = std::min(2 * pause, kLongestPause)) {
    run_signal_handlers();
    check();
    TORCH_CHECK_WITH(DistBackendError, timeout.count() <= 0 || Clock::now() - start < timeout, "timed out after ",
                     timeout.count(), " ms");
    std::this_thread::sleep_for(pause);
  }
}

void WatchedStore::wait(const std::vector<std::string>& keys) { wait(keys, getTimeout()); }

void WatchedStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  wait_for_keys(store_, joinKeys(keys), timeout, [&] {
    const std::string exited = processes_->exited();
    // Asked in this order: what a process said before it ended counts.
    TORCH_CHECK_WITH(DistBackendError, exited.empty() || check(keys), exited);
  });
}

template <typename Question>
auto WatchedStore::answer(Question question) {
  const auto limit = left_to_ask(Clock::now(), timeout_);
  auto answer = answer_within(limit, [store = store_, question = std::move(question)] { return question(*store); });
  require_answer(answer.has_value());
  return std::move(*answer);
}

std::vector<uint8_t> WatchedStore::get(const std::string& key) {
  wait({key});
  return answer([key = joinKey(key)](c10d::Store& store) { return store.get(key); });
}

std::vector<std::vector<uint8_t>> WatchedStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return answer([keys = joinKeys(keys)](c10d::Store& store) { return store.multiGet(keys); });
}

void WatchedStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  answer([key = joinKey(key), value](c10d::Store& store) { return store.set(key, value), true; });
}

int64_t WatchedStore::add(const std::string& key, int64_t value) {
  return answer([key = joinKey(key), value](c10d::Store& store) { return store.add(key, value); });
}

bool WatchedStore::check(const std::vector<std::string>& keys) {
  return answer([keys = joinKeys(keys)](c10d::Store& store) { return store.check(keys); });
}

void WatchedStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  answer([key = joinKey(key), value](c10d::Store& store) { return store.append(key, value), true; });
}

void WatchedStore::multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) {
  answer([keys = joinKeys(keys), values](c10d::Store& store) { return store.multiSet(keys, values), true; });
}

}  // namespace echo::pg
