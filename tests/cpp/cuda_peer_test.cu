// The one-kernel composition over peer memory against the CPU stages, byte for byte: the ranks of this process are
// spread over the devices there are, with few lanes each so that the kernels of all ranks fit a device together.
//
//   cuda_peer_test [plans = 300] [seed = 1] [share = 1] [part of a test's name]
//
// share: large tensors, and the lanes they go over, are smaller by as much. Needs no torch; built like
// cuda_stages_test.cu, with backend/cuda/peer_*.cu and backend/core/fault_text.cpp.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../backend/cuda/peer_allreduce.h"
#include "check.h"
#include "cuda_case.h"
#include "cuda_memory.h"

namespace {

using namespace echo;
using namespace echo::testing;

int g_plans = 300;
unsigned g_seed = 1;
int g_share = 1;

int device_count() {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count));
  return count;
}

void let_devices_meet() {
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

  cuda::PeerGroup& group(int rank) { return *groups_[rank]; }
  cudaStream_t stream(int rank) { return streams_[rank]; }

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
    check_cuda(cudaDeviceSynchronize());
    tensor = tensor_base + offset_elems * dtype_bytes(plan.dtype);
  }
  ~RankMemory() {
    cudaSetDevice(rank % device_count());
    cudaFree(tensor_base);
    cudaFree(state);
  }
  int rank;
  int64_t tensor_bytes = 0;
  std::byte* tensor_base = nullptr;
  std::byte* tensor = nullptr;
  std::byte* state = nullptr;
};

cuda::PeerCall call_of(const StageCase& c, World& world, const RankMemory& memory) {
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
void send(const StageCase& c, const Layout& layout, const std::vector<std::byte>& image, Memories& memories) {
  for (auto& memory : memories) {
    check_cuda(cudaSetDevice(memory->rank % device_count()));
    check_cuda(cudaMemcpy(memory->tensor, image.data() + layout.tensor_of(memory->rank),
                          c.plan.numel * dtype_bytes(c.plan.dtype), cudaMemcpyHostToDevice));
  }
}

std::string compare(const StageCase& c, const Layout& layout, const std::vector<std::byte>& image, Memories& memories) {
  for (auto& memory : memories) {
    check_cuda(cudaSetDevice(memory->rank % device_count()));
    const auto same = [&](const std::byte* device, int64_t at, int64_t bytes, const char* what) -> std::string {
      std::vector<std::byte> seen(bytes);
      check_cuda(cudaMemcpy(seen.data(), device, bytes, cudaMemcpyDeviceToHost));
      for (int64_t i = 0; i < bytes; ++i) {
        if (seen[i] == image[at + i]) continue;
        return std::string(what) + " of rank " + std::to_string(memory->rank) + " at byte " + std::to_string(i) +
               " of " + std::to_string(bytes) + ": " + std::to_string(int(seen[i])) + " on the device, " +
               std::to_string(int(image[at + i])) + " on the CPU";
      }
      return {};
    };
    std::string text =
        same(memory->tensor, layout.tensor_of(memory->rank), c.plan.numel * dtype_bytes(c.plan.dtype), "tensor");
    if (text.empty()) text = same(memory->state, layout.state_of(memory->rank), state_bytes(c.plan), "state");
    if (!text.empty()) return text;
  }
  return {};
}

Memories allocate(const StageCase& c) {
  Memories memories;
  for (int rank = 0; rank < c.plan.world_size; ++rank) {
    memories.push_back(std::make_unique<RankMemory>(rank, c.plan, c.offset_elems));
  }
  return memories;
}

void synchronize(World& world, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    check_cuda(cudaSetDevice(rank % device_count()));
    check_cuda(cudaStreamSynchronize(world.stream(rank)));
  }
}

// Runs the sites of a case on a world that other cases have used before; true if all agree.
bool check_case(const StageCase& whole, World& world, Random& random) {
  StageCase c = whole;
  const Layout layout(c);
  std::vector<std::byte> image(layout.size, kPoison);
  Memories memories = allocate(c);
  for (size_t site = 0; site < whole.first_site.size(); ++site) {
    c.plan.first_site = whole.first_site[site];
    const bool plain = c.plain_sites && site % 2 == 1;
    for (int rank = 0; rank < layout.ranks; ++rank) {
      fill_tensor(c.plan, random, image.data() + layout.tensor_of(rank), plain);
    }
    send(c, layout, image, memories);
    for (auto& memory : memories) {
      check_cuda(cudaSetDevice(memory->rank % device_count()));
      world.group(memory->rank).all_reduce(call_of(c, world, *memory));
    }
    synchronize(world, c.plan.world_size);
    run_on_cpu(c, layout, image.data());
    std::string difference = world.group(0).describe_fault();
    if (difference.empty()) difference = compare(c, layout, image, memories);
    if (difference.empty()) continue;
    CHECK_EQ("site " + std::to_string(site) + ", " + difference + ", " + describe(c), "");
    return false;
  }
  return true;
}

ECHO_TEST(peer_and_cpu_write_the_same_bytes) {
  Random random(g_seed);
  int bad = 0;
  for (const int ranks : {2, 3, 4, 8}) {
    for (const int64_t slot_bytes : {int64_t{1600}, int64_t{8704}}) {
      World world(ranks, 2, slot_bytes);
      for (int i = 0; i < g_plans / 8 && bad < 5; ++i) {
        StageCase c = random_case(random);
        c.plan.world_size = ranks;
        if (i % 4 == 0) c.plan.numel *= 20;
        c.tile_groups = segment_groups(c.plan);
        bad += check_case(c, world, random) ? 0 : 1;
        if (bad != 0) break;
      }
    }
  }
}

ECHO_TEST(quick_loops_and_cpu_write_the_same_bytes) {
  Random random(g_seed);
  bool same = true;
  for (const int ranks : {2, 3}) {
    World world(ranks, 2, 4352);
    for (int i = 0; i < g_plans / (ranks == 2 ? 2 : 8) && same; ++i)
      same = check_case(quick_case(random, ranks), world, random);
  }
}

// The grid of a real group, more tiles than lanes, and a bit.
ECHO_TEST(large_tensors_agree) {
  if (device_count() < 2) return;
  Random random(g_seed);
  World world(2, 132 / g_share, 8704);
  for (const Residual residual : {Residual::kLocal, Residual::kGroup}) {
    for (const int rotation : {0, 7}) {
      StageCase c;
      c.plan.world_size = 2;
      c.plan.numel = (24 << 20) / g_share + 77;
      c.plan.codec.rotation_log2 = rotation;
      c.plan.feedback = make_feedback(residual, StateDType::kInt8, 0.75, 0.35, 0.7, 0.3);
      c.tile_groups = segment_groups(c.plan);
      c.first_site = {true, false, false};
      CHECK(check_case(c, world, random));
    }
  }
}

// A captured call is replayed with other inputs, between calls that are not captured.
ECHO_TEST(captured_calls_replay) {
  Random random(g_seed);
  StageCase c;
  c.plan.numel = 128 * 90 + 7;
  c.plan.world_size = 2;
  c.plan.codec.rotation_log2 = 7;
  c.plan.feedback = make_feedback(Residual::kLocal, StateDType::kInt8, 0.75, 0.35, 0.7, 0.3);
  c.plan.first_site = false;
  c.rescale = true;
  c.tile_groups = segment_groups(c.plan);
  World world(2, 2, 1600);
  const Layout layout(c);
  std::vector<std::byte> image(layout.size);
  Memories memories = allocate(c);
  for (auto& memory : memories) {
    check_cuda(cudaSetDevice(memory->rank % device_count()));
    check_cuda(cudaMemset(memory->state, 0, state_bytes(c.plan)));
  }
  check_cuda(cudaDeviceSynchronize());
  std::vector<cudaGraphExec_t> graphs(2);
  for (int rank = 0; rank < 2; ++rank) {
    check_cuda(cudaSetDevice(rank % device_count()));
    cudaGraph_t graph;
    check_cuda(cudaStreamBeginCapture(world.stream(rank), cudaStreamCaptureModeGlobal));
    world.group(rank).all_reduce(call_of(c, world, *memories[rank]));
    check_cuda(cudaStreamEndCapture(world.stream(rank), &graph));
    check_cuda(cudaGraphInstantiate(&graphs[rank], graph, 0));
    check_cuda(cudaGraphDestroy(graph));
  }
  for (int replay = 0; replay < 200; ++replay) {
    for (int rank = 0; rank < 2; ++rank) fill_tensor(c.plan, random, image.data() + layout.tensor_of(rank));
    send(c, layout, image, memories);
    for (int rank = 0; rank < 2; ++rank) {
      check_cuda(cudaSetDevice(rank % device_count()));
      if (replay % 5 == 4) {
        world.group(rank).all_reduce(call_of(c, world, *memories[rank]));
      } else {
        check_cuda(cudaGraphLaunch(graphs[rank], world.stream(rank)));
      }
    }
    synchronize(world, 2);
    run_on_cpu(c, layout, image.data());
    const std::string difference = compare(c, layout, image, memories);
    CHECK_EQ(difference, "");
    if (!difference.empty()) break;
  }
  for (const cudaGraphExec_t graph : graphs) check_cuda(cudaGraphExecDestroy(graph));
}

// ---- faults -------------------------------------------------------------------------------------------------------

bool all_nan(const StageCase& c, const RankMemory& memory) {
  check_cuda(cudaSetDevice(memory.rank % device_count()));
  std::vector<uint16_t> seen(c.plan.numel);
  check_cuda(cudaMemcpy(seen.data(), memory.tensor, seen.size() * 2, cudaMemcpyDeviceToHost));
  return std::all_of(seen.begin(), seen.end(), [](uint16_t half) { return half == kNanBitsBFloat16; });
}

enum class Trouble { kOtherNumel, kLate, kExited, kAborted };

// Rank 0 calls; rank 1 does something else. Afterwards both know, every later call ends at once, and the device works.
void check_trouble(Trouble trouble, const std::string& expected) {
  Random random(g_seed);
  StageCase c;
  c.plan.world_size = 2;
  c.plan.numel = 128 * 300;
  c.tile_groups = segment_groups(c.plan);
  World world(2, 2, 1600);
  Memories memories = allocate(c);
  for (int rank = 0; rank < 2; ++rank) {
    cuda::PeerCall call = call_of(c, world, *memories[rank]);
    if (trouble == Trouble::kLate) call.timeout = std::chrono::milliseconds(300);
    if (rank == 1 && trouble != Trouble::kOtherNumel) continue;
    if (rank == 1) call.site.plan.numel -= 128;
    check_cuda(cudaSetDevice(rank % device_count()));
    world.group(rank).all_reduce(call);
  }
  if (trouble == Trouble::kExited) world.group(0).report_exit(1);
  if (trouble == Trouble::kAborted) world.group(0).abort();
  synchronize(world, 2);
  const std::string text = world.group(0).describe_fault();
  if (text.find(expected) == std::string::npos) CHECK_EQ(text, expected);
  CHECK(all_nan(c, *memories[0]));
  for (int rank = 0; rank < 2; ++rank) {
    check_cuda(cudaSetDevice(rank % device_count()));
    check_cuda(cudaMemset(memories[rank]->tensor, 0, c.plan.numel * 2));
    check_cuda(cudaDeviceSynchronize());
    world.group(rank).all_reduce(call_of(c, world, *memories[rank]));
  }
  synchronize(world, 2);
  CHECK(all_nan(c, *memories[0]));
  CHECK(all_nan(c, *memories[1]));
  CHECK(world.group(1).fault().kind == world.group(0).fault().kind);
}

ECHO_TEST(another_call_faults) { check_trouble(Trouble::kOtherNumel, "numel"); }
ECHO_TEST(a_late_peer_faults_at_the_time_out) { check_trouble(Trouble::kLate, "rank 1 did not come within 300 ms"); }
ECHO_TEST(an_exited_peer_faults) { check_trouble(Trouble::kExited, "the process of rank 1 has exited"); }
ECHO_TEST(an_abort_ends_the_wait) { check_trouble(Trouble::kAborted, "aborted by rank 0"); }

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) g_plans = std::atoi(argv[1]);
  if (argc > 2) g_seed = static_cast<unsigned>(std::atoi(argv[2]));
  if (argc > 3) g_share = std::atoi(argv[3]);
  let_devices_meet();
  const std::string wanted = argc > 4 ? argv[4] : "";
  const std::string plans = std::to_string(g_plans) + " random plans";
  return echo::testing::run_all(" on " + std::to_string(device_count()) + " devices, " + plans, wanted);
}
