#include "devices_in_use.hpp"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>

namespace echo::pg {
namespace {

// Whatever else tells starts CUDA's driver itself.
bool torch_has_started_cuda() {
  const pybind11::gil_scoped_acquire gil;
  return pybind11::module_::import("torch.cuda").attr("is_initialized")().cast<bool>();
}

}  // namespace

std::vector<c10::Device> devices_in_use() {
  std::vector<c10::Device> devices;
  if (!torch_has_started_cuda() || !at::hasCUDA()) return devices;
  const c10::DeviceIndex count = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
  for (c10::DeviceIndex index = 0; index < count; ++index) {
    if (at::detail::getCUDAHooks().hasPrimaryContext(index)) devices.emplace_back(c10::DeviceType::CUDA, index);
  }
  return devices;
}

void wait_for_current_streams(const std::vector<c10::Device>& devices) {
  for (const c10::Device device : devices) {
    c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }
}

}  // namespace echo::pg
