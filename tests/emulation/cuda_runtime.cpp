#include "cuda_runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <variant>
#include <vector>

namespace {

constexpr int kDevices = 2;
// Few, so that the grids of the tests take several rounds.
constexpr int kMultiprocessors = 2;
constexpr int kSharedBytes = 164 << 10;

using Step = std::variant<emulation::Kernel, std::function<void()>>;

cudaError_t g_last_error = cudaSuccess;
int g_device = 0;

cudaError_t result_of(cudaError_t result) {
  if (result != cudaSuccess) g_last_error = result;
  return result;
}

}  // namespace

struct CUgraph_st {
  std::vector<Step> steps;
};

struct CUstream_st {
  emulation::Queue* queue;
  int device;
  CUgraph_st* recording = nullptr;  // what is enqueued goes there
};

namespace {

std::vector<cudaStream_t>& all_streams() {
  static std::vector<cudaStream_t>& streams = *[] {
    auto* of_devices = new std::vector<cudaStream_t>;
    for (int device = 0; device < kDevices; ++device) {
      of_devices->push_back(new CUstream_st{emulation::create_queue(), device});
    }
    return of_devices;
  }();
  return streams;
}

// The first streams are the default ones of the devices.
CUstream_st& stream_of(cudaStream_t stream) { return stream == nullptr ? *all_streams()[g_device] : *stream; }

void append(cudaStream_t stream, Step step) {
  CUstream_st& to = stream_of(stream);
  if (to.recording != nullptr) {
    to.recording->steps.push_back(std::move(step));
  } else {
    std::visit([&](auto& one) { emulation::enqueue(to.queue, one); }, step);
  }
}

void run_until_idle(const CUstream_st& stream) {
  while (!emulation::is_idle(stream.queue)) emulation::run_round();
}

}  // namespace

void emulation::launch(const Kernel& kernel, cudaStream_t stream) {
  const uint64_t threads = uint64_t{kernel.block.x} * kernel.block.y * kernel.block.z;
  const uint64_t blocks = uint64_t{kernel.grid.x} * kernel.grid.y * kernel.grid.z;
  if (threads == 0 || threads > 1024 || blocks == 0) {
    result_of(cudaErrorInvalidConfiguration);
  } else {
    append(stream, kernel);
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNotReady:
      return "device not ready";
    default:
      return "invalid argument";
  }
}

cudaError_t cudaGetLastError() { return std::exchange(g_last_error, cudaSuccess); }

// ---- devices ------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = g_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return result_of(cudaErrorInvalidDevice);
  g_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "emulated device %d", device);
  properties->uuid.bytes[0] = static_cast<char>(device);
  properties->major = 8;
  properties->multiProcessorCount = kMultiprocessors;
  properties->sharedMemPerMultiprocessor = kSharedBytes;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? kMultiprocessors : kSharedBytes;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* access, int, int) {
  *access = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaDeviceSynchronize() {
  for (const cudaStream_t stream : all_streams()) {
    if (stream->device == g_device) run_until_idle(*stream);
  }
  return cudaSuccess;
}

// ---- memory -------------------------------------------------------------------------------------------------------

cudaError_t cudaMallocBytes(void** memory, size_t bytes) {
  constexpr size_t kAlignment = 256;
  if (posix_memalign(memory, kAlignment, bytes) != 0) return result_of(cudaErrorMemoryAllocation);
  std::memset(*memory, 0xa5, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  cudaDeviceSynchronize();
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) { return cudaMallocBytes(memory, bytes); }

cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = size_t{1} << 30;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  std::memcpy(handle, &memory, sizeof(memory));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  std::memcpy(memory, &handle, sizeof(*memory));
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }

// ---- streams ------------------------------------------------------------------------------------------------------

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  append(nullptr, [=] {
    if (bytes != 0) std::memcpy(to, from, bytes);
  });
  return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  append(stream, [=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) { return cudaMemsetAsync(memory, value, bytes); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  std::vector<cudaStream_t>& streams = all_streams();
  *stream = new CUstream_st{emulation::create_queue(), g_device};
  streams.push_back(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  run_until_idle(*stream);
  emulation::destroy_queue(stream->queue);
  std::erase(all_streams(), stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  run_until_idle(stream_of(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (emulation::is_idle(stream_of(stream).queue)) return cudaSuccess;
  emulation::run_round();
  return result_of(cudaErrorNotReady);
}

// ---- graphs -------------------------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream->recording = new CUgraph_st;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = std::exchange(stream->recording, nullptr);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraph_st(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const Step& step : exec->steps) append(stream, step);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return cudaGraphDestroy(exec); }
