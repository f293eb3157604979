#include "peer_memory.h"

#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "../core/tuning.h"
#include "host.h"
#include "ptx.cuh"

namespace echo::cuda {
namespace {

// The pattern of one source: words with a line of their own for the flag, as codes and tickets have.
constexpr int32_t kPatternWords = 1024;
constexpr int32_t kFlagWords = 32;
constexpr int64_t kAreaBytes = (kPatternWords + kFlagWords) * sizeof(uint32_t);
constexpr unsigned kTrialThreads = 256;

// IPC exports whole allocation units of the driver: a slab that fills its units shares nothing else of this process.
constexpr int64_t kAllocationUnitBytes = 2 << 20;

__device__ uint32_t pattern_word(int32_t source, int32_t owner, int32_t index) {
  const uint32_t x = static_cast<uint32_t>((source << 20) ^ (owner << 10) ^ index) * 0x9e3779b9u;
  return x ^ (x >> 15);
}

// One block. 16-byte stores, then the flag with release: what push does.
__global__ void write_pattern_kernel(std::byte* area, int32_t source, int32_t owner) {
  uint4* const lines = reinterpret_cast<uint4*>(area + kFlagWords * sizeof(uint32_t));
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kPatternWords / 4; i += blockDim.x) {
    lines[i] = make_uint4(pattern_word(source, owner, 4 * i), pattern_word(source, owner, 4 * i + 1),
                          pattern_word(source, owner, 4 * i + 2), pattern_word(source, owner, 4 * i + 3));
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release_sys(reinterpret_cast<uint32_t*>(area), pattern_word(source, owner, -1));
}

// One block. The flag with acquire, then the words.
__global__ void check_pattern_kernel(const std::byte* area, int32_t source, int32_t owner, uint32_t* wrong_words) {
  __shared__ uint32_t flag;
  if (threadIdx.x == 0) flag = load_acquire_sys(reinterpret_cast<const uint32_t*>(area));
  __syncthreads();
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(area) + kFlagWords;
  uint32_t wrong = threadIdx.x == 0 && flag != pattern_word(source, owner, -1) ? 1u : 0u;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kPatternWords; i += blockDim.x) {
    wrong += words[i] != pattern_word(source, owner, i) ? 1u : 0u;
  }
  if (wrong != 0) atomicAdd_system(wrong_words, wrong);
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

[[noreturn]] void fail_allocation(cudaError_t result, int64_t bytes) {
  cudaGetLastError();
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  std::string what = "cudaMalloc of " + std::to_string(bytes) + " bytes for peer memory";
  if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
    what += " (" + std::to_string(free_bytes) + " of " + std::to_string(total_bytes) + " bytes of the device are free)";
  }
  fail(result, what);
}

std::string hexadecimal(const cudaUUID_t& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : uuid.bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

}  // namespace

DeviceFacts device_facts(int32_t device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  // Half of the lanes fit multiprocessors with half of the memory: one of two is then as good as a whole one.
  const int64_t needed = ceil_div(kPeerDeviceSharedBytes, static_cast<int64_t>(properties.sharedMemPerMultiprocessor));
  return DeviceFacts{.uuid = hexadecimal(properties.uuid),
                     .compute_capability = 10 * properties.major + properties.minor,
                     .multiprocessors = properties.multiProcessorCount / static_cast<int32_t>(needed),
                     .is_mig = std::strstr(properties.name, " MIG ") != nullptr};
}

bool may_access(int32_t device, const std::string& peer_uuid) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int other = 0; other < count; ++other) {
    if (other == device || device_facts(other).uuid != peer_uuid) continue;
    int access = 0;
    check(cudaDeviceCanAccessPeer(&access, device, other), "cudaDeviceCanAccessPeer");
    return access != 0;
  }
  return true;
}

CaptureTolerance::CaptureTolerance() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  mode_ = static_cast<int>(mode);
}

CaptureTolerance::~CaptureTolerance() {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_);
  cudaThreadExchangeStreamCaptureMode(&mode);
}

PeerSlab::PeerSlab(PeerSlab&& other) noexcept { *this = std::move(other); }

PeerSlab& PeerSlab::operator=(PeerSlab&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(is_own_, other.is_own_);
  return *this;
}

PeerSlab PeerSlab::create(int64_t bytes) {
  bytes = (bytes + kAllocationUnitBytes - 1) / kAllocationUnitBytes * kAllocationUnitBytes;
  void* memory = nullptr;
  if (const cudaError_t result = cudaMalloc(&memory, static_cast<size_t>(bytes)); result != cudaSuccess) {
    fail_allocation(result, bytes);
  }
  PeerSlab slab;
  slab.data_ = static_cast<std::byte*>(memory);
  slab.is_own_ = true;
  const cudaError_t result = clear_memory(memory, static_cast<size_t>(bytes));
  if (result != cudaSuccess) {
    slab.release();
    fail(result, "zeroing peer memory");
  }
  return slab;
}

PeerSlab PeerSlab::open(const MemoryHandle& handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == kMemoryHandleBytes);
  cudaIpcMemHandle_t native;
  std::memcpy(&native, handle.data(), sizeof(native));
  void* memory = nullptr;
  check(cudaIpcOpenMemHandle(&memory, native, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  PeerSlab slab;
  slab.data_ = static_cast<std::byte*>(memory);
  return slab;
}

MemoryHandle PeerSlab::handle() const {
  cudaIpcMemHandle_t native;
  check(cudaIpcGetMemHandle(&native, data_), "cudaIpcGetMemHandle");
  MemoryHandle handle;
  std::memcpy(handle.data(), &native, sizeof(native));
  return handle;
}

void PeerSlab::release() noexcept {
  if (data_ == nullptr) return;
  const cudaError_t result = is_own_ ? cudaFree(data_) : cudaIpcCloseMemHandle(data_);
  if (result != cudaSuccess) cudaGetLastError();
  data_ = nullptr;
}

int64_t trial_bytes(int32_t world_size) { return world_size * kAreaBytes; }

PeerTrial::PeerTrial() {
  void* pinned = nullptr;
  check(cudaHostAlloc(&pinned, sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  wrong_words_ = static_cast<uint32_t*>(pinned);
  *wrong_words_ = 0;
  cudaStream_t stream = nullptr;
  if (const cudaError_t result = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); result != cudaSuccess) {
    cudaFreeHost(pinned);
    fail(result, "cudaStreamCreateWithFlags");
  }
  stream_ = stream;
}

PeerTrial::~PeerTrial() {
  if (!done_) return;  // what still runs keeps them
  cudaStreamDestroy(stream_of(stream_));
  cudaFreeHost(wrong_words_);
  cudaGetLastError();
}

void PeerTrial::write(std::byte* slab, int32_t source, int32_t peer) {
  done_ = false;
  write_pattern_kernel<<<1, kTrialThreads, 0, stream_of(stream_)>>>(slab + source * kAreaBytes, source, peer);
  check(cudaGetLastError(), "a trial write to peer memory");
}

void PeerTrial::verify(std::byte* own_slab, int32_t source, int32_t rank) {
  done_ = false;
  check_pattern_kernel<<<1, kTrialThreads, 0, stream_of(stream_)>>>(own_slab + source * kAreaBytes, source, rank,
                                                                    wrong_words_);
  check(cudaGetLastError(), "a trial read of peer memory");
}

void PeerTrial::clear(std::byte* own_slab, int32_t world_size) {
  done_ = false;
  check(cudaMemsetAsync(own_slab, 0, static_cast<size_t>(trial_bytes(world_size)), stream_of(stream_)),
        "zeroing peer memory");
}

bool PeerTrial::finish(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (true) {
    const cudaError_t result = cudaStreamQuery(stream_of(stream_));
    if (result == cudaSuccess) {
      done_ = true;
      return true;
    }
    if (result != cudaErrorNotReady) fail(result, "a trial of peer memory");
    cudaGetLastError();
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

int64_t PeerTrial::wrong_words() const { return *static_cast<const volatile uint32_t*>(wrong_words_); }

}  // namespace echo::cuda
