// What ranks tell each other, through the store, of a failure that each of them met on its own: a time-out names nobody
// but the rank it struck, and a closed connection not even that.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "fault_report.hpp"
#include "processes.hpp"

namespace echo::pg {

class FaultReports {
 public:
  // How long a rank that has failed waits to hear of the others: those that met the same fault do so within the spread
  // of their arrival, and an error shall come at most 5 s after its time-out.
  static constexpr std::chrono::milliseconds kPatience{2000};

  static constexpr int32_t kMostRanks = 64;

  FaultReports(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t size,
               std::shared_ptr<const Processes> processes);
  ~FaultReports();
  FaultReports(const FaultReports&) = delete;
  FaultReports& operator=(const FaultReports&) = delete;

  // Says `text`, and what becomes of this group by it, to the other ranks, in every group of this process, since who
  // waits for it may do so in another one.
  // Returns what is known of them, to be appended: who has exited, what they say, who is silent. Ends as soon as every
  // rank has spoken or exited, and after kPatience at the latest even where the store does not answer. In a group of
  // more than kMostRanks, whose questions would bury the store, only who has exited.
  std::string exchange(const std::string& text, GroupFate fate) const;

  // What the rank said that was the first to end this group; before one has, the first report that the group survives.
  // Nothing if there is none or the store does not answer. Throws what the store throws, and what a signal handler
  // raises meanwhile.
  std::optional<FaultReport> first_heard() const;

  const std::shared_ptr<const Processes>& processes() const;

  // "rank 0 of 2".
  std::string name() const;

  struct Member;

 private:
  std::shared_ptr<Member> member_;
};

}  // namespace echo::pg
