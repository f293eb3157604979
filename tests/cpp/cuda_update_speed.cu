// What residual "group" costs with the update of the state in the call's kernel, and with a kernel of its own after the
// call: a table of times, for the choice of kDeferredUpdateBytes (core/tuning.h) and for how near the update comes to
// the bandwidth of a copy within the device. Two ranks on two devices, or else sharing one, half of the lanes each;
// times of calls then hold the memory traffic of both. Built by ci/gpu_checks/build_cpp.py.
//
//   cuda_update_speed [largest size in MiB = 1024] [repetitions = 15]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../backend/cuda/peer_allreduce.h"
#include "../../backend/cuda/peer_memory.h"
#include "cuda_memory.h"

namespace {

using namespace echo;
using namespace echo::testing;

constexpr int kRanks = 2;

int device_of(int rank) {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count));
  return rank % count;
}

// The same sum of hashed halves on every run: bell-shaped, mean 0, no group without both signs.
__global__ void fill(uint16_t* tensor, int64_t numel, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < numel; i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t hash = static_cast<uint32_t>(i) * 0x9e3779b9u + seed;
    float sum = 0.0f;
    for (int k = 0; k < 4; ++k) {
      hash = (hash ^ hash >> 15) * 0x85ebca6bu;
      sum += static_cast<float>(hash >> 16) - 32768.0f;
    }
    tensor[i] = static_cast<uint16_t>(__float_as_uint(sum * 0x1p-15f) >> 16);
  }
}

// Longer than the host takes for what it enqueues behind it.
__global__ void idle() {
  for (int i = 0; i < 200; ++i) __nanosleep(1000);
}

struct Span {
  Span() {
    check_cuda(cudaEventCreate(&began));
    check_cuda(cudaEventCreate(&ended));
  }
  ~Span() {
    cudaEventDestroy(began);
    cudaEventDestroy(ended);
  }
  float milliseconds() const {
    float time = 0.0f;
    check_cuda(cudaEventElapsedTime(&time, began, ended));
    return time;
  }
  cudaEvent_t began, ended;
};

struct Rank {
  Rank(int rank, const Plan& plan) : device(device_of(rank)) {
    check_cuda(cudaSetDevice(device));
    const auto make = [&](int64_t bytes) { return std::make_unique<DeviceMemory>(bytes); };
    tensor = make(plan.numel * dtype_bytes(plan.dtype));
    state = make(state_bytes(plan));
    kept = make(kept_bytes(plan));
    check_cuda(cudaMemset(state->at, 0, state_bytes(plan)));
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    span = std::make_unique<Span>();
    check_cuda(cudaDeviceSynchronize());
  }
  ~Rank() { cudaStreamDestroy(stream); }

  int device;
  std::unique_ptr<DeviceMemory> tensor, state, kept;
  cudaStream_t stream = nullptr;
  std::unique_ptr<Span> span;
};

float median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

class Bench {
 public:
  explicit Bench(int repetitions) : repetitions_(repetitions) {
    const bool shared = device_of(1) == device_of(0);
    const int multiprocessors = cuda::device_facts(0).multiprocessors / (shared ? 2 : 1);
    shape_ = cuda::peer_shape(kRanks, multiprocessors, int64_t{64} << 20);
    for (int rank = 0; rank < kRanks; ++rank) {
      check_cuda(cudaSetDevice(device_of(rank)));
      if (!shared) check_cuda(cudaDeviceEnablePeerAccess(device_of(1 - rank), 0));
      slabs_.push_back(std::make_unique<DeviceMemory>(slab_bytes(shape_)));
      check_cuda(cudaMemset(slabs_.back()->at, 0, slab_bytes(shape_)));
      check_cuda(cudaDeviceSynchronize());
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      check_cuda(cudaSetDevice(device_of(rank)));
      groups_.push_back(
          std::make_unique<cuda::PeerGroup>(shape_, rank, std::vector<std::byte*>{slabs_[0]->at, slabs_[1]->at}));
    }
  }

  double copy_gbps() {
    constexpr int64_t kBytes = int64_t{1} << 30;
    check_cuda(cudaSetDevice(device_of(0)));
    const DeviceMemory from(kBytes), to(kBytes);
    const Span span;
    std::vector<float> times;
    for (int i = 0; i < repetitions_; ++i) {
      check_cuda(cudaEventRecord(span.began));
      check_cuda(cudaMemcpyAsync(to.at, from.at, kBytes, cudaMemcpyDeviceToDevice));
      check_cuda(cudaEventRecord(span.ended));
      check_cuda(cudaDeviceSynchronize());
      times.push_back(span.milliseconds());
    }
    return 2.0 * kBytes / median(times) / 1e6;
  }

  void row(const Plan& plan, double copy_gbps) {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int rank = 0; rank < kRanks; ++rank) ranks.push_back(std::make_unique<Rank>(rank, plan));
    std::vector<float> fused, split, update;
    // In turn, so that all meet the same disturbances.
    for (int i = 0; i < repetitions_; ++i) {
      fused.push_back(time(plan, ranks, false, false));
      split.push_back(time(plan, ranks, true, false));
      update.push_back(time(plan, ranks, true, true));
    }
    const int64_t codes = kept_bytes(plan) - kept_codes_offset(plan);
    const int64_t moved = plan.numel * dtype_bytes(plan.dtype) + codes + 2 * state_bytes(plan);
    const double gbps = moved / median(update) / 1e6;
    std::printf("| %4lld MiB | %8.3f | %8.3f | %8.3f | %6.0f | %3.0f %% |\n",
                static_cast<long long>(plan.numel * dtype_bytes(plan.dtype) >> 20), median(fused), median(split),
                median(update), gbps, 100 * gbps / copy_gbps);
    std::fflush(stdout);
  }

 private:
  // Milliseconds of the slower rank: of the call, or of the update after it.
  float time(const Plan& plan, std::vector<std::unique_ptr<Rank>>& ranks, bool keep, bool of_update) {
    std::vector<cuda::PeerCall> calls;
    for (int r = 0; r < kRanks; ++r) {
      Rank& rank = *ranks[r];
      check_cuda(cudaSetDevice(rank.device));
      fill<<<1024, 256, 0, rank.stream>>>(reinterpret_cast<uint16_t*>(rank.tensor->at), plan.numel, r + 1);
      check_cuda(cudaStreamSynchronize(rank.stream));
      cuda::PeerCall call;
      call.site.plan = plan;
      call.site.plan.rank = r;
      call.site.tensor = rank.tensor->at;
      call.site.state = rank.state->at;
      call.timeout = std::chrono::seconds(20);
      call.stream = rank.stream;
      if (keep) call.kept = rank.kept->at;
      calls.push_back(call);
    }
    const auto enqueue = [&](const std::function<void(int)>& work, bool timed) {
      for (int r = 0; r < kRanks; ++r) {
        check_cuda(cudaSetDevice(ranks[r]->device));
        idle<<<1, 1, 0, ranks[r]->stream>>>();
        if (timed) check_cuda(cudaEventRecord(ranks[r]->span->began, ranks[r]->stream));
        work(r);
        if (timed) check_cuda(cudaEventRecord(ranks[r]->span->ended, ranks[r]->stream));
      }
    };
    enqueue([&](int r) { groups_[r]->all_reduce(calls[r]); }, !of_update);
    for (auto& rank : ranks) check_cuda(cudaStreamSynchronize(rank->stream));
    if (std::string fault = groups_[0]->describe_fault(); !fault.empty()) throw std::runtime_error(fault);
    float slowest = of_update ? 0.0f : std::max(ranks[0]->span->milliseconds(), ranks[1]->span->milliseconds());
    // One rank's at a time, also where both share a device.
    for (int r = 0; keep && r < kRanks; ++r) {
      check_cuda(cudaSetDevice(ranks[r]->device));
      idle<<<1, 1, 0, ranks[r]->stream>>>();
      check_cuda(cudaEventRecord(ranks[r]->span->began, ranks[r]->stream));
      groups_[r]->update(calls[r], ranks[r]->stream);
      check_cuda(cudaEventRecord(ranks[r]->span->ended, ranks[r]->stream));
      check_cuda(cudaStreamSynchronize(ranks[r]->stream));
      if (of_update) slowest = std::max(slowest, ranks[r]->span->milliseconds());
    }
    return slowest;
  }

  int repetitions_;
  SlabShape shape_;
  std::vector<std::unique_ptr<DeviceMemory>> slabs_;
  std::vector<std::unique_ptr<cuda::PeerGroup>> groups_;
};

}  // namespace

int main(int argc, char** argv) {
  const int64_t largest = (argc > 1 ? std::atoi(argv[1]) : 1024) * (int64_t{1} << 20);
  Bench bench(argc > 2 ? std::max(1, std::atoi(argv[2])) : 15);
  const double copy = bench.copy_gbps();
  std::printf("%d device(s); a copy moves %.0f GB/s\n", device_of(1) + 1, copy);
  for (const StateDType state : {StateDType::kBFloat16, StateDType::kInt8}) {
    for (const int rotation : {0, 7}) {
      std::printf("\ntwo averages, %s state, %s\n", state == StateDType::kInt8 ? "int8" : "bf16",
                  rotation == 0 ? "no rotation" : "rotation");
      std::printf("|     size | all in one | critical path | update | GB/s | of a copy |\n");
      for (const int64_t bytes : {1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30}) {
        if (bytes > largest) continue;
        Plan plan;
        plan.numel = bytes / 2;
        plan.world_size = kRanks;
        plan.first_site = false;
        plan.codec.rotation_log2 = rotation;
        plan.feedback = make_feedback(Residual::kGroup, state, 0.75, 0.35, 0.7, 0.3);
        bench.row(plan, copy);
      }
    }
  }
  return 0;
}
