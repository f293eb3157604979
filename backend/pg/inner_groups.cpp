#include "inner_groups.hpp"

#include <algorithm>
#include <utility>

#include "gil.hpp"
#include "torch_version.hpp"

namespace echo::pg {

BackendPtr InnerGroups::get(c10::DeviceType type) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = made_.find(type); found != made_.end()) return found->second;
    if (type != c10::DeviceType::CUDA || !later_) return nullptr;
  }
  return make_later();
}

BackendPtr InnerGroups::make_later() {
  const GilRelease no_gil;
  const std::lock_guard making(make_mutex_);
  Make make;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = made_.find(c10::DeviceType::CUDA); found != made_.end()) return found->second;
    make = later_;
  }
  BackendPtr made = make ? make() : nullptr;  // what it throws leaves it to be made by the next call
  const std::lock_guard lock(mutex_);
  if (!later_) return nullptr;  // closed meanwhile
  later_ = nullptr;
  if (!made) return nullptr;
  if (timeout_) made->setTimeout(*timeout_);
#if ECHO_TORCH_AT_LEAST(10)
  if (uid_) made->setGroupUid(*uid_);
#endif
  if (bracket_open_ && made->supportsCoalescing()) made->startCoalescing();
  return made_.emplace(c10::DeviceType::CUDA, std::move(made)).first->second;
}

BackendsByDevice InnerGroups::made() const {
  const std::lock_guard lock(mutex_);
  return made_;
}

bool InnerGroups::may_have_device() const {
  const std::lock_guard lock(mutex_);
  return later_ ||
         std::any_of(made_.begin(), made_.end(), [](const auto& entry) { return entry.first != c10::DeviceType::CPU; });
}

void InnerGroups::set_timeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  timeout_ = timeout;
  for (const auto& [type, backend] : made_) backend->setTimeout(timeout);
}

void InnerGroups::set_uid(const std::string& uid) {
  const std::lock_guard lock(mutex_);
  uid_ = uid;
#if ECHO_TORCH_AT_LEAST(10)
  for (const auto& [type, backend] : made_) backend->setGroupUid(uid);
#endif
}

BackendsByDevice InnerGroups::set_bracket(bool open) {
  const std::lock_guard lock(mutex_);
  bracket_open_ = open;
  return made_;
}

void InnerGroups::make_no_more() {
  const std::lock_guard lock(mutex_);
  later_ = nullptr;
}

BackendsByDevice InnerGroups::take_all() {
  const std::lock_guard lock(mutex_);
  later_ = nullptr;
  return std::exchange(made_, {});
}

}  // namespace echo::pg
