// What the host needs around kernels, whichever they are.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "../core/config.h"
#include "peer_memory.h"

namespace echo::cuda {

// Throws std::runtime_error with CUDA's reason; the next one to ask for the last error does not meet it again.
[[noreturn]] inline void fail(cudaError_t result, const std::string& what) {
  cudaGetLastError();
  throw std::runtime_error(what + ": " + cudaGetErrorString(result));
}

inline void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) fail(result, what);
}

// On a stream of its own, and done on return: other streams may be recording, or hold kernels that wait for a peer.
inline cudaError_t clear_memory(void* memory, size_t bytes) {
  cudaStream_t stream = nullptr;
  cudaError_t result = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (result != cudaSuccess) return result;
  result = cudaMemsetAsync(memory, 0, bytes, stream);
  if (result == cudaSuccess) result = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return result;
}

// A fresh T in pinned memory that host and device address. It lives as long as the process: giving pinned memory back
// would wait for kernels that a lost peer holds up. Pinned memory is had in pages, so they are cut from blocks of many.
template <typename T>
T* new_pinned() {
  constexpr size_t kPerBlock = 64;
  static std::mutex mutex;
  static T* block = nullptr;
  static size_t used = kPerBlock;
  const std::lock_guard<std::mutex> lock(mutex);
  if (used == kPerBlock) {
    const CaptureTolerance tolerance;  // another stream of the process may be recording
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, kPerBlock * sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    block = static_cast<T*>(memory);
    for (size_t i = 0; i < kPerBlock; ++i) new (block + i) T;
    used = 0;
  }
  return block + used++;
}

// Calls body<kDType>().
template <typename Body>
void with_dtype(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat32:
      return body.template operator()<DType::kFloat32>();
    case DType::kBFloat16:
      return body.template operator()<DType::kBFloat16>();
    case DType::kFloat16:
      return body.template operator()<DType::kFloat16>();
  }
}

}  // namespace echo::cuda
