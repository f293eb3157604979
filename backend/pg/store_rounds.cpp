#include "store_rounds.hpp"

#include <algorithm>

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include "watched_store.hpp"

namespace echo::pg {

namespace {

constexpr size_t kMostMessageBytes = 2000;

}  // namespace

std::vector<std::string> StoreRounds::exchange(const std::string& text) {
  store_->set(key(rank_, round_), std::vector<uint8_t>(text.begin(), text.end()));
  std::vector<std::string> keys;
  for (int32_t rank = 0; rank < size_; ++rank) keys.push_back(key(rank, round_));
  std::string known;
  try {
    wait_for_keys(*store_, keys, timeout_, [&] {
      known = who_cannot_come(keys);
      TORCH_CHECK_WITH(DistBackendError, known.empty(), known);
    });
  } catch (const pybind11::error_already_set&) {
    throw;
  } catch (const std::exception& error) {
    if (!known.empty()) throw;
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

std::string StoreRounds::who_cannot_come(const std::vector<std::string>& keys) {
  const std::string failure = reports_.first_heard();
  if (!failure.empty() && !store_->check(keys)) return failure;
  for (int32_t rank = 0; rank < size_; ++rank) {
    // Asked in this order: what a process said before it ended counts.
    if (!reports_.processes()->has_exited(rank) || store_->check({keys[rank]})) continue;
    return "the process of rank " + std::to_string(rank) + " has exited";
  }
  return {};
}

void StoreRounds::forget() {
  if (round_ >= 2) store_->deleteKey(key(rank_, round_ - 2));
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

// A store that has gone with its process answers nothing: then nobody can be named.
std::string StoreRounds::missing_ranks() const {
  std::string ranks;
  for (int32_t rank = 0; rank < size_; ++rank) {
    try {
      if (store_->check({key(rank, round_)})) continue;
    } catch (const std::exception&) {
      return "(unknown: the store does not answer)";
    }
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return ranks;
}

}  // namespace echo::pg
