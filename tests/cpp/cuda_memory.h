// What the CUDA tests share of the runtime: its errors as exceptions, memory that is given back.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace echo::testing {

inline void check_cuda(cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

struct DeviceMemory {
  explicit DeviceMemory(int64_t bytes) { check_cuda(cudaMalloc(&at, bytes)); }
  ~DeviceMemory() { cudaFree(at); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* at = nullptr;
};

}  // namespace echo::testing
