// A store whose waits end when a process of the group does, or its server has not answered in time: for inner backends,
// which wait for the addresses of all ranks until the time-out whatever has become of them.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "processes.hpp"

namespace echo::pg {

// Returns when the store holds all keys; asks it again and again, since its own wait hears of nothing but keys. `check`
// is called in between and may throw. Throws c10::DistBackendError after `timeout`, also where the store does not
// answer; 0 or less: never.
void wait_for_keys(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<std::string>& keys,
                   std::chrono::milliseconds timeout, const std::function<void()>& check);

class WatchedStore : public c10d::PrefixStore {
 public:
  WatchedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<const Processes> processes,
               std::chrono::milliseconds timeout)
      : PrefixStore("watched", std::move(store)), processes_(std::move(processes)), timeout_(timeout) {}

  // Throw c10::DistBackendError that names a rank whose process has ended while keys are missing.
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;

  // What else inner backends ask. Throw c10::DistBackendError where the store does not answer within the time-out.
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool check(const std::vector<std::string>& keys) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override;

 private:
  // What question(store) returns.
  template <typename Question>
  auto answer(Question question);

  std::shared_ptr<const Processes> processes_;
  std::chrono::milliseconds timeout_;
};

}  // namespace echo::pg
