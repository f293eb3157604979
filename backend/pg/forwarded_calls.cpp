#include "forwarded_calls.hpp"

#include <algorithm>
#include <iterator>
#include <system_error>
#include <utility>

#include "gil.hpp"

namespace echo::pg {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = ForwardedCalls::WorkPtr;

// Moves those of which it is true to the end and out.
template <typename Entry, typename Test>
std::vector<Entry> take_if(std::vector<Entry>& entries, Test&& test) {
  const auto first =
      std::stable_partition(entries.begin(), entries.end(), [&](const Entry& entry) { return !test(entry); });
  std::vector<Entry> taken(std::make_move_iterator(first), std::make_move_iterator(entries.end()));
  entries.erase(first, entries.end());
  return taken;
}

// A message tells of its end by a wait alone, and a wait that runs out of time breaks all connections of its group. So
// a thread waits, and abort() ends that, which does nothing else. Called once it ends one wait only: where it comes
// together with the end of the message, the next look finds that.
bool has_ended(c10d::Work& message) {
  std::future<bool> waits;
  try {
    waits = std::async(std::launch::async, [&] { return message.wait(); });
  } catch (const std::system_error&) {  // no thread: it may have ended
    return false;
  }
  if (waits.wait_for(ForwardedCalls::kMessageLook) != std::future_status::ready) message.abort();
  try {
    return waits.get();
  } catch (const std::exception&) {  // no peer will come any more
    return true;
  }
}

}  // namespace

void ForwardedCalls::leave(WorkPtr collective) {
  const std::lock_guard lock(mutex_);
  left_.collectives.push_back(std::move(collective));
  any_ = gave_up = true;
}

void ForwardedCalls::leave_message(WorkPtr message) {
  const std::lock_guard lock(mutex_);
  left_.messages.push_back(std::move(message));
  any_ = gave_up = true;
}

void ForwardedCalls::leave_thread(std::future<void> running) {
  const std::lock_guard lock(mutex_);
  left_.threads.push_back(std::move(running));
  any_ = gave_up = true;
}

ForwardedCalls::Left ForwardedCalls::take_ended() {
  const std::lock_guard lock(mutex_);
  Left ended;
  ended.collectives = take_if(left_.collectives, [](const WorkPtr& work) { return work->isCompleted(); });
  ended.threads = take_if(left_.threads, [](const std::future<void>& running) {
    return running.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  });
  any_ = !left_.empty();
  return ended;
}

void ForwardedCalls::drop_ended() {
  if (!any_) return;
  const GilRelease no_gil;  // what the end of a tensor takes must not be held by who waits for the lock
  take_ended();
  look_at_messages();
}

void ForwardedCalls::look_at_messages() {
  std::vector<WorkPtr> messages;
  {
    const std::lock_guard lock(mutex_);
    if (left_.messages.empty() || Clock::now() < next_look_) return;
    next_look_ = Clock::now() + kMessagePeriod;
    messages.swap(left_.messages);  // nobody else waits for them meanwhile
  }
  const std::vector<WorkPtr> ended = take_if(messages, [](const WorkPtr& message) { return has_ended(*message); });
  const std::lock_guard lock(mutex_);
  left_.messages.insert(left_.messages.end(), messages.begin(), messages.end());
  any_ = !left_.empty();
}

std::vector<WorkPtr> ForwardedCalls::take_kept() {
  Left left;
  {
    const std::lock_guard lock(mutex_);
    left = std::exchange(left_, {});
    any_ = false;
  }
  std::vector<WorkPtr> kept = std::move(left.collectives);
  std::move(left.messages.begin(), left.messages.end(), std::back_inserter(kept));
  return kept;
}

}  // namespace echo::pg
