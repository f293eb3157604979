// Whether a stream records a CUDA graph at this moment.
#pragma once

#include <cstdint>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace echo::pg {

// Names the recording that the stream takes part in, equal for all streams of it; 0 if it records none.
uint64_t capture_of(const c10::Stream& stream);

// As above, of the current stream of a device.
uint64_t current_capture(c10::Device device);

}  // namespace echo::pg
