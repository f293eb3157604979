// Counters of one group. Bytes of calls are bytes of their tensors; wire bytes are what this rank sent to others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "log.hpp"

namespace echo::pg {

struct CallCount {
  int64_t calls = 0;
  int64_t bytes = 0;

  void add(int64_t call_bytes) {
    ++calls;
    bytes += call_bytes;
  }
};

struct StatsSnapshot {
  CallCount quantized;
  CallCount forwarded;  // all-reduces only
  std::map<std::string, CallCount> forwarded_by_reason;
  int64_t other_calls = 0;  // every other collective
  int64_t wire_bytes = 0;
  int64_t wire_padding_bytes = 0;
};

class GroupStats {
 public:
  void add_quantized(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    counts_.quantized.add(bytes);
  }

  void add_forwarded(const std::string& reason, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    counts_.forwarded.add(bytes);
    counts_.forwarded_by_reason[reason].add(bytes);
  }

  void add_other() {
    const std::lock_guard lock(mutex_);
    ++counts_.other_calls;
  }

  void add_wire(int64_t bytes, int64_t padding_bytes) {
    const std::lock_guard lock(mutex_);
    counts_.wire_bytes += bytes;
    counts_.wire_padding_bytes += padding_bytes;
  }

  StatsSnapshot snapshot() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  mutable std::mutex mutex_;
  StatsSnapshot counts_;
};

// The most frequent reasons for exact calls, at most three.
inline ReasonCounts top_reasons(const StatsSnapshot& stats) {
  ReasonCounts reasons;
  for (const auto& [reason, count] : stats.forwarded_by_reason) reasons.emplace_back(reason, count.calls);
  std::stable_sort(reasons.begin(), reasons.end(), [](const auto& x, const auto& y) { return x.second > y.second; });
  if (reasons.size() > 3) reasons.resize(3);
  return reasons;
}

}  // namespace echo::pg
