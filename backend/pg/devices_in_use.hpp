// Which CUDA devices this process has worked with.
#pragma once

#include <vector>

#include <c10/core/Device.h>

namespace echo::pg {

// Those with a context. Asking makes none, and does not start CUDA where torch has not.
std::vector<c10::Device> devices_in_use();

// Blocks until what the current streams of these devices hold by now is done.
void wait_for_current_streams(const std::vector<c10::Device>& devices);

}  // namespace echo::pg
