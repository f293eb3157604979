// The CUDA stages against the CPU stages, byte for byte, over simulated ranks on one device: random plans, awkward
// data, sizes and alignments, several sites in a row. Both sides work on the same memory image (tensors, states, tiles,
// guards between them), and the images are compared whole.
//
//   cuda_stages_test [plans = 600] [seed = 1] [share = 1]
//
// share: where all numbers are tried, only one in so many is; large tensors are smaller by as much. Needs no torch.
// Build: compile backend/cuda, backend/cpu, backend/core/call_record.cpp as backend/CMakeLists.txt does, and link.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../backend/cuda/grid_device.cuh"
#include "../../backend/cuda/stages.h"
#include "check.h"
#include "cuda_case.h"
#include "cuda_memory.h"

namespace {

using namespace echo;
using namespace echo::testing;

int g_plans = 600;
unsigned g_seed = 1;
uint32_t g_share = 1;

// The records and agreed states of all ranks: what an all-gather would have brought to each.
struct Opening {
  explicit Opening(int64_t ranks) : memory(ranks * (sizeof(CallRecord) + sizeof(cuda::CallState))), ranks(ranks) {}
  DeviceMemory memory;
  int64_t ranks;
  CallRecord* records() const { return reinterpret_cast<CallRecord*>(memory.at); }
  cuda::CallState* agreed(int rank) const { return reinterpret_cast<cuda::CallState*>(records() + ranks) + rank; }
};

void run_on_device(const StageCase& c, const Layout& layout, std::byte* image, const Opening& opening,
                   cuda::Disagreement* disagreement, cudaStream_t stream) {
  std::vector<cuda::Call> calls;
  for (int rank = 0; rank < layout.ranks; ++rank) {
    calls.push_back(cuda::Call{site_of(c, layout, image, rank), opening.agreed(rank), stream});
    cuda::write_record(calls[rank], make_call_record(c.plan, Direction::kForward, 3, 1), c.rescale,
                       opening.records() + rank);
  }
  for (int rank = 0; rank < layout.ranks; ++rank)
    cuda::open_call(calls[rank], opening.records(), opening.agreed(rank), disagreement);
  for (int64_t t = 0; t < layout.tiles; ++t) {
    for (int owner = 0; owner < layout.ranks; ++owner) {
      const GroupRange range = tile_range(c.plan, owner, t, c.tile_groups);
      std::byte* copies = image + layout.received_by(t, owner);
      for (int rank = 0; rank < layout.ranks; ++rank) {
        if (rank != owner) cuda::push(calls[rank], range, c.tile_groups, copies + rank * layout.tile);
      }
      std::byte* sum = image + layout.reduced_by(t, owner);
      cuda::reduce(calls[owner], range, c.tile_groups, cuda::PeerTiles{copies, layout.tile}, sum);
      for (const cuda::Call& call : calls) cuda::tail(call, range, c.tile_groups, sum);
    }
  }
}

// True if both sides agree after every site.
bool check_case(const StageCase& whole, Random& random) {
  static cuda::Disagreement* const disagreement = cuda::create_disagreement();
  StageCase c = whole;
  const Layout layout(c);
  const Opening opening(layout.ranks);
  const DeviceMemory image(layout.size);
  std::vector<std::byte> expected(layout.size, kPoison);
  std::vector<std::byte> seen(layout.size);
  for (size_t site = 0; site < whole.first_site.size(); ++site) {
    c.plan.first_site = whole.first_site[site];
    for (int rank = 0; rank < layout.ranks; ++rank)
      fill_tensor(c.plan, random, expected.data() + layout.tensor_of(rank));
    check_cuda(cudaMemcpy(image.at, expected.data(), layout.size, cudaMemcpyHostToDevice));
    run_on_device(c, layout, image.at, opening, disagreement, nullptr);
    check_cuda(cudaMemcpy(seen.data(), image.at, layout.size, cudaMemcpyDeviceToHost));
    const uint32_t largest = run_on_cpu(c, layout, expected.data());
    cuda::CallState agreed;
    check_cuda(cudaMemcpy(&agreed, opening.agreed(0), sizeof(agreed), cudaMemcpyDeviceToHost));
    CHECK_EQ(agreed.fault, 0u);
    CHECK_EQ(agreed.rescale_log2, rescale_exponent(largest));
    const std::string difference = first_difference(layout, seen, expected);
    if (difference.empty()) continue;
    CHECK_EQ("site " + std::to_string(site) + ", " + difference + ", " + describe(c), "");
    return false;
  }
  return true;
}

ECHO_TEST(device_and_cpu_write_the_same_bytes) {
  Random random(g_seed);
  int bad = 0;
  for (int i = 0; i < g_plans && bad < 5; ++i) bad += check_case(random_case(random), random) ? 0 : 1;
}

// More groups than the largest grid takes at once, so that warps go round.
ECHO_TEST(large_tensors_agree) {
  Random random(g_seed);
  StageCase c;
  c.plan.world_size = 2;
  c.plan.numel = (3 << 20) / g_share + 5;
  c.plan.codec.group_elems = 16;
  c.plan.codec.rotation_log2 = 4;
  c.plan.feedback = make_feedback(Residual::kLocal, StateDType::kInt8, 0.75, 0.35, 0.7, 0.3);
  c.tile_groups = segment_groups(c.plan);
  c.first_site = {true, false};
  CHECK(check_case(c, random));
}

// ---- the rest of the contract -------------------------------------------------------------------------------------

ECHO_TEST(a_captured_call_replays) {
  Random random(g_seed);
  StageCase c;
  c.plan.numel = 128 * 9 + 7;
  c.plan.world_size = 3;
  c.plan.codec.rotation_log2 = 7;
  c.plan.feedback = make_feedback(Residual::kLocal, StateDType::kInt8, 0.75, 0.35, 0.7, 0.3);
  c.plan.first_site = false;
  c.rescale = true;
  c.tile_groups = 2;
  const Layout layout(c);
  const Opening opening(layout.ranks);
  const DeviceMemory image(layout.size);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  run_on_device(c, layout, image.at, opening, cuda::create_disagreement(), stream);
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<std::byte> expected(layout.size);
  std::vector<std::byte> seen(layout.size);
  for (int replay = 0; replay < 3; ++replay) {
    for (int rank = 0; rank < layout.ranks; ++rank)
      fill_tensor(c.plan, random, expected.data() + layout.tensor_of(rank));
    check_cuda(cudaMemcpy(image.at, expected.data(), layout.size, cudaMemcpyHostToDevice));
    check_cuda(cudaGraphLaunch(exec, stream));
    check_cuda(cudaStreamSynchronize(stream));
    check_cuda(cudaMemcpy(seen.data(), image.at, layout.size, cudaMemcpyDeviceToHost));
    run_on_cpu(c, layout, expected.data());
    CHECK_EQ(first_difference(layout, seen, expected), "");
  }
  check_cuda(cudaGraphExecDestroy(exec));
  check_cuda(cudaGraphDestroy(graph));
  check_cuda(cudaStreamDestroy(stream));
}

ECHO_TEST(ranks_that_disagree_get_nan_and_the_reason) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    StageCase c;
    c.plan.dtype = dtype;
    c.plan.world_size = 2;
    c.plan.numel = 300;
    const Layout layout(c);
    const Opening opening(2);
    const DeviceMemory image(layout.size);
    check_cuda(cudaMemset(image.at, 0, layout.size));
    cuda::Disagreement* disagreement = cuda::create_disagreement();
    const cuda::Call call{site_of(c, layout, image.at, 0), opening.agreed(0), nullptr};
    Plan other = c.plan;
    other.numel = 301;
    const GroupRange all{0, group_count(c.plan)};
    for (const bool agree : {true, false, true}) {
      const bool before = !cuda::describe_disagreement(disagreement).empty();
      cuda::write_record(call, make_call_record(c.plan, Direction::kForward, 5, 0), false, opening.records());
      cuda::write_record(call, make_call_record(agree ? c.plan : other, Direction::kForward, 5, 0), false,
                         opening.records() + 1);
      cuda::open_call(call, opening.records(), opening.agreed(0), disagreement);
      check_cuda(cudaMemsetAsync(image.at + layout.reduced, 0, all.end * 68 + 16));
      cuda::tail(call, all, all.end, image.at + layout.reduced);
      check_cuda(cudaDeviceSynchronize());
      CHECK_EQ(!cuda::describe_disagreement(disagreement).empty(), before || !agree);
      std::vector<std::byte> seen(300 * dtype_bytes(dtype));
      check_cuda(cudaMemcpy(seen.data(), image.at + layout.tensor_of(0), seen.size(), cudaMemcpyDeviceToHost));
      const uint32_t wanted = before || !agree ? (dtype == DType::kFloat32    ? kNanBits32
                                                  : dtype == DType::kBFloat16 ? kNanBitsBFloat16
                                                                              : kNanBitsFloat16)
                                               : 0;
      for (int i = 0; i < 300; ++i) {
        uint32_t bits = 0;
        std::memcpy(&bits, seen.data() + i * dtype_bytes(dtype), dtype_bytes(dtype));
        CHECK_EQ(bits, wanted);
      }
    }
    CHECK(cuda::describe_disagreement(disagreement).find("numel 301") != std::string::npos);
  }
}

// Counts fp32 patterns for which a pair conversion and the core's function differ, one in `share` of them, and all
// 16-bit patterns for which the widenings do.
__global__ void compare_conversions(uint32_t share, unsigned long long* wrong) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  unsigned long long mine = 0;
  for (uint64_t pattern = first * share; pattern < uint64_t{1} << 32; pattern += stride * share) {
    const float x = float_of(static_cast<uint32_t>(pattern));
    if (!is_nan(x)) {
      mine += cuda::round_pair_bfloat16(x, -x) != (to_bfloat16(x) | uint32_t{to_bfloat16(-x)} << 16);
      mine += cuda::round_pair_float16(x, -x) != (to_float16(x) | uint32_t{to_float16(-x)} << 16);
    }
  }
  for (uint64_t pattern = first; pattern < 0x10000u; pattern += stride) {
    const float half = from_float16(static_cast<uint16_t>(pattern));
    const float low = cuda::widen_low_float16(static_cast<uint32_t>(pattern) | 0x12340000u);
    const float high = cuda::widen_high_float16(static_cast<uint32_t>(pattern) << 16 | 0x1234u);
    mine +=
        is_nan(half) ? !is_nan(low) || !is_nan(high) : bits_of(low) != bits_of(half) || bits_of(high) != bits_of(half);
  }
  if (mine != 0) atomicAdd(wrong, mine);
}

ECHO_TEST(hardware_conversions_are_those_of_the_core) {
  const DeviceMemory wrong(8);
  check_cuda(cudaMemset(wrong.at, 0, 8));
  compare_conversions<<<2048, 256>>>(g_share, reinterpret_cast<unsigned long long*>(wrong.at));
  check_cuda(cudaGetLastError());
  unsigned long long count = 1;
  check_cuda(cudaMemcpy(&count, wrong.at, 8, cudaMemcpyDeviceToHost));
  CHECK_EQ(count, 0ull);
}

// Counts operands for which the short division or reciprocal differs from IEEE's: every bf16 and every fp16 as divisor,
// and the numbers of levels; one in `share` fp32 numbers as dividend, over the exponents that the codec lets through.
__global__ void compare_divisions(uint32_t share, unsigned long long* wrong) {
  unsigned long long mine = 0;
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x * share;
  for (uint64_t index = (uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) * share; index < 0x80000000u;
       index += stride) {
    const auto pattern = static_cast<uint32_t>(index);
    const float a = float_of(pattern);
    if (!(a >= 0x1p-80f && a <= 0x1p101f)) continue;
    for (const float levels : {7.0f, 15.0f, 127.0f, 255.0f})
      mine += bits_of(cuda::divide_by_short(a, levels, 1.0f / levels)) != bits_of(a / levels);
    const uint16_t hash = static_cast<uint16_t>(pattern * 0x9e3779b9u >> 16);
    for (const float b : {from_bfloat16(hash & 0x7fffu), from_float16(hash & 0x7fffu)}) {
      if (!(b >= 0x1p-70f && b <= 0x1p100f)) continue;
      const float inverse = cuda::reciprocal_of_short(b);
      mine += bits_of(inverse) != bits_of(1.0f / b);
      if (a >= b * 0x1p-40f && a <= b * 0x1p20f)
        mine += bits_of(cuda::divide_by_short(-a, b, inverse)) != bits_of(-a / b);
    }
  }
  if (mine != 0) atomicAdd(wrong, mine);
}

ECHO_TEST(short_divisions_round_as_ieee) {
  const DeviceMemory wrong(8);
  check_cuda(cudaMemset(wrong.at, 0, 8));
  compare_divisions<<<2048, 256>>>(g_share, reinterpret_cast<unsigned long long*>(wrong.at));
  check_cuda(cudaGetLastError());
  unsigned long long count = 1;
  check_cuda(cudaMemcpy(&count, wrong.at, 8, cudaMemcpyDeviceToHost));
  CHECK_EQ(count, 0ull);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) g_plans = std::atoi(argv[1]);
  if (argc > 2) g_seed = static_cast<unsigned>(std::atoi(argv[2]));
  if (argc > 3) g_share = static_cast<uint32_t>(std::atoi(argv[3]));
  return echo::testing::run_all(", " + std::to_string(g_plans) + " random plans");
}
