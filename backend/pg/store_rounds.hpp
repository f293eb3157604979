// Rounds over a group's store in which every rank says something and hears everybody; a rank that stays away is named.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace echo::pg {

class StoreRounds {
 public:
  // `name` keeps the keys of different purposes apart; each is used once in the life of a group.
  StoreRounds(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int32_t rank, int32_t size,
              std::chrono::milliseconds timeout)
      : store_(c10::make_intrusive<c10d::PrefixStore>(name, store)), rank_(rank), size_(size), timeout_(timeout) {}

  // True if the rank's process has ended.
  using HasExited = std::function<bool(int32_t rank)>;

  // This rank's part of a round, without waiting for anyone.
  void say(const std::string& text);
  // Collective after say(). The texts by rank. Throws c10::DistBackendError that names who did not come within the
  // time-out, or who had exited before it spoke.
  std::vector<std::string> hear(const HasExited& has_exited = {});

  std::vector<std::string> exchange(const std::string& text, const HasExited& has_exited = {}) {
    say(text);
    return hear(has_exited);
  }

  // Collective: what went wrong on this rank, empty if nothing did, for the first failure of all ranks, "rank 1: ...".
  std::string exchange_failure(const std::string& mine, const HasExited& has_exited = {}) {
    return first_failure(exchange(mine, has_exited));
  }

  // By rank what went wrong there: the first that is not empty.
  static std::string first_failure(const std::vector<std::string>& texts);

 private:
  void wait_for(const std::vector<std::string>& keys, const HasExited& has_exited);
  std::string key(int32_t rank) const { return std::to_string(round_) + "/" + std::to_string(rank); }
  std::string missing_ranks() const;

  c10::intrusive_ptr<c10d::Store> store_;
  int32_t rank_;
  int32_t size_;
  std::chrono::milliseconds timeout_;
  int round_ = 0;
};

}  // namespace echo::pg
