// Updates of the state that calls leave to a stream of their own (residual "group"): the memory that a call keeps for
// its update, and the events by which one waits for the other. Of one group on one device.
//
//   callers' stream   | call 1 |   the caller's work   | call 2 |
//   updates' stream            | update 1 |                     | update 2 |
//                              ^ by event            ^ by event
//
// There is one such memory, so an update is over before the next call of the group begins; a site of the same lane
// needs its state then anyway.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace echo::pg {

// Not thread-safe: callers hold the group's issue lock, or have ended its calls.
class DeferredUpdate {
 public:
  explicit DeferredUpdate(c10::Device device);

  // `stream` waits for the latest update: before whatever reads or writes the state. By events where the streams are
  // not recorded; a recording may not touch an event from outside, so before one the host waits.
  void join(const c10::Stream& stream, bool recording);

  // At least `bytes` bytes for a call on `stream`, which has joined; null where there is not so much memory left.
  // Before `run`.
  std::byte* keep(int64_t bytes, const c10::Stream& stream);

  // Calls enqueue(updates' stream) for work that comes after what `stream` holds so far. `state` is what that work
  // reads and writes besides what was kept: its memory is not given to others before.
  template <typename Enqueue>
  void run(const c10::Stream& stream, const at::Tensor& state, Enqueue enqueue) {
    fork(stream, state);
    enqueue(*own_);
    updated_.record(*own_);
    pending_ = true;
  }

  // False if the latest update has not run within `patience`.
  bool ends_within(std::chrono::milliseconds patience) const;

  int64_t bytes() const { return kept_.defined() ? kept_.numel() : 0; }

 private:
  void fork(const c10::Stream& stream, const at::Tensor& state);

  const c10::Device device_;
  // Its last use of what was kept is the update, so it owns that memory. Made when it is needed, since a device's first
  // stream takes memory: where little is left, echo's own checks are to find it out.
  std::optional<c10::Stream> own_;
  at::Tensor kept_;
  int64_t too_many_ = INT64_MAX;  // bytes that there was no memory for
  c10::Event ready_;
  c10::Event updated_;
  bool pending_ = false;  // no stream has waited for `updated_` yet; those that call later wait for that stream's call
};

}  // namespace echo::pg
