// The stages over simulated ranks in one process: every instruction set gives the same bytes, all ranks hold the same result, residuals cancel the
// error, awkward sizes and alignments stay inside their buffers.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "../../backend/core/tuning.h"
#include "../../backend/cpu/stages.h"
#include "check.h"

namespace {

using namespace echo;
using Bytes = std::vector<std::byte>;

constexpr int64_t kGuardBytes = 64;
constexpr std::byte kGuard{0xa5};

struct World {
  std::vector<Bytes> tensors;  // with a guard on both sides, the tensor one byte off alignment
  std::vector<Bytes> states;
};

std::byte* tensor_at(Bytes& guarded) { return guarded.data() + kGuardBytes + 1; }

void fill_tensor(const Plan& plan, std::mt19937& random, std::byte* out) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (int64_t i = 0; i < plan.numel; ++i) {
    float value = normal(random) * ((i % 64 == 3) ? 100.0f : 1.0f) + ((i / 200) % 3 == 1 ? 5.0f : 0.0f);
    if (i % 11 == 0) value = 0.0f;
    if ((i / 500) % 4 == 3) value *= 1e-9f;
    const uint16_t half = plan.dtype == DType::kBFloat16 ? to_bfloat16(value) : to_float16(value);
    if (plan.dtype == DType::kFloat32) {
      std::memcpy(out + 4 * i, &value, 4);
    } else {
      std::memcpy(out + 2 * i, &half, 2);
    }
  }
}

World make_world(const Plan& plan, unsigned seed) {
  World world;
  std::mt19937 random(seed);
  for (int rank = 0; rank < plan.world_size; ++rank) {
    Bytes tensor(plan.numel * dtype_bytes(plan.dtype) + 2 * kGuardBytes + 1, kGuard);
    fill_tensor(plan, random, tensor_at(tensor));
    world.tensors.push_back(std::move(tensor));
    world.states.emplace_back(state_bytes(plan));
  }
  return world;
}

void one_site(const cpu::Stages& stages, const Plan& shared, int64_t tile_groups, World& world) {
  const int ranks = shared.world_size;
  const int64_t bytes = tile_bytes(shared.codec, tile_groups);
  std::vector<Site> sites(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    sites[rank].plan = shared;
    sites[rank].plan.rank = rank;
    sites[rank].tensor = tensor_at(world.tensors[rank]);
    sites[rank].state = world.states[rank].data();
  }
  for (int64_t tile = 0; tile * tile_groups < segment_groups(shared); ++tile) {
    std::vector<Bytes> pushed(ranks * ranks, Bytes(bytes));
    std::vector<Bytes> reduced(ranks, Bytes(bytes));
    for (int rank = 0; rank < ranks; ++rank) {
      for (int owner = 0; owner < ranks; ++owner) {
        if (owner == rank) continue;
        stages.push(sites[rank], tile_range(shared, owner, tile, tile_groups), tile_groups, pushed[rank * ranks + owner].data());
      }
    }
    for (int owner = 0; owner < ranks; ++owner) {
      std::vector<const std::byte*> copies(ranks);
      for (int rank = 0; rank < ranks; ++rank) copies[rank] = pushed[rank * ranks + owner].data();
      stages.reduce(sites[owner], tile_range(shared, owner, tile, tile_groups), tile_groups, copies.data(), reduced[owner].data());
    }
    for (int rank = 0; rank < ranks; ++rank) {
      for (int owner = 0; owner < ranks; ++owner) {
        stages.tail(sites[rank], tile_range(shared, owner, tile, tile_groups), tile_groups, reduced[owner].data());
      }
    }
  }
}

std::vector<Plan> all_plans() {
  std::vector<Plan> plans;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Quantizer quantizer : {Quantizer::kSymmetric, Quantizer::kAsymmetric, Quantizer::kZeroAware}) {
      for (const StateDType state : {StateDType::kInt8, StateDType::kBFloat16, StateDType::kFloat16, StateDType::kFloat32}) {
        for (const int variant : {0, 1, 2, 3}) {
          Plan plan;
          plan.dtype = dtype;
          plan.world_size = 2 + variant;
          plan.codec.bits = variant % 2 == 0 ? 4 : 8;
          plan.codec.quantizer = quantizer;
          plan.codec.scale_dtype = variant < 2 ? ScaleDType::kBFloat16 : ScaleDType::kFloat16;
          plan.codec.group_elems = variant == 0 ? 128 : variant == 1 ? 40 : variant == 2 ? 1024 : 16;
          plan.codec.rotation_log2 = variant == 1 ? 3 : variant == 2 ? 10 : variant == 3 ? 4 : 0;
          plan.numel = variant == 3 ? 17 : 128 * 41 + 5;
          plan.feedback = make_feedback(variant % 2 == 0 ? Residual::kLocal : Residual::kGroup, state, 0.75,
                                        variant == 2 ? 0.0 : 0.35, 0.7, 0.3);
          plans.push_back(plan);
        }
      }
    }
  }
  return plans;
}

bool guards_intact(const World& world) {
  for (const Bytes& tensor : world.tensors) {
    for (int64_t i = 0; i <= kGuardBytes; ++i) {
      if (tensor[i] != kGuard) return false;
    }
    for (int64_t i = 0; i < kGuardBytes; ++i) {
      if (tensor[tensor.size() - 1 - i] != kGuard) return false;
    }
  }
  return true;
}

ECHO_TEST(instruction_sets_ranks_and_tilings_agree) {
  for (Plan plan : all_plans()) {
    World expected = make_world(plan, 7);
    for (const bool first : {true, false, false}) {
      plan.first_site = first;
      one_site(*cpu::stages_named("baseline"), plan, segment_groups(plan), expected);
    }
    CHECK(guards_intact(expected));
    for (const Bytes& tensor : expected.tensors) CHECK(tensor == expected.tensors[0]);
    for (const char* isa : {"baseline", "avx2", "avx512"}) {
      const cpu::Stages* stages = cpu::stages_named(isa);
      if (stages == nullptr) continue;
      World world = make_world(plan, 7);
      for (const bool first : {true, false, false}) {
        plan.first_site = first;
        one_site(*stages, plan, 3, world);
      }
      CHECK(world.tensors == expected.tensors);
      CHECK(world.states == expected.states);
    }
  }
}

ECHO_TEST(subnormals_survive_a_caller_that_flushes_them) {
#if defined(__x86_64__)
  Plan plan;
  plan.world_size = 2;
  plan.dtype = DType::kFloat32;
  plan.numel = 128;
  World kept = make_world(plan, 3);
  for (Bytes& tensor : kept.tensors) {
    for (int i = 0; i < 128; ++i) {
      const float tiny = float_of(static_cast<uint32_t>(i * 1000));
      std::memcpy(tensor_at(tensor) + 4 * i, &tiny, 4);
    }
  }
  World flushed = kept;
  one_site(cpu::active_stages(), plan, 1, kept);
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040u);
  one_site(cpu::active_stages(), plan, 1, flushed);
  CHECK_EQ(__builtin_ia32_stmxcsr() & 0x8040u, 0x8040u);
  __builtin_ia32_ldmxcsr(before);
  CHECK(kept.tensors == flushed.tensors);
#endif
}

ECHO_TEST(tiles_cover_every_group_once) {
  for (int world = 1; world <= 8; ++world) {
    for (int64_t numel : {1, 15, 16, 17, 100, 129, 1000}) {
      for (int64_t tile_groups : {1, 2, 3, 7}) {
        Plan plan;
        plan.world_size = world;
        plan.numel = numel;
        plan.codec.group_elems = 16;
        int64_t next = 0;
        for (int owner = 0; owner < world; ++owner) {
          for (int64_t tile = 0; tile * tile_groups < segment_groups(plan); ++tile) {
            const GroupRange range = tile_range(plan, owner, tile, tile_groups);
            CHECK(range.begin <= range.end);
            if (range.begin == range.end) continue;
            CHECK_EQ(range.begin, next);
            next = range.end;
          }
        }
        CHECK_EQ(next, group_count(plan));
      }
    }
  }
}

}  // namespace
