// A derived group is made like any other, from inner groups of its own: no communicator is split, so ranks that are not
// in it have no part in making it, and nothing waits for them.
#include "derived_groups.hpp"

#include <algorithm>
#include <numeric>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "gil.hpp"
#include "process_group_echo.hpp"

namespace echo::pg {
namespace {

constexpr int kShrinkAbort = 1;  // torch.distributed.distributed_c10d.SHRINK_ABORT

}  // namespace

// A new object at every call: torch up to 2.13 writes the new group's name and time-out into what it gets.
c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupEcho::getBackendOptions() {
  return c10::make_intrusive<GroupOptions>(deriver_.pg_options, inner(main_device())->getBackendOptions()->timeout);
}

// torch forgets the device when it registers a split group, but its inner backend was told.
std::optional<c10::Device> ProcessGroupEcho::bound_device() {
  const auto bound = getBoundDeviceId();
  return bound ? bound : inner(main_device())->getBoundDeviceId();
}

BackendPtr ProcessGroupEcho::derive(const DerivedGroup& wanted) {
  const GilRelease no_gil;
  const std::lock_guard lock(derived_mutex_);
  if (derived_ && derived_->store.lock() == wanted.store) {
    if (BackendPtr made = derived_->group.lock()) return made;
  }
  BackendPtr made = deriver_.make(wanted);
  if (const auto device = bound_device()) {
    made->setBoundDeviceId(device);
    made->eagerConnectSingleDevice(*device);
  }
  derived_.emplace(c10::weak_intrusive_ptr<c10d::Store>(wanted.store), c10::weak_intrusive_ptr<c10d::Backend>(made));
  return made;
}

BackendPtr ProcessGroupEcho::split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                   const c10::intrusive_ptr<Options>& options) {
  check_alive();
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), "rank ", rank, " to split off must be in [0, ", getSize(), ")");
  }
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  return derive({.store = store,
                 .rank = static_cast<int>(mine - ranks.begin()),
                 .size = static_cast<int>(ranks.size()),
                 .ranks = ranks,
                 .options = options});
}

BackendPtr ProcessGroupEcho::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                   const c10::intrusive_ptr<Options>& options, const int& rank, const int& size) {
  check_alive();
  return derive({.store = store, .rank = rank, .size = size, .ranks = {}, .options = options});
}

#if ECHO_TORCH_AT_LEAST(10)
// For use after a failure too, so it does not ask whether this group is sound.
BackendPtr ProcessGroupEcho::shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                    const c10::intrusive_ptr<Options>& options) {
  std::vector<int> ranks(getSize());
  std::iota(ranks.begin(), ranks.end(), 0);
  for (const int64_t excluded : ranks_to_exclude) {
    TORCH_CHECK_VALUE(excluded != getRank(), "rank ", excluded, " is to be excluded and must not take part itself");
    std::erase(ranks, static_cast<int>(excluded));
  }
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if ((shrink_flags & kShrinkAbort) != 0) abort();
  return derive({.store = c10::make_intrusive<c10d::PrefixStore>("shrunk", store_),
                 .rank = static_cast<int>(mine - ranks.begin()),
                 .size = static_cast<int>(ranks.size()),
                 .ranks = ranks,
                 .options = options});
}
#endif

}  // namespace echo::pg
