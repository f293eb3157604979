// What one rank says of a failure, as it lies in the store. Nothing in the store is trusted: whoever can write there
// can end a group, and nothing more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace echo::pg {

enum class GroupFate : uint8_t {
  kEnds,      // ranks no longer agree on what has been exchanged, or the group never came about
  kSurvives,  // a forwarded call failed, which is a matter of the inner backend
};

struct FaultReport {
  static constexpr size_t kMostTextBytes = 10'000;

  std::optional<int32_t> rank;  // who says it; nullopt: what lies in the store is no report
  GroupFate fate = GroupFate::kEnds;
  std::string text;

  // "rank 1 reports: ...".
  std::string in_words() const;
};

// A line with the format's version, the rank and the fate, then the text.
std::string to_stored(const FaultReport& report);

// The report that `stored` is: of a rank below `size`, its text valid UTF-8 without control characters and cut to
// kMostTextBytes. Anything else is a report of nobody's that ends the group.
FaultReport from_stored(const std::string& stored, int32_t size);

}  // namespace echo::pg
