// Where a call comes from, and where a pass starts: module and autograd signals of the issuing thread, and what a group makes of them.
//
// Signals are thread-local, because autograd runs backward on threads of its own and a recomputed forward on the same ones. A pass starts
// with the outermost module call (forward), the outermost autograd run (backward), the outermost module call inside it (recompute), or by hand.
// A group counts a pass only when it is about to quantize in it, so module calls that only some ranks make change nothing.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "../core/config.h"
#include "../core/policy.h"

namespace echo::pg {

// Called by the hooks on every module call and autograd run; they never throw and never touch Python.
void module_enter(ModuleRole role);
void module_exit();
void backward_enter();
void backward_exit();
void set_hooks_installed(bool installed);

void exact_enter();
void exact_exit();

// Starts a pass by hand for all groups, from the next call on.
void announce_pass_everywhere(Direction direction);

struct CallOrigin {
  CallContext context = CallContext::kNone;
  ModuleRole role = ModuleRole::kPlain;
  int64_t depth = 0;               // modules entered on this thread
  bool parameter_gradient = false;
  bool no_grad = false;            // gradients were off where the outermost module was entered, or are off now
  uint64_t pass_mark = 0;          // names the pass, 0 if nothing announces one here
  bool hooks = false;
  bool exact = false;
};

CallOrigin current_origin();

// A site in its pass, as the group counts.
struct SiteTicket {
  Direction direction = Direction::kForward;
  bool starts_pass = false;
  bool no_grad = false;            // the pass runs without gradients
  int64_t index = 0;               // quantized all-reduces of the pass before this one
};

// Passes of one group. Callers hold the group's issue lock.
class PassTracker {
 public:
  // Starts a pass by hand for this group.
  void announce(Direction direction);

  // Direction of a call that nothing else tells apart: the one announced last, by hand, if any.
  std::optional<Direction> hand_direction() const;

  // Books a quantized call. `forced` overrides the direction that the origin implies.
  SiteTicket book(const CallOrigin& origin, std::optional<Direction> forced);

  // Books a call that stays exact; returns how many passes have been seen that way while nothing was quantized.
  int64_t book_exact(const CallOrigin& origin);

  // Sites of the last completed forward pass without gradients, once there was one.
  std::optional<int64_t> sites_without_grad() const { return sites_without_grad_; }

  int64_t passes(Direction direction) const { return of(direction).passes; }
  int64_t sites(Direction direction) const { return of(direction).sites; }
  int64_t last_sites(Direction direction) const { return of(direction).last_sites; }

 private:
  struct Record {
    uint64_t context_mark = 0;
    uint64_t hand_mark = 0;
    int64_t passes = 0;
    int64_t sites = 0;       // of the pass under way
    int64_t last_sites = 0;  // of the last completed one
    bool no_grad = false;
  };

  Record& of(Direction direction) { return records_[static_cast<int>(direction)]; }
  const Record& of(Direction direction) const { return records_[static_cast<int>(direction)]; }
  void start(Direction direction, bool no_grad);

  struct Announced {
    std::array<uint64_t, kDirections> marks{};
    std::array<bool, kDirections> no_grad{};
  };
  friend void announce_pass_everywhere(Direction direction);
  static Announced announced_everywhere();

  std::array<Record, kDirections> records_;
  Announced announced_;
  std::optional<int64_t> sites_without_grad_;
  uint64_t exact_mark_ = 0;
  int64_t exact_passes_ = 0;
};

// True for the sites that early-site bits apply to: the first ones of a forward pass without gradients.
bool is_early_site(const SiteTicket& ticket, std::optional<int64_t> known_sites, int64_t count, double fraction);

}  // namespace echo::pg
