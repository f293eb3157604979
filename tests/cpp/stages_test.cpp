// The stages over simulated ranks in one process: every instruction set gives the same bytes, all ranks hold the same
// result, residuals cancel the error, awkward sizes and alignments stay inside their buffers.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "../../backend/core/tuning.h"
#include "../../backend/cpu/stages.h"
#include "check.h"
#include "simulated_world.h"

namespace {

using namespace echo;
using namespace echo::testing;

std::vector<Plan> all_plans() {
  std::vector<Plan> plans;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Quantizer quantizer : {Quantizer::kSymmetric, Quantizer::kAsymmetric, Quantizer::kZeroAware}) {
      for (const StateDType state :
           {StateDType::kInt8, StateDType::kBFloat16, StateDType::kFloat16, StateDType::kFloat32}) {
        for (const int variant : {0, 1, 2, 3}) {
          Plan plan;
          plan.dtype = dtype;
          plan.world_size = 2 + variant;
          plan.codec.bits = variant % 2 == 0 ? 4 : 8;
          plan.codec.quantizer = quantizer;
          plan.codec.scale_dtype = variant < 2 ? ScaleDType::kBFloat16 : ScaleDType::kFloat16;
          plan.codec.group_elems = variant == 0 ? 128 : variant == 1 ? 40 : variant == 2 ? 1024 : 16;
          plan.codec.rotation_log2 = variant == 1 ? 3 : variant == 2 ? 10 : variant == 3 ? 4 : 0;
          plan.numel = variant == 3 ? 17 : 128 * 41 * scale() + 5;
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
