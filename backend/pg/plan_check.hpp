// With diagnostics=True: before an all-reduce starts, the ranks compare what they are about to do. Quantized calls
// carry a description of themselves, which is compared anyway; but a rank that forwards where another quantizes, or
// forwards another tensor, meets nobody who could compare.
#pragma once

#include <mutex>
#include <string>

#include "store_rounds.hpp"

namespace echo::pg {

class PlanCheck {
 public:
  explicit PlanCheck(StoreRounds rounds) : rounds_(std::move(rounds)) {}

  // Collective, a few round trips to the store. What differs between this rank's `plan` and that of another rank, empty
  // if nothing does; `reason`, for the decision, is only shown. Throws c10::DistBackendError where a rank stays away.
  std::string differs(const std::string& plan, const std::string& reason, int32_t rank);

 private:
  std::mutex mutex_;
  StoreRounds rounds_;
};

}  // namespace echo::pg
