// A store whose waits end when a process of the group does: for inner backends, which wait for the addresses of all
// ranks until the time-out whatever has become of them.
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
// is called in between and may throw. Throws c10::DistBackendError after `timeout`; 0 or less: never.
void wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, std::chrono::milliseconds timeout,
                   const std::function<void()>& check);

class WatchedStore : public c10d::PrefixStore {
 public:
  WatchedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<const Processes> processes)
      : PrefixStore("watched", std::move(store)), processes_(std::move(processes)) {}

  // Throw c10::DistBackendError that names a rank whose process has ended while keys are missing.
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  std::vector<uint8_t> get(const std::string& key) override;

 private:
  std::shared_ptr<const Processes> processes_;
};

}  // namespace echo::pg
