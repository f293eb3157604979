// Groups that torch derives from a group instead of making them anew: by split, by shrink, by merge.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "torch_version.hpp"

namespace echo::pg {

struct PyHolder;

// What torch carries from a group to one derived from it: the `pg_options` that the group was made with.
struct GroupOptions : c10d::Backend::Options {
  GroupOptions(std::shared_ptr<PyHolder> pg_options, std::chrono::milliseconds limit)
      : Options("echo", limit), chosen(std::move(pg_options)) {}

#if ECHO_TORCH_AT_LEAST(14)
  c10::intrusive_ptr<Options> clone() const override { return c10::make_intrusive<GroupOptions>(*this); }
#endif

  std::shared_ptr<PyHolder> chosen;
};

struct DerivedGroup {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::vector<int> ranks;  // of its members in the group it comes from; empty where they come from several
  c10::intrusive_ptr<c10d::Backend::Options> options;  // torch's copy of the parent's, or the caller's; may be null
};

// How Python makes such groups. Collective over the members of the new group alone.
struct GroupDeriver {
  std::function<c10::intrusive_ptr<c10d::Backend>(const DerivedGroup&)> make;
  std::shared_ptr<PyHolder> pg_options;
};

}  // namespace echo::pg
