// Where a call comes from: module and autograd signals of the issuing thread, and passes announced by hand.
//
// Signals are thread-local, because autograd runs backward on threads of its own and a recomputed forward on the same
// ones. A pass starts with the outermost module call (forward), the outermost autograd run (backward), the outermost
// module call inside it (recompute), or by hand.
#pragma once

#include <array>
#include <cstdint>

#include "../core/config.h"
#include "../core/policy.h"

namespace echo::pg {

// Called by the hooks on every module call and autograd run; they never throw and never touch Python. The depth that
// module_enter returns counts the module itself.
int64_t module_enter(ModuleRole role);
void module_exit();
void backward_enter();
void backward_exit();
void set_hooks_installed(bool installed);

// exact() nests and holds for the whole process.
void exact_enter();
void exact_exit();

struct CallOrigin {
  CallContext context = CallContext::kNone;
  ModuleRole role = ModuleRole::kPlain;
  int64_t depth = 0;  // modules entered on this thread
  bool parameter_gradient = false;
  bool alternates = false;  // two halves of a batch take turns here, call by call
  bool no_grad = false;     // gradients were off where the outermost module was entered, or are off now
  uint64_t pass_mark = 0;   // names the pass, 0 if nothing announces one here
  bool hooks = false;
  bool exact = false;
};

CallOrigin current_origin();

// Passes announced by hand, per direction: the mark of the latest and whether gradients were off then. Marks come from
// one process-wide counter: "another pass than last time" is an inequality, and of several announcements the largest
// mark is the latest.
struct Announcements {
  std::array<uint64_t, kDirections> marks{};
  std::array<bool, kDirections> no_grad{};

  void add(Direction direction);
};

// For all groups: starts a pass from their next call on.
void announce_everywhere(Direction direction);
Announcements announced_everywhere();

}  // namespace echo::pg
