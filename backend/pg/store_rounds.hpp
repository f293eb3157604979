// Rounds over a group's store in which every rank says something and hears everybody; a rank that stays away is named.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "fault_reports.hpp"

namespace echo::pg {

class StoreRounds {
 public:
  // `name` keeps the keys of different purposes apart; each is used once in the life of a group. `reports` of the group
  // outlive this object.
  StoreRounds(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int32_t rank, int32_t size,
              std::chrono::milliseconds timeout, const FaultReports& reports)
      : store_(c10::make_intrusive<c10d::PrefixStore>(name, store)),
        rank_(rank),
        size_(size),
        timeout_(timeout),
        reports_(reports) {}

  // Collective: this rank's part of a round, and the texts of all by rank. Throws c10::DistBackendError that names who
  // did not come within the time-out, had exited before it spoke, or reports a failure that ends this group; and what a
  // signal handler raises meanwhile.
  std::vector<std::string> exchange(const std::string& text);

  // Collective: what went wrong on this rank, empty if nothing did, for the first failure of all ranks, "rank 1: ...".
  std::string exchange_failure(const std::string& mine) { return first_failure(exchange(mine)); }

  // Removes from the store what this rank said in the round before the last one; all ranks have read it.
  void forget();

  // By rank what went wrong there: the first that is not empty, in a length and in characters fit for a message.
  static std::string first_failure(const std::vector<std::string>& texts);

 private:
  // Nothing if the store does not answer.
  std::optional<bool> holds(const std::vector<std::string>& keys) const;
  std::string who_cannot_come(const std::vector<std::string>& keys);
  std::string key(int32_t rank, int round) const { return std::to_string(round) + "/" + std::to_string(rank); }
  std::optional<std::string> missing_ranks() const;
  [[noreturn]] void fail_waiting(const std::string& cause, std::chrono::milliseconds waited) const;

  c10::intrusive_ptr<c10d::Store> store_;
  int32_t rank_;
  int32_t size_;
  std::chrono::milliseconds timeout_;
  const FaultReports& reports_;
  int round_ = 0;
};

}  // namespace echo::pg
