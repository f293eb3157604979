#include "deferred_update.hpp"

#include <thread>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace echo::pg {
namespace {

constexpr std::chrono::microseconds kPoll{50};

}  // namespace

DeferredUpdate::DeferredUpdate(c10::Device device) : device_(device), ready_(device.type()), updated_(device.type()) {}

void DeferredUpdate::join(const c10::Stream& stream, bool recording) {
  if (!pending_) return;
  if (recording) {
    updated_.synchronize();
  } else {
    updated_.block(stream);
  }
  pending_ = false;
}

std::byte* DeferredUpdate::keep(int64_t bytes, const c10::Stream& stream) {
  if (bytes >= too_many_) return nullptr;
  if (this->bytes() < bytes) {
    kept_ = at::Tensor();  // goes first, so that the new one does not come on top of it
    try {
      if (!own_) own_ = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
      const c10::StreamGuard guard(*own_);
      kept_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
    } catch (const c10::Error&) {  // of the allocator, or of CUDA where not even a stream can be made
      too_many_ = bytes;
      return nullptr;
    }
    // The allocator gives what `own_` may use from now on; earlier users of that memory are ahead in it.
    ready_.record(*own_);
    ready_.block(stream);
  }
  return static_cast<std::byte*>(kept_.data_ptr());
}

void DeferredUpdate::fork(const c10::Stream& stream, const at::Tensor& state) {
  ready_.record(stream);
  ready_.block(*own_);
  c10::impl::VirtualGuardImpl(device_.type()).recordDataPtrOnStream(state.storage().data_ptr(), *own_);
}

bool DeferredUpdate::ends_within(std::chrono::milliseconds patience) const {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!updated_.query()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

}  // namespace echo::pg
