#include "store_rounds.hpp"

#include <algorithm>
#include <thread>

#include <c10/util/Exception.h>

namespace echo::pg {
namespace {

constexpr auto kFirstPause = std::chrono::milliseconds(1);
constexpr auto kLongestPause = std::chrono::milliseconds(20);

}  // namespace

void StoreRounds::say(const std::string& text) {
  store_->set(key(rank_), std::vector<uint8_t>(text.begin(), text.end()));
}

std::vector<std::string> StoreRounds::hear(const HasExited& has_exited) {
  std::vector<std::string> keys;
  for (int32_t rank = 0; rank < size_; ++rank) keys.push_back(key(rank));
  try {
    wait_for(keys, has_exited);
  } catch (const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    TORCH_CHECK_WITH(DistBackendError, false, "rank ", missing_ranks(), " did not come within ", timeout_.count(),
                     " ms (", torch_error != nullptr ? torch_error->what_without_backtrace() : error.what(), ")");
  }
  std::vector<std::string> texts;
  for (const std::string& each : keys) {
    const std::vector<uint8_t> bytes = store_->get(each);
    texts.emplace_back(bytes.begin(), bytes.end());
  }
  ++round_;
  return texts;
}

// The store's own wait hears of nothing but keys, so where ranks are watched it is asked again and again instead.
void StoreRounds::wait_for(const std::vector<std::string>& keys, const HasExited& has_exited) {
  if (!has_exited && timeout_.count() <= 0) return store_->wait(keys);
  if (!has_exited) return store_->wait(keys, timeout_);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  for (auto pause = kFirstPause; !store_->check(keys); pause = std::min(2 * pause, kLongestPause)) {
    for (int32_t rank = 0; rank < size_; ++rank) {
      // Asked in this order: what a process said before it ended counts.
      if (rank == rank_ || !has_exited(rank) || store_->check({keys[rank]})) continue;
      TORCH_CHECK_WITH(DistBackendError, false, "the process of rank ", rank, " has exited");
    }
    TORCH_CHECK_WITH(DistBackendError, timeout_.count() <= 0 || Clock::now() - start < timeout_, "timed out");
    std::this_thread::sleep_for(pause);
  }
}

std::string StoreRounds::first_failure(const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty()) return "rank " + std::to_string(rank) + ": " + texts[rank];
  }
  return {};
}

// A store that has gone with its process answers nothing: then nobody can be named.
std::string StoreRounds::missing_ranks() const {
  std::string ranks;
  for (int32_t rank = 0; rank < size_; ++rank) {
    try {
      if (store_->check({key(rank)})) continue;
    } catch (const std::exception&) {
      return "(unknown: the store does not answer)";
    }
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return ranks;
}

}  // namespace echo::pg
