// Calls on a device that must follow each other, though callers use several streams: each waits by event for the one
// before.
//
// A call recorded into a graph waits only for calls of the same recording: an event from outside may not be touched
// there. How a replay lies to calls before it is then up to the stream that it runs on.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace echo::pg {

class StreamOrder {
  // The latest call, eager or of the latest recording.
  struct Last {
    std::optional<c10::Event> event;
    std::optional<c10::Stream> stream;
    uint64_t capture = 0;
  };

 public:
  // A call's turn: made before its work is enqueued on `stream`, finished after. `capture` names the recording that the
  // stream takes part in, 0 for none. Others wait for their turn until this object goes.
  class Turn {
   public:
    Turn(StreamOrder& order, const c10::Stream& stream, uint64_t capture)
        : lock_(order.mutex_),
          stream_(stream),
          capture_(capture),
          last_(capture == 0 ? order.eager_ : order.captured_) {
      if (last_.event && last_.capture == capture && last_.stream != stream) last_.event->block(stream);
    }
    // Without finish() something failed on the way; what was enqueued before that must still be waited for.
    ~Turn() {
      if (finished_) return;
      try {
        finish();
      } catch (...) {
        // The device is beyond waiting for.
      }
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    void finish() {
      if (!last_.event) last_.event.emplace(stream_.device_type());
      last_.event->record(stream_);
      last_.stream = stream_;
      last_.capture = capture_;
      finished_ = true;
    }

   private:
    std::unique_lock<std::mutex> lock_;
    c10::Stream stream_;
    uint64_t capture_;
    Last& last_;
    bool finished_ = false;
  };

  // True if all eager calls are done on the device. Not while this thread records a graph.
  bool is_idle() const {
    const std::lock_guard lock(mutex_);
    return !eager_.event || eager_.event->query();
  }

 private:
  mutable std::mutex mutex_;
  Last eager_;
  Last captured_;
};

}  // namespace echo::pg
