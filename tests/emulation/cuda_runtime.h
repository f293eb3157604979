// The part of CUDA's runtime that the kernels' hosts and tests use, over engine.h. Two devices, streams without a
// priority, graphs of one stream. One thread of the host may use it.
//
// A kernel starts when the host waits for something, not when it is launched: what the host forgets to wait for has not
// happened.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "intrinsics.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

// ---- errors -------------------------------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidPtx = 218,
  cudaErrorJitCompilerNotFound = 221,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorJitCompilationDisabled = 223,
  cudaErrorNotReady = 600,
  cudaErrorPeerAccessAlreadyEnabled = 704,
};
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();

// ---- devices ------------------------------------------------------------------------------------------------------

struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  int major;
  int minor;
  int multiProcessorCount;
  size_t sharedMemPerMultiprocessor;
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerMultiprocessor };

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceCanAccessPeer(int* access, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceSynchronize();

// ---- memory -------------------------------------------------------------------------------------------------------

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
enum { cudaIpcMemLazyEnablePeerAccess = 1 };
struct cudaIpcMemHandle_t {
  char reserved[64];
};

// Undefined contents (0xa5).
cudaError_t cudaMallocBytes(void** memory, size_t bytes);
template <typename T>
cudaError_t cudaMalloc(T** memory, size_t bytes) {
  return cudaMallocBytes(reinterpret_cast<void**>(memory), bytes);
}
cudaError_t cudaFree(void* memory);
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory);
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* memory);

// ---- streams and graphs -------------------------------------------------------------------------------------------

struct CUstream_st;
using cudaStream_t = CUstream_st*;
struct CUgraph_st;
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraph_st*;
enum { cudaStreamNonBlocking = 1 };
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void* memory, int value, size_t bytes);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

// ---- kernels ------------------------------------------------------------------------------------------------------

struct cudaFuncAttributes {
  size_t sharedSizeBytes = 0;
};
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)(Parameters...)) {
  return cudaSuccess;
}
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
enum { cudaSharedmemCarveoutMaxShared = 100 };
template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), int, int) {
  return cudaSuccess;
}

namespace emulation {

void launch(const Kernel& kernel, cudaStream_t stream);

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;

  template <typename... Arguments>
  struct Call {
    const Configuration& configuration;
    std::tuple<Arguments...> arguments;
  };
  template <typename... Arguments>
  Call<Arguments...> operator()(Arguments... arguments) const {
    return {*this, {arguments...}};
  }
};

// kernel % Configuration{grid, block, shared_bytes, stream}(arguments): what translate.sed makes of a launch.
template <typename... Parameters, typename Call>
void operator%(void (*kernel)(Parameters...), const Call& call) {
  const Configuration& configuration = call.configuration;
  const std::tuple<Parameters...> arguments(call.arguments);
  launch(Kernel{[kernel, arguments] { std::apply(kernel, arguments); }, configuration.grid, configuration.block,
                configuration.shared_bytes},
         configuration.stream);
}

}  // namespace emulation
