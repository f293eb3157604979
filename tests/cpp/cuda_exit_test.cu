// quick_exit of backend/cuda/exit_device.cuh against the contract in integers, for all run lengths, group sizes, widths
// of codes, 16-bit tensors and scales: random codes, and those that give the largest sums.
//
//   cuda_exit_test [rounds = 20] [seed = 1]
//
// Build: compile and link it alone, with the flags of backend/CMakeLists.txt.
#include <cstdlib>
#include <string>
#include <vector>

#include "../../backend/cuda/exit_device.cuh"
#include "check.h"
#include "cuda_case.h"
#include "cuda_memory.h"

namespace {

using namespace echo;
using namespace echo::testing;

int g_rounds = 20;
unsigned g_seed = 1;

// A warp to a block: what quick_exit makes of kBits words of codes per lane, and whether it was sure.
template <DType kDType, int kBits>
__global__ void exit_groups(const __grid_constant__ Site site, const uint32_t* codes, const uint32_t* params,
                            uint32_t* out, uint32_t* sure) {
  const cuda::StateLayout no_state;
  const auto lane = cuda::make_lane<cuda::Spread::kRuns>(site, no_state, 0, 0);
  const uint32_t thread = blockIdx.x * cuda::kWarpLanes + lane.in_warp;
  cuda::Encoded<kBits> encoded;
  for (int i = 0; i < kBits; ++i) encoded.codes[i] = codes[kBits * thread + i];
  encoded.params = params[thread >> lane.lanes_log2];
  cuda::ChunkWords<2> words[cuda::kLaneChunks];
  bool all = true;
  cuda::quick_exit<kDType>(lane, encoded, site.plan.codec.rotation_log2, words, all);
  for (int i = 0; i < 16; ++i) out[16 * thread + i] = words[i / 4].at[i % 4];
  sure[thread] = all ? 1 : 0;
}

// The same of one group by the contract, in integers.
std::vector<uint16_t> expected_exit(const Plan& plan, const uint32_t* codes, uint32_t params) {
  const Codec& codec = plan.codec;
  const int n = 1 << codec.rotation_log2;
  const float scale = exit_scale(widen16(static_cast<uint16_t>(params), codec.scale_dtype), 1.0f, codec);
  const float offset = exit_offset(widen16(static_cast<uint16_t>(params >> 16), codec.scale_dtype), codec);
  std::vector<uint16_t> delivered;
  for (int run = 0; run < codec.group_elems; run += n) {
    std::vector<int32_t> h(n);
    for (int i = 0; i < n; ++i) {
      const int bit = (run + i) * codec.bits;
      h[i] = static_cast<int32_t>(codes[bit / 32] >> (bit % 32) & ((1u << codec.bits) - 1));
    }
    for (int stride = n / 2; stride >= 1; stride /= 2) {
      for (int i = 0; i < n; ++i) {
        if ((i & stride) != 0) continue;
        const int32_t u = h[i];
        h[i] = u + h[i + stride];
        h[i + stride] = u - h[i + stride];
      }
    }
    for (int i = 0; i < n; ++i) {
      const float t = static_cast<float>(h[i]) - (i == 0 ? offset : 0.0f);
      const float y = flip_sign(scale * t, rotation_sign_bit(i));
      delivered.push_back(plan.dtype == DType::kBFloat16 ? to_bfloat16(y) : to_float16(y));
    }
  }
  return delivered;
}

// Parameters of any size, of which few may make quick_exit unsure.
uint32_t random_params(const Codec& codec, Random& random) {
  const float scale = std::ldexp(1.0f + static_cast<float>(random() % 256) / 256.0f, -static_cast<int>(random() % 140));
  const float zero = std::ldexp(static_cast<float>(random() % 4096) / 4096.0f, 10 - static_cast<int>(random() % 16));
  const uint32_t zero_bits = round16(pick(random, {zero, -zero, 0.0f, std::round(zero)}), codec.scale_dtype);
  if (random() % 64 == 0) return bad_group(codec.scale_dtype).scale_bits;
  if (random() % 64 == 0) return random() & 0x7fffu;
  if (random() % 64 == 0) return round16(scale, codec.scale_dtype) | 1u << 16;
  return (round16(scale, codec.scale_dtype) ^ pick(random, {0u, 0x8000u})) | zero_bits << 16;
}

template <DType kDType, int kBits>
void check_exits(const Site& site, Random& random) {
  constexpr int kBlocks = 8;
  constexpr int kThreads = 32 * kBlocks;
  const Codec& codec = site.plan.codec;
  const int lanes = codec.group_elems / cuda::kLaneElems;
  std::vector<uint32_t> input(kBits * kThreads + kThreads);
  for (uint32_t& word : input) word = static_cast<uint32_t>(random());
  for (int i = 0; i < codec.group_elems * kBits / 32; ++i) input[i] = 0xffffffffu;  // the largest sums
  uint32_t* params = input.data() + kBits * kThreads;
  for (int i = 0; i < kThreads; ++i) params[i] = random_params(codec, random);
  std::vector<uint32_t> seen(17 * kThreads);
  const DeviceMemory memory(4 * (input.size() + seen.size()));
  auto* const device = reinterpret_cast<uint32_t*>(memory.at);
  check_cuda(cudaMemcpy(device, input.data(), 4 * input.size(), cudaMemcpyHostToDevice));
  uint32_t* const out = device + input.size();
  exit_groups<kDType, kBits><<<kBlocks, 32>>>(site, device, device + kBits * kThreads, out, out + 16 * kThreads);
  check_cuda(cudaMemcpy(seen.data(), out, 4 * seen.size(), cudaMemcpyDeviceToHost));
  int sure = 0;
  int wrong = 0;
  for (int group = 0; group < kThreads / lanes; ++group) {
    const auto expected = expected_exit(site.plan, input.data() + group * lanes * kBits, params[group]);
    for (int i = 0; i < codec.group_elems; ++i) {
      const int element = group * codec.group_elems + i;
      if (seen[16 * kThreads + element / cuda::kLaneElems] == 0) continue;
      ++sure;
      wrong += static_cast<uint16_t>(seen[element / 2] >> (element % 2 * 16)) != expected[i];
    }
  }
  CHECK_EQ(std::to_string(wrong) + " wrong, rotation " + std::to_string(codec.rotation_log2),
           "0 wrong, rotation " + std::to_string(codec.rotation_log2));
  CHECK(sure > cuda::kLaneElems * kThreads / 2);
}

// Of all groups that lie in runs over lanes.
void check_all_exits(Random& random) {
  for (int group = 32; group <= 1024; group *= 2) {
    for (int run_log2 = 1; 1 << run_log2 <= group; ++run_log2) {
      for (const ScaleDType format : {ScaleDType::kBFloat16, ScaleDType::kFloat16}) {
        Site site;
        site.plan.codec.group_elems = group;
        site.plan.codec.rotation_log2 = run_log2;
        site.plan.codec.scale_dtype = format;
        site.plan.codec.bits = 4;
        check_exits<DType::kBFloat16, 4>(site, random);
        site.plan.codec.bits = 8;
        check_exits<DType::kBFloat16, 8>(site, random);
        site.plan.dtype = DType::kFloat16;
        check_exits<DType::kFloat16, 8>(site, random);
        site.plan.codec.bits = 4;
        check_exits<DType::kFloat16, 4>(site, random);
      }
    }
  }
}

ECHO_TEST(quick_exits_are_those_of_the_contract) {
  Random random(g_seed);
  for (int round = 0; round < g_rounds; ++round) check_all_exits(random);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) g_rounds = std::atoi(argv[1]);
  if (argc > 2) g_seed = static_cast<unsigned>(std::atoi(argv[2]));
  return echo::testing::run_all(", " + std::to_string(g_rounds) + " rounds");
}
