#include "store_rounds.hpp"

#include <algorithm>

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include "store_answer.hpp"
#include "watched_store.hpp"

namespace echo::pg {

namespace {

constexpr size_t kMostMessageBytes = 2000;
// For questions whose answer can be done without.
constexpr std::chrono::milliseconds kShortly{500};

}  // namespace

std::vector<std::string> StoreRounds::exchange(const std::string& text) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::string> keys;
  for (int32_t rank = 0; rank < size_; ++rank) keys.push_back(key(rank, round_));
  std::string known;
  try {
    const std::vector<uint8_t> mine(text.begin(), text.end());
    require_answer(
        ask([store = store_, key = keys[rank_], mine] { store->set(key, mine); }, left_to_ask(start, timeout_)));
    wait_for_keys(store_, keys, timeout_, [&] {
      known = who_cannot_come(keys);
      TORCH_CHECK_WITH(DistBackendError, known.empty(), known);
    });
    auto texts = answer_within(left_to_ask(start, timeout_), [store = store_, keys] {
      std::vector<std::string> said;
      for (const std::string& each : keys) said.push_back(store->get_to_str(each));
      return said;
    });
    require_answer(texts.has_value());
    ++round_;
    return std::move(*texts);
  } catch (const pybind11::error_already_set&) {
    throw;
  } catch (const std::exception& error) {
    if (!known.empty()) throw;
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    fail_waiting(torch_error != nullptr ? torch_error->what_without_backtrace() : error.what(),
                 std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start));
  }
}

std::string StoreRounds::who_cannot_come(const std::vector<std::string>& keys) {
  const std::optional<FaultReport> failure = reports_.first_heard();
  const bool ends = failure && failure->fate == GroupFate::kEnds;
  // A store that does not answer tells nothing: the wait goes on until its time-out.
  if (ends && !holds(keys).value_or(true)) return failure->in_words();
  for (int32_t rank = 0; rank < size_; ++rank) {
    // Asked in this order: what a process said before it ended counts.
    if (!reports_.processes()->has_exited(rank) || holds({keys[rank]}).value_or(true)) continue;
    return "the process of rank " + std::to_string(rank) + " has exited";
  }
  return {};
}

void StoreRounds::forget() {
  if (round_ < 2) return;
  // Without an answer the next round fails.
  ask([store = store_, key = key(rank_, round_ - 2)] { store->deleteKey(key); }, kShortly);
}

std::string StoreRounds::first_failure(const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    std::string text = texts[rank].substr(0, kMostMessageBytes);
    std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' && c != '\n'; }, '?');
    return "rank " + std::to_string(rank) + ": " + text;
  }
  return {};
}

std::optional<bool> StoreRounds::holds(const std::vector<std::string>& keys) const {
  return answer_within(kShortly, [store = store_, keys] { return store->check(keys); });
}

// Nothing where the store has gone with its process, or is stopped: then it names nobody.
std::optional<std::string> StoreRounds::missing_ranks() const {
  std::string ranks;
  for (int32_t rank = 0; rank < size_; ++rank) {
    std::optional<bool> there;
    try {
      there = holds({key(rank, round_)});
    } catch (const std::exception&) {
    }
    if (!there) return std::nullopt;
    if (*there) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return ranks;
}

void StoreRounds::fail_waiting(const std::string& cause, std::chrono::milliseconds waited) const {
  if (const std::optional<std::string> missing = missing_ranks(); missing && !missing->empty()) {
    TORCH_CHECK_WITH(DistBackendError, false, "rank ", *missing, " did not come within ", timeout_.count(), " ms (",
                     cause, ")");
  }
  // The process that keeps the store may be a rank's.
  const std::string exited = reports_.processes()->exited_by_now();
  TORCH_CHECK_WITH(DistBackendError, false, exited, exited.empty() ? "" : ", and ", "the store no longer answers rank ",
                   rank_, " after ", waited.count(), " ms (", cause, ")");
}

}  // namespace echo::pg
