// A disagreement between ranks that only the device has seen: stages on CUDA tensors run after the host has gone on, so
// they leave word in pinned memory, and the host looks there before each later call.
#pragma once

#include <atomic>
#include <string>

namespace echo::cuda {
struct Disagreement;
}

namespace echo::pg {

class DeviceFault {
 public:
  // Where the stages leave word; made at the first call, nullptr in builds without CUDA. Callers hold the group's issue
  // lock.
  cuda::Disagreement* word();

  // What was found there, in words; empty if nothing. Never blocks.
  std::string text() const;

 private:
  std::atomic<cuda::Disagreement*> word_{nullptr};
};

}  // namespace echo::pg
