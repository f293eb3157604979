#include "plan_check.hpp"

namespace echo::pg {
namespace {

constexpr char kEnd = '\n';  // of the plan in what a rank says

}  // namespace

std::string PlanCheck::differs(const std::string& plan, const std::string& reason, int32_t rank) {
  const std::lock_guard lock(mutex_);
  const std::vector<std::string> texts = rounds_.exchange(plan + kEnd + reason);
  rounds_.forget();
  for (size_t other = 0; other < texts.size(); ++other) {
    const size_t end = texts[other].find(kEnd);
    if (texts[other].substr(0, end) == plan) continue;
    return "ranks disagree: rank " + std::to_string(rank) + " calls " + plan + " (" + reason + "), rank " +
           std::to_string(other) + " calls " + texts[other].substr(0, end) + " (" + texts[other].substr(end + 1) + ")";
  }
  return {};
}

}  // namespace echo::pg
