// The CUDA stages against the CPU stages, byte for byte, over simulated ranks on one device: random plans, awkward data, sizes and alignments, several
// sites in a row. Both sides work on the same memory image (tensors, states, tiles, guards between them), and the images are compared whole.
//
//   cuda_stages_test [plans = 600] [seed = 1]
//
// Needs no torch. Build: compile backend/cuda/stages.cu, backend/cpu, backend/core/call_record.cpp as backend/CMakeLists.txt does, and link.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../backend/core/reduce.h"
#include "../../backend/cpu/stages.h"
#include "../../backend/cuda/chunk_device.cuh"
#include "../../backend/cuda/stages.h"
#include "check.h"

namespace {

using namespace echo;
using Random = std::mt19937;

int g_plans = 600;
unsigned g_seed = 1;

constexpr std::byte kPoison{0xa5};
constexpr int64_t kGuardBytes = 48;

void check_cuda(cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

struct DeviceMemory {
  explicit DeviceMemory(int64_t bytes) { check_cuda(cudaMalloc(&at, bytes)); }
  ~DeviceMemory() { cudaFree(at); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* at = nullptr;
};

struct Case {
  Plan plan;
  int64_t tile_groups = 1;
  int64_t offset_elems = 0;  // of the tensors, from a 16-byte boundary
  bool rescale = false;
  std::vector<bool> first_site;
};

// Where everything of a case lies in its memory image.
struct Layout {
  explicit Layout(const Case& c) : ranks(c.plan.world_size), tile(tile_bytes(c.plan.codec, c.tile_groups)) {
    tiles = ceil_div(segment_groups(c.plan), c.tile_groups);
    tensors = kGuardBytes + c.offset_elems * dtype_bytes(c.plan.dtype);
    tensor_stride = align_up(c.plan.numel * dtype_bytes(c.plan.dtype)) + kGuardBytes;
    states = align_up(tensors + ranks * tensor_stride);
    state_stride = align_up(state_bytes(c.plan)) + kGuardBytes;
    received = states + ranks * state_stride;
    reduced = received + tiles * ranks * ranks * tile + kGuardBytes;
    size = reduced + tiles * ranks * tile + kGuardBytes;
  }
  int64_t ranks, tile, tiles, tensors, tensor_stride, states, state_stride, received, reduced, size;

  int64_t tensor_of(int64_t rank) const { return tensors + rank * tensor_stride; }
  int64_t state_of(int64_t rank) const { return states + rank * state_stride; }
  int64_t received_by(int64_t tile_index, int64_t owner) const { return received + (tile_index * ranks + owner) * ranks * tile; }
  int64_t reduced_by(int64_t tile_index, int64_t owner) const { return reduced + (tile_index * ranks + owner) * tile; }
};

Site site_of(const Case& c, const Layout& layout, std::byte* image, int rank) {
  Site site;
  site.plan = c.plan;
  site.plan.rank = rank;
  site.tensor = image + layout.tensor_of(rank);
  site.state = c.plan.feedback.enabled ? image + layout.state_of(rank) : nullptr;
  return site;
}

// ---- data -----------------------------------------------------------------------------------------------------------------------------

float awkward_value(Random& random, int kind) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const float x = normal(random);
  constexpr float kFactors[] = {1e-41f, 6e-8f, 1e38f, 3e4f};  // subnormals, overflow of the sum, fp16's ends
  if (kind < 4) return x * kFactors[kind];
  if (kind < 6) return x + (kind == 4 ? 6.0f : -6.0f);
  if (kind == 6) return random() % 2 == 0 ? 0.0f : -0.0f;
  if (kind == 7) return random() % 40 == 0 ? x * 300.0f : x;
  return kind == 8 && random() % 3 == 0 ? 0.0f : kind == 8 ? std::abs(x) : x;
}

void fill_tensor(const Plan& plan, Random& random, std::byte* out) {
  constexpr float kSpecials[] = {INFINITY, -INFINITY, NAN, -0.0f};
  const float constant = awkward_value(random, 4);
  for (int64_t i = 0, kind = 9; i < plan.numel; ++i) {
    if (i % plan.codec.group_elems == 0) kind = random() % 24;
    float x = kind == 10 ? constant : awkward_value(random, static_cast<int>(kind));
    if (kind == 11 && random() % 64 == 0) x = kSpecials[random() % 4];
    const uint16_t half = plan.dtype == DType::kBFloat16 ? to_bfloat16(x) : to_float16(x);
    std::memcpy(out + i * dtype_bytes(plan.dtype), plan.dtype == DType::kFloat32 ? static_cast<const void*>(&x) : &half, dtype_bytes(plan.dtype));
  }
}

template <typename T>
T pick(Random& random, std::initializer_list<T> of) {
  return of.begin()[random() % of.size()];
}

Case random_case(Random& random) {
  Case c;
  Plan& plan = c.plan;
  Codec& codec = plan.codec;
  plan.dtype = pick(random, {DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  plan.world_size = pick(random, {2, 2, 3, 4, 8});
  codec.bits = pick(random, {4, 8});
  codec.group_elems = pick(random, {16, 24, 32, 40, 64, 72, 128, 128, 128, 136, 256, 264, 384, 512, 520, 768, 1000, 1024});
  codec.quantizer = pick(random, {Quantizer::kSymmetric, Quantizer::kAsymmetric, Quantizer::kZeroAware});
  codec.scale_dtype = pick(random, {ScaleDType::kBFloat16, ScaleDType::kFloat16});
  codec.tau = pick(random, {0.125f, 0.125f, 0.0f, 1.0f});
  codec.clip = pick(random, {1.0f, 1.0f, 0.95f, 0.5f});
  const int most = __builtin_ctz(codec.group_elems);
  codec.rotation_log2 = pick(random, {0, most, 1 + static_cast<int>(random() % most)});
  if (random() % 4 != 0) {
    const StateDType state = pick(random, {StateDType::kInt8, StateDType::kBFloat16, StateDType::kFloat16, StateDType::kFloat32});
    plan.feedback = make_feedback(pick(random, {Residual::kLocal, Residual::kGroup}), state, 0.75, pick(random, {0.35, 0.0}), 0.7, 0.3);
    if (plan.feedback.k2 == 0.0f && random() % 2 == 0) plan.feedback.beta2 = 0.9f;
  }
  const int64_t groups = 1 + random() % (2 + 6000 / codec.group_elems);
  plan.numel = random() % 2 == 0 ? groups * codec.group_elems : (groups - 1) * codec.group_elems + 1 + random() % codec.group_elems;
  c.tile_groups = 1 + random() % segment_groups(plan);
  c.tile_groups = std::max(c.tile_groups, ceil_div(segment_groups(plan), 4));
  c.offset_elems = random() % 2 == 0 ? 0 : random() % 9;
  c.rescale = random() % 3 == 0;
  c.first_site = {true, false, random() % 4 == 0, false};
  return c;
}

std::string describe(const Case& c) {
  const Plan& p = c.plan;
  std::ostringstream out;
  out << "dtype " << int(p.dtype) << " P " << p.world_size << " numel " << p.numel << " offset " << c.offset_elems << " tile " << c.tile_groups << " rescale "
      << c.rescale << " bits " << p.codec.bits << " g " << p.codec.group_elems << " quantizer " << int(p.codec.quantizer) << " scale "
      << int(p.codec.scale_dtype) << " rotation 2^" << p.codec.rotation_log2 << " tau " << p.codec.tau << " clip " << p.codec.clip << " feedback "
      << p.feedback.enabled << " residual " << int(p.feedback.residual) << " state " << int(p.feedback.state_dtype) << " k2 " << p.feedback.k2;
  return out.str();
}

// ---- one site on either side ----------------------------------------------------------------------------------------------------------

uint32_t run_on_cpu(const Case& c, const Layout& layout, std::byte* image) {
  const cpu::Stages& stages = cpu::active_stages();
  std::vector<Site> sites;
  uint32_t largest = 0;
  for (int rank = 0; rank < layout.ranks; ++rank) {
    sites.push_back(site_of(c, layout, image, rank));
    if (c.rescale) largest = std::max(largest, stages.max_magnitude(sites[rank], GroupRange{0, group_count(c.plan)}));
  }
  for (Site& site : sites) site.rescale_log2 = rescale_exponent(largest);
  for (int64_t t = 0; t < layout.tiles; ++t) {
    for (int owner = 0; owner < layout.ranks; ++owner) {
      std::vector<const std::byte*> copies(layout.ranks);
      const GroupRange range = tile_range(c.plan, owner, t, c.tile_groups);
      for (int rank = 0; rank < layout.ranks; ++rank) {
        std::byte* copy = image + layout.received_by(t, owner) + rank * layout.tile;
        copies[rank] = copy;
        if (rank != owner) stages.push(sites[rank], range, c.tile_groups, copy);
      }
      std::byte* sum = image + layout.reduced_by(t, owner);
      stages.reduce(sites[owner], range, c.tile_groups, copies.data(), sum);
      for (const Site& site : sites) stages.tail(site, range, c.tile_groups, sum);
    }
  }
  return largest;
}

// The records and agreed states of all ranks: what an all-gather would have brought to each.
struct Opening {
  explicit Opening(int64_t ranks) : memory(ranks * (sizeof(CallRecord) + sizeof(cuda::CallState))), ranks(ranks) {}
  DeviceMemory memory;
  int64_t ranks;
  CallRecord* records() const { return reinterpret_cast<CallRecord*>(memory.at); }
  cuda::CallState* agreed(int rank) const { return reinterpret_cast<cuda::CallState*>(records() + ranks) + rank; }
};

void run_on_device(const Case& c, const Layout& layout, std::byte* image, const Opening& opening, cuda::FaultRecord* fault, cudaStream_t stream) {
  std::vector<cuda::Call> calls;
  for (int rank = 0; rank < layout.ranks; ++rank) {
    calls.push_back(cuda::Call{site_of(c, layout, image, rank), opening.agreed(rank), stream});
    cuda::write_record(calls[rank], make_call_record(c.plan, Direction::kForward, 3), c.rescale, opening.records() + rank);
  }
  for (int rank = 0; rank < layout.ranks; ++rank) cuda::open_call(calls[rank], opening.records(), opening.agreed(rank), fault);
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

std::string first_difference(const Layout& layout, const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  for (int64_t i = 0; i < layout.size; ++i) {
    if (a[i] == b[i]) continue;
    const char* part = i >= layout.reduced ? "reduced tiles" : i >= layout.received ? "pushed tiles" : i >= layout.states ? "states" : "tensors";
    std::ostringstream out;
    out << part << " at byte " << i << " of " << layout.size << ": " << int(a[i]) << " on the device, " << int(b[i]) << " on the CPU";
    return out.str();
  }
  return {};
}

// True if both sides agree after every site.
bool check_case(const Case& whole, Random& random) {
  static cuda::FaultRecord* const fault = cuda::create_fault_record();
  Case c = whole;
  const Layout layout(c);
  const Opening opening(layout.ranks);
  const DeviceMemory image(layout.size);
  std::vector<std::byte> expected(layout.size, kPoison);
  std::vector<std::byte> seen(layout.size);
  for (size_t site = 0; site < whole.first_site.size(); ++site) {
    c.plan.first_site = whole.first_site[site];
    for (int rank = 0; rank < layout.ranks; ++rank) fill_tensor(c.plan, random, expected.data() + layout.tensor_of(rank));
    check_cuda(cudaMemcpy(image.at, expected.data(), layout.size, cudaMemcpyHostToDevice));
    run_on_device(c, layout, image.at, opening, fault, nullptr);
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
  Case c;
  c.plan.world_size = 2;
  c.plan.numel = (3 << 20) + 5;
  c.plan.codec.group_elems = 16;
  c.plan.codec.rotation_log2 = 4;
  c.plan.feedback = make_feedback(Residual::kLocal, StateDType::kInt8, 0.75, 0.35, 0.7, 0.3);
  c.tile_groups = segment_groups(c.plan);
  c.first_site = {true, false};
  CHECK(check_case(c, random));
}

// ---- the rest of the contract ---------------------------------------------------------------------------------------------------------

ECHO_TEST(a_captured_call_replays) {
  Random random(g_seed);
  Case c;
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
  run_on_device(c, layout, image.at, opening, cuda::create_fault_record(), stream);
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<std::byte> expected(layout.size);
  std::vector<std::byte> seen(layout.size);
  for (int replay = 0; replay < 3; ++replay) {
    for (int rank = 0; rank < layout.ranks; ++rank) fill_tensor(c.plan, random, expected.data() + layout.tensor_of(rank));
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
    Case c;
    c.plan.dtype = dtype;
    c.plan.world_size = 2;
    c.plan.numel = 300;
    const Layout layout(c);
    const Opening opening(2);
    const DeviceMemory image(layout.size);
    check_cuda(cudaMemset(image.at, 0, layout.size));
    cuda::FaultRecord* fault = cuda::create_fault_record();
    const cuda::Call call{site_of(c, layout, image.at, 0), opening.agreed(0), nullptr};
    Plan other = c.plan;
    other.numel = 301;
    const GroupRange all{0, group_count(c.plan)};
    for (const bool agree : {true, false, true}) {
      const bool before = !cuda::describe_fault(fault).empty();
      cuda::write_record(call, make_call_record(c.plan, Direction::kForward, 5), false, opening.records());
      cuda::write_record(call, make_call_record(agree ? c.plan : other, Direction::kForward, 5), false, opening.records() + 1);
      cuda::open_call(call, opening.records(), opening.agreed(0), fault);
      check_cuda(cudaMemsetAsync(image.at + layout.reduced, 0, all.end * 68 + 16));
      cuda::tail(call, all, all.end, image.at + layout.reduced);
      check_cuda(cudaDeviceSynchronize());
      CHECK_EQ(!cuda::describe_fault(fault).empty(), before || !agree);
      std::vector<std::byte> seen(300 * dtype_bytes(dtype));
      check_cuda(cudaMemcpy(seen.data(), image.at + layout.tensor_of(0), seen.size(), cudaMemcpyDeviceToHost));
      const uint32_t wanted = before || !agree ? (dtype == DType::kFloat32 ? kNanBits32 : dtype == DType::kBFloat16 ? kNanBitsBFloat16 : kNanBitsFloat16) : 0;
      for (int i = 0; i < 300; ++i) {
        uint32_t bits = 0;
        std::memcpy(&bits, seen.data() + i * dtype_bytes(dtype), dtype_bytes(dtype));
        CHECK_EQ(bits, wanted);
      }
    }
    CHECK(cuda::describe_fault(fault).find("numel 301") != std::string::npos);
  }
}

// Counts fp32 patterns for which a pair conversion and the core's function differ, and 16-bit patterns for which the widenings do.
__global__ void compare_conversions(unsigned long long* wrong) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  unsigned long long mine = 0;
  for (uint64_t pattern = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; pattern < uint64_t{1} << 32; pattern += stride) {
    const float x = float_of(static_cast<uint32_t>(pattern));
    if (!is_nan(x)) {
      mine += cuda::round_pair_bfloat16(x, -x) != (to_bfloat16(x) | uint32_t{to_bfloat16(-x)} << 16);
      mine += cuda::round_pair_float16(x, -x) != (to_float16(x) | uint32_t{to_float16(-x)} << 16);
    }
    if (pattern >= 0x10000u) continue;
    const float half = from_float16(static_cast<uint16_t>(pattern));
    const float low = cuda::widen_low_float16(static_cast<uint32_t>(pattern) | 0x12340000u);
    const float high = cuda::widen_high_float16(static_cast<uint32_t>(pattern) << 16 | 0x1234u);
    mine += is_nan(half) ? !is_nan(low) || !is_nan(high) : bits_of(low) != bits_of(half) || bits_of(high) != bits_of(half);
  }
  if (mine != 0) atomicAdd(wrong, mine);
}

ECHO_TEST(hardware_conversions_are_those_of_the_core) {
  const DeviceMemory wrong(8);
  check_cuda(cudaMemset(wrong.at, 0, 8));
  compare_conversions<<<2048, 256>>>(reinterpret_cast<unsigned long long*>(wrong.at));
  check_cuda(cudaGetLastError());
  unsigned long long count = 1;
  check_cuda(cudaMemcpy(&count, wrong.at, 8, cudaMemcpyDeviceToHost));
  CHECK_EQ(count, 0ull);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) g_plans = std::atoi(argv[1]);
  if (argc > 2) g_seed = static_cast<unsigned>(std::atoi(argv[2]));
  for (const auto& test : echo::testing::cases()) {
    const int before = echo::testing::failures();
    test.run();
    std::cout << (echo::testing::failures() == before ? "ok   " : "FAIL ") << test.name << "\n" << std::flush;
  }
  std::cout << echo::testing::cases().size() << " cases, " << g_plans << " random plans, " << echo::testing::failures() << " failed checks\n";
  return echo::testing::failures() == 0 ? 0 : 1;
}
