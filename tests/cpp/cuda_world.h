// Ranks of a group over peer memory in one process, spread over the devices there are, with few lanes each so that the
// kernels of all ranks fit a device together; and their tensors, compared with what the CPU stages wrote.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "../../backend/cuda/peer_allreduce.h"
#include "check.h"
#include "cuda_case.h"
#include "cuda_memory.h"

namespace echo::testing {

inline int device_count() {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count));
  return count;
}

inline void let_devices_meet() {
  for (int device = 0; device < device_count(); ++device) {
    check_cuda(cudaSetDevice(device));
    for (int peer = 0; peer < device_count(); ++peer) {
      if (peer == device) continue;
      const cudaError_t result = cudaDeviceEnablePeerAccess(peer, 0);
      if (result != cudaErrorPeerAccessAlreadyEnabled) check_cuda(result);
    }
  }
  cudaGetLastError();
}

// Slabs, streams and groups of all ranks; lives as long as one group.
class World {
 public:
  World(int ranks, int lanes, int64_t slot_bytes) : ranks_(ranks) {
    shape_ = peer_shape_of(ranks, lanes, slot_bytes);
    for (int rank = 0; rank < ranks; ++rank) {
      check_cuda(cudaSetDevice(rank % device_count()));
      void* slab = nullptr;
      check_cuda(cudaMalloc(&slab, slab_bytes(shape_)));
      check_cuda(cudaMemset(slab, 0, slab_bytes(shape_)));
      check_cuda(cudaDeviceSynchronize());
      slabs_.push_back(static_cast<std::byte*>(slab));
      streams_.emplace_back();
      check_cuda(cudaStreamCreateWithFlags(&streams_.back(), cudaStreamNonBlocking));
    }
    for (int rank = 0; rank < ranks; ++rank) {
      check_cuda(cudaSetDevice(rank % device_count()));
      groups_.push_back(std::make_unique<cuda::PeerGroup>(shape_, rank, slabs_));
    }
  }
  ~World() {
    groups_.clear();
    for (int rank = 0; rank < ranks_; ++rank) {
      cudaSetDevice(rank % device_count());
      cudaStreamDestroy(streams_[rank]);
      cudaFree(slabs_[rank]);
    }
  }

  // As after so many tiles of every lane and so many calls of all ranks, none of which is under way.
  void count_from(cuda::Counters counters) {
    for (int rank = 0; rank < ranks_; ++rank) {
      check_cuda(cudaSetDevice(rank % device_count()));
      groups_[rank]->count_from(counters);
    }
  }

  cuda::PeerGroup& group(int rank) { return *groups_[rank]; }
  cudaStream_t stream(int rank) { return streams_[rank]; }
  uint64_t* flag(int rank, int lane, Stage stage, int source, int slot) {
    return reinterpret_cast<uint64_t*>(slabs_[rank] + flag_offset(shape_, lane, stage, source, slot));
  }

 private:
  static SlabShape peer_shape_of(int ranks, int lanes, int64_t slot_bytes) {
    // As many lanes as `lanes` multiprocessors would have.
    SlabShape shape = cuda::peer_shape(ranks, lanes, int64_t{64} << 20);
    shape.slot_bytes = slot_bytes;
    return shape;
  }

  int ranks_;
  SlabShape shape_;
  std::vector<std::byte*> slabs_;
  std::vector<cudaStream_t> streams_;
  std::vector<std::unique_ptr<cuda::PeerGroup>> groups_;
};

// One rank's tensor and state on its device.
struct RankMemory {
  RankMemory(int rank, const Plan& plan, int64_t offset_elems) : rank(rank) {
    check_cuda(cudaSetDevice(rank % device_count()));
    tensor_bytes = (plan.numel + offset_elems) * dtype_bytes(plan.dtype) + 64;
    check_cuda(cudaMalloc(&tensor_base, tensor_bytes));
    check_cuda(cudaMemset(tensor_base, static_cast<int>(kPoison), tensor_bytes));
    check_cuda(cudaMalloc(&state, state_bytes(plan) + 64));
    check_cuda(cudaMemset(state, static_cast<int>(kPoison), state_bytes(plan) + 64));
    check_cuda(cudaMalloc(&kept, kept_bytes(plan)));
    check_cuda(cudaMemset(kept, static_cast<int>(kPoison), kept_bytes(plan)));
    check_cuda(cudaDeviceSynchronize());
    tensor = tensor_base + offset_elems * dtype_bytes(plan.dtype);
  }
  ~RankMemory() {
    cudaSetDevice(rank % device_count());
    cudaFree(tensor_base);
    cudaFree(state);
    cudaFree(kept);
  }
  int rank;
  int64_t tensor_bytes = 0;
  std::byte* tensor_base = nullptr;
  std::byte* tensor = nullptr;
  std::byte* state = nullptr;
  std::byte* kept = nullptr;
};

inline cuda::PeerCall call_of(const StageCase& c, World& world, const RankMemory& memory) {
  cuda::PeerCall call;
  call.site.plan = c.plan;
  call.site.plan.rank = memory.rank;
  call.site.tensor = memory.tensor;
  call.site.state = memory.state;
  call.rescale = c.rescale;
  call.timeout = std::chrono::seconds(20);
  call.stream = world.stream(memory.rank);
  return call;
}

using Memories = std::vector<std::unique_ptr<RankMemory>>;

// Inputs of the image to the devices.
inline void send(const StageCase& c, const Layout& layout, const std::vector<std::byte>& image, Memories& memories) {
  for (auto& memory : memories) {
    check_cuda(cudaSetDevice(memory->rank % device_count()));
    check_cuda(cudaMemcpy(memory->tensor, image.data() + layout.tensor_of(memory->rank),
                          c.plan.numel * dtype_bytes(c.plan.dtype), cudaMemcpyHostToDevice));
  }
}

// What differs between memory of the device and a part of the image, in words.
inline std::string difference(const RankMemory& memory, const std::byte* device, const std::byte* expected,
                              int64_t bytes, const char* what) {
  check_cuda(cudaSetDevice(memory.rank % device_count()));
  std::vector<std::byte> seen(bytes);
  check_cuda(cudaMemcpy(seen.data(), device, bytes, cudaMemcpyDeviceToHost));
  for (int64_t i = 0; i < bytes; ++i) {
    if (seen[i] == expected[i]) continue;
    return std::string(what) + " of rank " + std::to_string(memory.rank) + " at byte " + std::to_string(i) + " of " +
           std::to_string(bytes) + ": " + std::to_string(int(seen[i])) + " on the device, " +
           std::to_string(int(expected[i])) + " on the CPU";
  }
  return {};
}

enum class Part { kTensor, kState };

inline std::string compare(const StageCase& c, const Layout& layout, const std::vector<std::byte>& image,
                           const RankMemory& memory, Part part) {
  const std::byte* expected = image.data();
  if (part == Part::kState) {
    return difference(memory, memory.state, expected + layout.state_of(memory.rank), state_bytes(c.plan), "state");
  }
  const int64_t bytes = c.plan.numel * dtype_bytes(c.plan.dtype);
  return difference(memory, memory.tensor, expected + layout.tensor_of(memory.rank), bytes, "tensor");
}

inline std::string compare(const StageCase& c, const Layout& layout, const std::vector<std::byte>& image,
                           const RankMemory& memory) {
  std::string text = compare(c, layout, image, memory, Part::kTensor);
  return text.empty() ? compare(c, layout, image, memory, Part::kState) : text;
}

// The same of all ranks, and of one part or both.
template <typename... Parts>
std::string compare(const StageCase& c, const Layout& layout, const std::vector<std::byte>& image,
                    const Memories& memories, Parts... parts) {
  for (const auto& memory : memories) {
    if (std::string text = compare(c, layout, image, *memory, parts...); !text.empty()) return text;
  }
  return {};
}

inline Memories allocate(const StageCase& c) {
  Memories memories;
  for (int rank = 0; rank < c.plan.world_size; ++rank) {
    memories.push_back(std::make_unique<RankMemory>(rank, c.plan, c.offset_elems));
  }
  return memories;
}

inline void synchronize(World& world, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    check_cuda(cudaSetDevice(rank % device_count()));
    check_cuda(cudaStreamSynchronize(world.stream(rank)));
  }
}

}  // namespace echo::testing
