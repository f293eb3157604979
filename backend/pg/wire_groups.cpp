#include "wire_groups.hpp"

#include <thread>
#include <utility>

namespace echo::pg {

BackendPtr WireGroups::get(c10::Device device) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = groups_.find(device.type()); found != groups_.end()) return found->second;
  }
  BackendPtr made = make_(c10::DeviceTypeName(device.type(), /*lower_case=*/true));
  if (device.has_index()) made->setBoundDeviceId(device);
  const std::lock_guard lock(mutex_);
  return groups_.emplace(device.type(), std::move(made)).first->second;
}

void WireGroups::set_timeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  for (const auto& [type, group] : groups_) group->setTimeout(timeout);
}

BackendsByDevice WireGroups::take_all() {
  const std::lock_guard lock(mutex_);
  return std::exchange(groups_, {});
}

void WireGroups::shutdown() {
  for (const auto& [type, group] : take_all()) group->shutdown();
}

void WireGroups::tear_down() noexcept {
  try {
    leave_to_thread(take_all());
  } catch (...) {
  }
}

void leave_to_thread(BackendsByDevice groups, std::vector<c10::intrusive_ptr<c10d::Work>> works) noexcept {
  if (groups.empty()) return;
  try {
    std::thread([groups = std::move(groups), works = std::move(works)]() mutable {
      for (const auto& [type, group] : groups) {
        try {
          group->abort();
        } catch (...) {
          // Aborted because something failed already: that failure is the one to report.
        }
      }
      groups.clear();
      works.clear();
    }).detach();
  } catch (...) {
  }
}

}  // namespace echo::pg
