// The passes of one group: which direction a call belongs to, whether it is the first of its pass, how many sites a
// pass has.
//
// A pass counts only once the group quantizes in it, so module calls that only some ranks make change nothing.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "passes.hpp"

namespace echo::pg {

// A site in its pass, as the group counts.
struct SiteTicket {
  Direction direction = Direction::kForward;
  bool starts_pass = false;
  bool no_grad = false;  // the pass runs without gradients
  int64_t index = 0;     // quantized all-reduces of the pass before this one
  int32_t half = 0;      // 1 and 2 in turn where two halves of a batch alternate, else 0
};

// Not thread-safe: callers hold the group's issue lock.
class PassTracker {
 public:
  // Starts a pass by hand for this group.
  void announce(Direction direction) { announced_.add(direction); }

  // The direction announced last, for this group or for all, if any was.
  std::optional<Direction> hand_direction() const;

  // Books a quantized call. `forced` overrides the direction that the origin implies.
  SiteTicket book(const CallOrigin& origin, std::optional<Direction> forced);

  // Books a call that stays exact. Returns how many passes such calls have been seen in.
  int64_t book_exact(const CallOrigin& origin);

  // Sites of the last completed forward pass, once there was one.
  std::optional<int64_t> forward_sites() const { return forward_sites_; }
  // What forward_sites() will be for the next forward pass.
  std::optional<int64_t> completed_forward_sites() const;
  // Before the first call: as if a forward pass with so many sites had gone before.
  void resume_after(int64_t forward_sites) { forward_sites_ = forward_sites; }

  int64_t passes(Direction direction) const { return records_[static_cast<int>(direction)].passes; }
  int64_t sites(Direction direction) const { return records_[static_cast<int>(direction)].sites; }
  int64_t last_sites(Direction direction) const { return records_[static_cast<int>(direction)].last_sites; }

 private:
  struct Record {
    uint64_t context_mark = 0;
    uint64_t hand_mark = 0;
    int64_t passes = 0;
    int64_t sites = 0;       // of the pass under way
    int64_t last_sites = 0;  // of the last completed one
    int64_t turns = 0;       // calls of the pass under way in which halves of a batch alternate
    bool no_grad = false;
  };

  void start_pass(Direction direction, bool no_grad);

  std::array<Record, kDirections> records_;
  Announcements announced_;
  std::optional<int64_t> forward_sites_;
  uint64_t exact_mark_ = 0;
  int64_t exact_passes_ = 0;
};

// True for the sites that early-site bits apply to: the first `count`, or else the first `fraction` of a pass as long
// as the last one, and all while that is unknown; in forward passes without gradients only [paper 7.2].
bool is_early_site(const SiteTicket& ticket, std::optional<int64_t> known_sites, int64_t count, double fraction);

}  // namespace echo::pg
