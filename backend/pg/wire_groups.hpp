// The inner groups that carry echo's own exchange, one per device type, apart from those that serve forwarded calls:
// inner backends match calls by order, and the two kinds are issued by different threads.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace echo::pg {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

using BackendsByDevice = std::map<c10::DeviceType, BackendPtr>;

// Aborts and destroys them on a thread of its own. Never blocks: destroying a Gloo group closes its connections, but
// waits for its exchanges under way first.
// Then lets go of `works`, calls that were given up.
void leave_to_thread(BackendsByDevice groups, std::vector<c10::intrusive_ptr<c10d::Work>> works = {}) noexcept;

class WireGroups {
 public:
  // `make` is collective over the group and may take the GIL.
  using Make = std::function<BackendPtr(const std::string& device_type)>;

  explicit WireGroups(Make make) : make_(std::move(make)) {}

  // Made at the first call for a device type. Callers hold the group's issue lock, so that all ranks make them in one
  // order.
  BackendPtr get(c10::Device device);

  bool has(c10::Device device) {
    const std::lock_guard lock(mutex_);
    return groups_.contains(device.type());
  }

  void set_timeout(std::chrono::milliseconds timeout);
  void shutdown();

  // Closes the connections, so that peers notice soon. Never blocks.
  void tear_down() noexcept;

 private:
  BackendsByDevice take_all();

  Make make_;
  std::mutex mutex_;
  BackendsByDevice groups_;
};

}  // namespace echo::pg
