// A whole group of ranks in one process: what every rank holds, and one site carried out stage by stage without any
// exchange. The expectation for tests of compositions.
#pragma once

#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "../../backend/cpu/stages.h"

namespace echo::testing {

using Bytes = std::vector<std::byte>;

constexpr int64_t kGuardBytes = 64;
constexpr std::byte kGuard{0xa5};

struct World {
  std::vector<Bytes> tensors;  // with a guard on both sides, the tensor one byte off alignment
  std::vector<Bytes> states;
};

inline std::byte* tensor_at(Bytes& guarded) { return guarded.data() + kGuardBytes + 1; }

inline void fill_tensor(const Plan& plan, std::mt19937& random, std::byte* out) {
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

inline World make_world(const Plan& plan, unsigned seed) {
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

inline void one_site(const cpu::Stages& stages, const Plan& shared, int64_t tile_groups, World& world) {
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
        stages.push(sites[rank], tile_range(shared, owner, tile, tile_groups), tile_groups,
                    pushed[rank * ranks + owner].data());
      }
    }
    for (int owner = 0; owner < ranks; ++owner) {
      std::vector<const std::byte*> copies(ranks);
      for (int rank = 0; rank < ranks; ++rank) copies[rank] = pushed[rank * ranks + owner].data();
      stages.reduce(sites[owner], tile_range(shared, owner, tile, tile_groups), tile_groups, copies.data(),
                    reduced[owner].data());
    }
    for (int rank = 0; rank < ranks; ++rank) {
      for (int owner = 0; owner < ranks; ++owner) {
        stages.tail(sites[rank], tile_range(shared, owner, tile, tile_groups), tile_groups, reduced[owner].data());
      }
    }
  }
}

}  // namespace echo::testing
