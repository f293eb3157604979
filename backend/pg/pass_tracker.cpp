#include "pass_tracker.hpp"

#include <algorithm>
#include <cmath>

namespace echo::pg {
namespace {

std::optional<Direction> direction_of(CallContext context) {
  switch (context) {
    case CallContext::kForward:
      return Direction::kForward;
    case CallContext::kBackward:
      return Direction::kBackward;
    case CallContext::kRecompute:
      return Direction::kRecompute;
    case CallContext::kNone:
      break;
  }
  return std::nullopt;
}

}  // namespace

std::optional<Direction> PassTracker::hand_direction() const {
  const Announcements shared = announced_everywhere();
  uint64_t latest = 0;
  std::optional<Direction> direction;
  for (int d = 0; d < kDirections; ++d) {
    const uint64_t mark = std::max(announced_.marks[d], shared.marks[d]);
    if (mark > latest) {
      latest = mark;
      direction = static_cast<Direction>(d);
    }
  }
  return direction;
}

SiteTicket PassTracker::book(const CallOrigin& origin, std::optional<Direction> forced) {
  const std::optional<Direction> implied = direction_of(origin.context);
  const Direction direction = forced ? *forced : implied ? *implied : hand_direction().value_or(Direction::kForward);
  const int d = static_cast<int>(direction);
  Record& record = records_[d];

  // A mark of another direction's pass says nothing about this one.
  const uint64_t context_mark = implied == direction ? origin.pass_mark : 0;
  const Announcements shared = announced_everywhere();
  const bool for_group = announced_.marks[d] > shared.marks[d];
  const uint64_t hand_mark = for_group ? announced_.marks[d] : shared.marks[d];

  const bool by_context = context_mark != 0 && context_mark != record.context_mark;
  const bool by_hand = hand_mark > record.hand_mark;
  const bool starts = by_context || by_hand || record.passes == 0;
  if (starts) {
    const bool announced_no_grad = for_group ? announced_.no_grad[d] : shared.no_grad[d];
    start_pass(direction, origin.no_grad || (by_hand && !by_context && announced_no_grad));
  }
  if (context_mark != 0) record.context_mark = context_mark;
  record.hand_mark = std::max(record.hand_mark, hand_mark);
  return SiteTicket{.direction = direction,
                    .starts_pass = starts,
                    .no_grad = record.no_grad,
                    .index = record.sites++,
                    .half = origin.alternates ? static_cast<int32_t>(1 + record.turns++ % 2) : 0};
}

void PassTracker::start_pass(Direction direction, bool no_grad) {
  Record& record = records_[static_cast<int>(direction)];
  if (record.passes > 0) {
    record.last_sites = record.sites;
    if (direction == Direction::kForward) forward_sites_ = record.sites;
  }
  ++record.passes;
  record.sites = 0;
  record.turns = 0;
  record.no_grad = no_grad;
}

std::optional<int64_t> PassTracker::completed_forward_sites() const {
  const Record& forward = records_[static_cast<int>(Direction::kForward)];
  return forward.passes > 0 ? std::optional(forward.sites) : forward_sites_;
}

int64_t PassTracker::book_exact(const CallOrigin& origin) {
  if (origin.pass_mark != 0 && origin.pass_mark != exact_mark_) {
    exact_mark_ = origin.pass_mark;
    ++exact_passes_;
  }
  return exact_passes_;
}

bool is_early_site(const SiteTicket& ticket, std::optional<int64_t> known_sites, int64_t count, double fraction) {
  if (ticket.direction != Direction::kForward || !ticket.no_grad) return false;
  if (count > 0) return ticket.index < count;
  if (fraction <= 0.0) return false;
  if (!known_sites) return true;
  return ticket.index < static_cast<int64_t>(std::floor(fraction * static_cast<double>(*known_sites)));
}

}  // namespace echo::pg
