// What a group needs before its first call over peer memory: facts about the devices, slabs that other processes can
// map, and a trial of the path between them. Memory and streams of the current device throughout.
//
// No torch. Errors are std::runtime_error with CUDA's own text, and none is left behind for the next caller of CUDA.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace echo::cuda {

struct DeviceFacts {
  std::string uuid;  // 32 hexadecimal digits; the same in every process, whatever CUDA_VISIBLE_DEVICES says
  int32_t compute_capability = 0;  // 10 * major + minor
  int32_t multiprocessors = 0;     // that the kernels may count on: fewer than there are where they lack shared memory
  bool is_mig = false;             // a slice of a device, which cannot reach other devices
};

DeviceFacts device_facts(int32_t device);

// False where the driver says that `device` cannot address the memory of the device with that uuid. True also where
// this process does not see that device: then only trying tells.
bool may_access(int32_t device, const std::string& peer_uuid);

constexpr int64_t kMemoryHandleBytes = 64;
using MemoryHandle = std::array<std::byte, kMemoryHandleBytes>;

// Lets this thread allocate and wait while another one records a graph in CUDA's strictest mode.
class CaptureTolerance {
 public:
  CaptureTolerance();
  ~CaptureTolerance();
  CaptureTolerance(const CaptureTolerance&) = delete;
  CaptureTolerance& operator=(const CaptureTolerance&) = delete;

 private:
  int mode_;
};

// A slab: this process's own, or a peer's as mapped here. Given back by release() alone: an object that goes without it
// leaves the memory to the end of the process, because a kernel or a peer may still write to it.
class PeerSlab {
 public:
  PeerSlab() = default;
  PeerSlab(PeerSlab&& other) noexcept;
  PeerSlab& operator=(PeerSlab&& other) noexcept;

  // `bytes` zeroed bytes, and the zeros have arrived. The error for want of memory says how much is free.
  static PeerSlab create(int64_t bytes);
  // Maps what another process created and still holds.
  static PeerSlab open(const MemoryHandle& handle);

  // For another process to open(); own slabs only.
  MemoryHandle handle() const;

  // Pre: no kernel uses it any more and, of an own slab, no peer has it mapped. Waits for the device.
  void release() noexcept;

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  bool is_own_ = false;
};

// A trial of the path that codes and tickets take: every rank writes a pattern into the slabs of its peers, with a flag
// released behind it, and the owner looks for all of them. Neither function waits longer than `limit`.
class PeerTrial {
 public:
  PeerTrial();
  ~PeerTrial();
  PeerTrial(const PeerTrial&) = delete;
  PeerTrial& operator=(const PeerTrial&) = delete;

  // As rank `source` into the slab of `peer`.
  void write(std::byte* slab, int32_t source, int32_t peer);
  // Looks for the pattern of `source` in the slab of this rank. Results are read by finish().
  void verify(std::byte* own_slab, int32_t source, int32_t rank);
  // Zeroes what a trial of `world_size` ranks has written.
  void clear(std::byte* own_slab, int32_t world_size);

  // True if all that was asked for is done within the limit; afterwards nothing of it touches the slabs. After false
  // the slabs must stay where they are.
  bool finish(std::chrono::milliseconds limit);

  // After finish(): how many words of the pattern were wrong in all checks.
  int64_t wrong_words() const;

 private:
  void* stream_ = nullptr;           // a cudaStream_t of its own, so that no other work is waited for
  uint32_t* wrong_words_ = nullptr;  // pinned
  bool done_ = true;
};

// Bytes at the start of a slab that a trial writes to.
int64_t trial_bytes(int32_t world_size);

}  // namespace echo::cuda
