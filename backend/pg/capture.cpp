#include "capture.hpp"

#if defined(ECHO_WITH_CUDA)
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace echo::pg {

uint64_t capture_of([[maybe_unused]] const c10::Stream& stream) {
#if defined(ECHO_WITH_CUDA)
  if (stream.device_type() == c10::DeviceType::CUDA) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    C10_CUDA_CHECK(cudaStreamGetCaptureInfo(c10::cuda::CUDAStream(stream).stream(), &status, &id));
    if (status != cudaStreamCaptureStatusNone) return uint64_t{id} + 1;
  }
#endif
  return 0;
}

uint64_t current_capture([[maybe_unused]] c10::Device device) {
#if defined(ECHO_WITH_CUDA)
  if (device.is_cuda()) return capture_of(c10::cuda::getCurrentCUDAStream(device.index()).unwrap());
#endif
  return 0;
}

}  // namespace echo::pg
