#include "store_rounds.hpp"

#include <c10/util/Exception.h>

namespace echo::pg {

std::vector<std::string> StoreRounds::exchange(const std::string& text) {
  store_->set(key(rank_), std::vector<uint8_t>(text.begin(), text.end()));
  std::vector<std::string> keys;
  for (int32_t rank = 0; rank < size_; ++rank) keys.push_back(key(rank));
  try {
    if (timeout_.count() > 0) {
      store_->wait(keys, timeout_);
    } else {
      store_->wait(keys);
    }
  } catch (const std::exception& error) {
    TORCH_CHECK_WITH(DistBackendError, false, "rank ", missing_ranks(), " did not come within ", timeout_.count(),
                     " ms (", error.what(), ")");
  }
  std::vector<std::string> texts;
  for (const std::string& each : keys) {
    const std::vector<uint8_t> bytes = store_->get(each);
    texts.emplace_back(bytes.begin(), bytes.end());
  }
  ++round_;
  return texts;
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
