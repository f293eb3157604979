// Random plans and awkward data for the CUDA stages, laid out as one memory image that host and device both work on,
// and the CPU's side of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "../../backend/core/reduce.h"
#include "../../backend/cpu/stages.h"

namespace echo::testing {

using Random = std::mt19937;

inline constexpr std::byte kPoison{0xa5};
inline constexpr int64_t kGuardBytes = 48;

struct StageCase {
  Plan plan;
  int64_t tile_groups = 1;
  int64_t offset_elems = 0;  // of the tensors, from a 16-byte boundary
  bool rescale = false;
  std::vector<bool> first_site;
  bool plain_sites = false;  // every other site has numbers for which the kernels' quick loops are made
};

// Where everything of a case lies in its memory image.
struct Layout {
  explicit Layout(const StageCase& c) : ranks(c.plan.world_size), tile(tile_bytes(c.plan.codec, c.tile_groups)) {
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
  int64_t received_by(int64_t tile_index, int64_t owner) const {
    return received + (tile_index * ranks + owner) * ranks * tile;
  }
  int64_t reduced_by(int64_t tile_index, int64_t owner) const { return reduced + (tile_index * ranks + owner) * tile; }
};

inline Site site_of(const StageCase& c, const Layout& layout, std::byte* image, int rank) {
  Site site;
  site.plan = c.plan;
  site.plan.rank = rank;
  site.tensor = image + layout.tensor_of(rank);
  site.state = c.plan.feedback.enabled ? image + layout.state_of(rank) : nullptr;
  return site;
}

// ---- data ---------------------------------------------------------------------------------------------------------

inline float awkward_value(Random& random, int kind) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const float x = normal(random);
  constexpr float kFactors[] = {1e-41f, 6e-8f, 1e38f, 3e4f};  // subnormals, overflow of the sum, fp16's ends
  if (kind < 4) return x * kFactors[kind];
  if (kind < 6) return x + (kind == 4 ? 6.0f : -6.0f);
  if (kind == 6) return random() % 2 == 0 ? 0.0f : -0.0f;
  if (kind == 7) return random() % 40 == 0 ? x * 300.0f : x;
  return kind == 8 && random() % 3 == 0 ? 0.0f : kind == 8 ? std::abs(x) : x;
}

// `plain`: see StageCase::plain_sites.
inline void fill_tensor(const Plan& plan, Random& random, std::byte* out, bool plain = false) {
  constexpr float kSpecials[] = {INFINITY, -INFINITY, NAN, -0.0f};
  const float constant = awkward_value(random, 4);
  for (int64_t i = 0, kind = 9; i < plan.numel; ++i) {
    if (i % plan.codec.group_elems == 0 && !plain) kind = random() % 24;
    float x = kind == 10 ? constant : awkward_value(random, static_cast<int>(kind));
    if (kind == 11 && random() % 64 == 0) x = kSpecials[random() % 4];
    const uint16_t half = plan.dtype == DType::kBFloat16 ? to_bfloat16(x) : to_float16(x);
    std::memcpy(out + i * dtype_bytes(plan.dtype), plan.dtype == DType::kFloat32 ? static_cast<const void*>(&x) : &half,
                dtype_bytes(plan.dtype));
  }
}

template <typename T>
T pick(Random& random, std::initializer_list<T> of) {
  return of.begin()[random() % of.size()];
}

inline StageCase random_case(Random& random) {
  StageCase c;
  Plan& plan = c.plan;
  Codec& codec = plan.codec;
  plan.dtype = pick(random, {DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  plan.world_size = pick(random, {2, 2, 3, 4, 8});
  codec.bits = pick(random, {4, 8});
  codec.group_elems =
      pick(random, {16, 24, 32, 40, 64, 72, 128, 128, 128, 136, 256, 264, 384, 512, 520, 768, 1000, 1024});
  codec.quantizer = pick(random, {Quantizer::kSymmetric, Quantizer::kAsymmetric, Quantizer::kZeroAware});
  codec.scale_dtype = pick(random, {ScaleDType::kBFloat16, ScaleDType::kFloat16});
  codec.tau = pick(random, {0.125f, 0.125f, 0.0f, 1.0f});
  codec.clip = pick(random, {1.0f, 1.0f, 0.95f, 0.5f});
  const int most = __builtin_ctz(codec.group_elems);
  codec.rotation_log2 = pick(random, {0, most, 1 + static_cast<int>(random() % most)});
  if (random() % 4 != 0) {
    const StateDType state =
        pick(random, {StateDType::kInt8, StateDType::kBFloat16, StateDType::kFloat16, StateDType::kFloat32});
    plan.feedback = make_feedback(pick(random, {Residual::kLocal, Residual::kGroup}), state, 0.75,
                                  pick(random, {0.35, 0.0}), 0.7, 0.3);
    if (plan.feedback.k2 == 0.0f) plan.feedback.beta2 = pick(random, {0.0f, 0.3f, 0.9f});
  }
  const int64_t groups = 1 + random() % (2 + 6000 / codec.group_elems);
  plan.numel = random() % 2 == 0 ? groups * codec.group_elems
                                 : (groups - 1) * codec.group_elems + 1 + random() % codec.group_elems;
  c.tile_groups = 1 + random() % segment_groups(plan);
  c.tile_groups = std::max(c.tile_groups, ceil_div(segment_groups(plan), 4));
  c.offset_elems = random() % 2 == 0 ? 0 : random() % 9;
  c.rescale = random() % 3 == 0;
  c.first_site = {true, false, random() % 4 == 0, false};
  return c;
}

// A plan for which there is a kernel with quick loops.
inline StageCase quick_case(Random& random, int ranks) {
  StageCase c;
  Plan& plan = c.plan;
  plan.world_size = ranks;
  plan.dtype = pick(random, {DType::kBFloat16, DType::kFloat16});
  plan.codec.group_elems = pick(random, {128, 128, 32, 64, 256, 1024});
  plan.codec.quantizer = pick(random, {Quantizer::kAsymmetric, Quantizer::kZeroAware});
  plan.codec.scale_dtype = pick(random, {ScaleDType::kBFloat16, ScaleDType::kFloat16});
  plan.codec.rotation_log2 = pick(random, {0, 0, 5, __builtin_ctz(plan.codec.group_elems)});
  plan.codec.bits = pick(random, {4, 4, 4, 8});
  if (plan.codec.bits == 4 && random() % 6 != 0) {
    plan.feedback = make_feedback(pick(random, {Residual::kLocal, Residual::kGroup}),
                                  pick(random, {StateDType::kInt8, StateDType::kBFloat16}), 0.75,
                                  pick(random, {0.35, 0.0}), 0.7, pick(random, {0.3, 0.0}));
  }
  plan.numel = plan.codec.group_elems * (100 + random() % 100) + random() % 3 * 8;
  c.first_site = {true, false, false, false};
  c.tile_groups = segment_groups(plan);
  c.plain_sites = true;
  return c;
}

inline std::string describe(const StageCase& c) {
  const Plan& p = c.plan;
  std::ostringstream out;
  out << "dtype " << int(p.dtype) << " P " << p.world_size << " numel " << p.numel << " offset " << c.offset_elems
      << " tile " << c.tile_groups << " rescale " << c.rescale << " bits " << p.codec.bits << " g "
      << p.codec.group_elems << " quantizer " << int(p.codec.quantizer) << " scale " << int(p.codec.scale_dtype)
      << " rotation 2^" << p.codec.rotation_log2 << " tau " << p.codec.tau << " clip " << p.codec.clip << " feedback "
      << p.feedback.enabled << " residual " << int(p.feedback.residual) << " state " << int(p.feedback.state_dtype)
      << " k2 " << p.feedback.k2;
  return out.str();
}

// All ranks' part of one site; returns the bits of max|x| where the case rescales.
inline uint32_t run_on_cpu(const StageCase& c, const Layout& layout, std::byte* image) {
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

inline std::string first_difference(const Layout& layout, const std::vector<std::byte>& a,
                                    const std::vector<std::byte>& b) {
  for (int64_t i = 0; i < layout.size; ++i) {
    if (a[i] == b[i]) continue;
    const char* part = i >= layout.reduced    ? "reduced tiles"
                       : i >= layout.received ? "pushed tiles"
                       : i >= layout.states   ? "states"
                                              : "tensors";
    std::ostringstream out;
    out << part << " at byte " << i << " of " << layout.size << ": " << int(a[i]) << " on the device, " << int(b[i])
        << " on the CPU";
    return out.str();
  }
  return {};
}

}  // namespace echo::testing
