// The peer-memory composition with ranks as threads and slabs as plain memory: byte for byte what the stages give
// without any exchange, over calls of changing size, and a fault instead of a hang or a wrong number where ranks
// disagree, stay away or die.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../backend/cpu/peer_allreduce.h"
#include "check.h"
#include "simulated_world.h"

namespace {

using namespace echo;
using namespace echo::testing;
using cpu::PeerCall;
using cpu::PeerGroup;

// Zeroed memory for every rank's slab, on cache-line boundaries.
struct Slabs {
  std::vector<std::vector<uint64_t>> words;
  std::vector<std::byte*> bases;

  explicit Slabs(const SlabShape& shape) {
    for (int rank = 0; rank < shape.world_size; ++rank) {
      words.emplace_back(slab_bytes(shape) / 8 + kCacheLineBytes / 8);
      const auto address = reinterpret_cast<uintptr_t>(words.back().data());
      bases.push_back(
          reinterpret_cast<std::byte*>((address + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes));
    }
  }
};

void on_threads(int count, const std::function<void(int32_t)>& body) {
  std::vector<std::thread> threads;
  for (int i = 1; i < count; ++i) threads.emplace_back(body, i);
  body(0);
  for (std::thread& thread : threads) thread.join();
}

PeerCall call_of(const Plan& shared, int rank, uint64_t number, World& world) {
  PeerCall call;
  call.site.plan = shared;
  call.site.plan.rank = rank;
  call.site.tensor = tensor_at(world.tensors[rank]);
  call.site.state = world.states[rank].data();
  call.call_number = number;
  call.limits.timeout = std::chrono::seconds(60);
  return call;
}

bool is_nan(const Plan& plan, Bytes& tensor) {
  const uint32_t pattern = plan.dtype == DType::kFloat32 ? kNanBits32 : kNanBitsBFloat16;
  const int64_t bytes = dtype_bytes(plan.dtype);
  for (int64_t i = 0; i < plan.numel; ++i) {
    if (std::memcmp(tensor_at(tensor) + i * bytes, &pattern, bytes) != 0) return false;
  }
  return true;
}

struct Case {
  int world_size;
  int lanes;
  int calls;
  const char* isa = cpu::active_isa();
};

Plan plan_of(const Case& c, int number) {
  Plan plan;
  plan.world_size = c.world_size;
  plan.dtype = number % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
  plan.codec.group_elems = number % 3 == 0 ? 16 : 128;
  plan.codec.bits = number % 5 == 0 ? 8 : 4;
  plan.numel = 1 + (number * 7919) % (2000 * c.world_size);
  plan.feedback =
      make_feedback(number % 4 == 0 ? Residual::kGroup : Residual::kLocal, StateDType::kInt8, 0.75, 0.35, 0.7, 0.3);
  return plan;
}

// What the ranks hold before the calls, and what after each if the stages run without any exchange.
struct Story {
  std::vector<World> worlds;
  std::vector<World> expected;

  explicit Story(const Case& c) {
    for (int number = 0; number < c.calls; ++number) {
      const Plan plan = plan_of(c, number);
      worlds.push_back(make_world(plan, number));
      expected.push_back(make_world(plan, number));
      one_site(*cpu::stages_named(c.isa), plan, segment_groups(plan), expected.back());
    }
  }
};

void check_against_simulation(const Case& c) {
  const SlabShape shape{c.world_size, c.lanes, 512};
  Slabs slabs(shape);
  Story story(c);
  on_threads(c.world_size, [&](int32_t rank) {
    PeerGroup group(shape, rank, slabs.bases, *cpu::stages_named(c.isa));
    std::mt19937 random(rank);
    for (int number = 0; number < c.calls; ++number) {
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      PeerCall call = call_of(plan_of(c, number), rank, number, story.worlds[number]);
      call.look_ahead = number / 2 % (kLookAhead + 1);
      const bool complete = group.all_reduce(call, [&](const auto& body) { on_threads(c.lanes, body); });
      if (!complete) std::cerr << group.describe_fault(call) << "\n";
      CHECK(complete);
    }
  });
  for (int number = 0; number < c.calls; ++number) {
    CHECK(story.worlds[number].tensors == story.expected[number].tensors);
    CHECK(story.worlds[number].states == story.expected[number].states);
  }
}

ECHO_TEST(peer_equals_simulation) {
  for (const char* isa : {"baseline", cpu::active_isa()}) {
    check_against_simulation({2, 1, 40 * scale(), isa});
    check_against_simulation({3, 2, 20 * scale(), isa});
    check_against_simulation({4, 4, 5 * scale(), isa});
    check_against_simulation({8, 1, 10 * scale(), isa});
    check_against_simulation({8, 2, 2 * scale(), isa});
  }
}

// One rank aborts at a point drawn by chance, in a call or between two: every rank leaves, what each holds of each call
// is the right result or NaN, and the call after the last fails on all.
void check_abort(const Case& c, unsigned seed) {
  const SlabShape shape{c.world_size, c.lanes, 512};
  Slabs slabs(shape);
  Story story(c);
  std::mt19937 chance(seed);
  const auto author = static_cast<int32_t>(chance() % c.world_size);
  const auto last = static_cast<uint64_t>(c.calls - 1);
  const Moment chosen{.step = chance() % 2 == 0 ? Step::kPushed : Step::kReduced,
                      .call_number = chance() % (last + 1),
                      .lane = static_cast<int32_t>(chance() % c.lanes),
                      .tile = 0};
  on_threads(c.world_size, [&](int32_t rank) {
    PeerGroup group(shape, rank, slabs.bases, *cpu::stages_named(c.isa));
    const Observer observer = [&](const Moment& now) {
      if (rank != author || now.call_number != chosen.call_number) return;
      if (now.step == chosen.step && now.lane == chosen.lane) group.abort();
    };
    for (uint64_t number = 0; number <= last; ++number) {
      if (rank == author && number == last) group.abort();
      const Plan plan = plan_of(c, static_cast<int>(number));
      const PeerCall call = call_of(plan, rank, number, story.worlds[number]);
      const bool complete = group.all_reduce(call, [&](const auto& body) { on_threads(c.lanes, body); }, observer);
      Bytes& tensor = story.worlds[number].tensors[rank];
      CHECK(complete ? tensor == story.expected[number].tensors[rank] : is_nan(plan, tensor));
      if (!complete) CHECK(!group.describe_fault(call).empty());
      if (number == last) CHECK(!complete);
    }
  });
}

ECHO_TEST(an_abort_in_the_middle_leaves_no_wrong_number) {
  for (int seed = 0; seed < 4 * scale(); ++seed) {
    check_abort({2, 1, 6}, seed);
    check_abort({3, 2, 6}, seed);
    check_abort({8, 1, 3}, seed);
  }
}

ECHO_TEST(stages_of_a_lane_overlap) {
  const Case c{2, 1, 1};
  const SlabShape shape{2, 1, 512};
  Slabs slabs(shape);
  Plan plan = plan_of(c, 0);
  plan.numel = 16384;
  World world = make_world(plan, 1);
  std::vector<std::pair<Step, int64_t>> order;
  on_threads(2, [&](int32_t rank) {
    PeerGroup group(shape, rank, slabs.bases);
    Observer observer;
    if (rank == 0) observer = [&](const Moment& moment) { order.emplace_back(moment.step, moment.tile); };
    CHECK(group.all_reduce(call_of(plan, rank, 0, world), [](const auto& body) { body(0); }, observer));
  });
  const auto position = [&](Step step, int64_t tile) {
    return std::find(order.begin(), order.end(), std::pair(step, tile)) - order.begin();
  };
  const int64_t tiles = ceil_div(segment_groups(plan), peer_tile_groups(plan, shape));
  CHECK(tiles > 10);
  for (int64_t tile = 0; tile + 1 < tiles; ++tile)
    CHECK(position(Step::kPushed, tile + 1) < position(Step::kGatherSeen, tile));
}

// Both ranks' outcome of one call under a scenario: true where it completed; the tensors are checked for NaN where it
// did not.
enum class Trouble { kOtherNumel, kOtherShape, kLate, kExited, kAborted, kThrown };

void check_trouble(Trouble trouble, const std::string& expected_words) {
  const Case c{2, 1, 1};
  const SlabShape shape{2, 1, 512};
  Slabs slabs(shape);
  std::vector<World> worlds;
  for (int rank = 0; rank < 2; ++rank) worlds.push_back(make_world(plan_of(c, 2), rank));
  std::atomic<int> words_found{0};
  on_threads(2, [&](int32_t rank) {
    PeerGroup group(shape, rank, slabs.bases);
    if (rank == 1 && trouble == Trouble::kAborted) group.abort();
    const bool both = trouble == Trouble::kOtherNumel || trouble == Trouble::kOtherShape || trouble == Trouble::kThrown;
    if (rank == 1 && !both) return;
    Plan plan = plan_of(c, 2);
    if (trouble == Trouble::kOtherNumel) plan.numel -= rank;
    PeerCall call = call_of(plan, rank, 0, worlds[rank]);
    if (trouble == Trouble::kLate) call.limits.timeout = std::chrono::milliseconds(200);
    const int64_t sizes[] = {plan.numel / (8 << rank), 8 << rank};
    if (trouble == Trouble::kOtherShape) call.shape = shape_of(sizes, 2);
    if (trouble == Trouble::kExited) call.limits.has_exited = [](int32_t) { return true; };
    const Observer thrower = [&](const Moment& now) {
      if (trouble == Trouble::kThrown && rank == 1 && now.step == Step::kPushed) throw std::runtime_error("thrown");
    };
    bool thrown = false;
    try {
      CHECK(!group.all_reduce(call, [](const auto& body) { body(0); }, thrower));
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK_EQ(thrown, trouble == Trouble::kThrown && rank == 1);
    if (group.describe_fault(call).find(expected_words) != std::string::npos) ++words_found;
    CHECK(is_nan(plan, worlds[rank].tensors[rank]));
    CHECK(!group.all_reduce(call, [](const auto& body) { body(0); }));
  });
  CHECK(words_found >= 1);
}

ECHO_TEST(ranks_in_different_calls_fault) { check_trouble(Trouble::kOtherNumel, "numel"); }
ECHO_TEST(ranks_with_other_shapes_fault) { check_trouble(Trouble::kOtherShape, "the last of 16"); }
ECHO_TEST(what_a_rank_throws_ends_the_waiting_of_others) { check_trouble(Trouble::kThrown, "aborted by rank 1"); }
ECHO_TEST(a_late_rank_faults_at_the_time_out) { check_trouble(Trouble::kLate, "did not come within 200 ms"); }
ECHO_TEST(an_exited_rank_faults) { check_trouble(Trouble::kExited, "has exited"); }
ECHO_TEST(an_abort_ends_all_waiting) { check_trouble(Trouble::kAborted, "aborted by rank 1"); }

// Every slot that is written in a slab, and every flag, record and word of faults besides: none overlaps another, all
// lie inside.
ECHO_TEST(nothing_in_a_slab_overlaps) {
  struct Extent {
    int64_t begin, end;
  };
  const auto check = [](const SlabShape& shape, int32_t owner) {
    std::vector<Extent> extents = {{fault_offset(), fault_offset() + kCacheLineBytes}};
    const auto add = [&](int64_t begin, int64_t bytes) { extents.push_back({begin, begin + bytes}); };
    for (int32_t source = 0; source < shape.world_size; ++source) {
      add(fault_record_offset(source), kCacheLineBytes);
      for (int32_t parity = 0; parity < kCallParities; ++parity) {
        add(record_ticket_offset(source, parity), kCacheLineBytes);
        add(record_offset(shape, source, parity), kRecordBytes);
      }
      for (int32_t at = 0; at < shape.lanes * kRingSlots; ++at) {
        const int32_t lane = at / kRingSlots;
        const int32_t slot = at % kRingSlots;
        for (const Stage stage : {Stage::kPush, Stage::kGather}) {
          add(flag_offset(shape, lane, stage, source, slot), kCacheLineBytes);
          const int32_t slots = stage == Stage::kPush ? shape.push_slots : kRingSlots;
          if (source == owner || slot >= slots) continue;
          add(slot_offset(shape, owner, lane, stage, source, slot), shape.slot_bytes);
        }
      }
    }
    for (int32_t lane = 0; lane < shape.lanes; ++lane) {
      for (int64_t i = 0; i < kOwnSlots; ++i) add(own_slot_offset(shape, lane, i), shape.slot_bytes);
    }
    std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    for (size_t i = 0; i + 1 < extents.size(); ++i) CHECK(extents[i].end <= extents[i + 1].begin);
    CHECK(extents.front().begin >= 0);
    CHECK_EQ(extents.back().end, slab_bytes(shape));
  };
  for (const int32_t ranks : {2, 3, 4, 8, 16}) {
    for (const int32_t push_slots : {kDevicePushSlots, kRingSlots}) {
      const SlabShape shape{.world_size = ranks, .lanes = 3, .slot_bytes = 208, .push_slots = push_slots};
      for (int32_t owner = 0; owner < ranks; ++owner) check(shape, owner);
    }
  }
}

ECHO_TEST(slots_are_as_large_as_the_workspace_allows) {
  constexpr int64_t kWorkspace = 64 << 20;
  SlabShape shape{.world_size = 2, .lanes = 396, .push_slots = kDevicePushSlots};
  CHECK_EQ(slots_of_lane(shape), 7);
  CHECK_EQ(slot_bytes_for(kWorkspace, shape, kPeerDeviceSlotBytes), kPeerDeviceSlotBytes);
  for (const int32_t push_slots : {kDevicePushSlots, kRingSlots}) {
    for (const int32_t ranks : {2, 3, 4, 8, 16}) {
      shape.world_size = ranks;
      shape.push_slots = push_slots;
      shape.slot_bytes = slot_bytes_for(kWorkspace, shape, kWorkspace);
      CHECK(slab_bytes(shape) <= kWorkspace);
      shape.slot_bytes += kTileAlignBytes;
      CHECK(slab_bytes(shape) > kWorkspace);
    }
  }
}

ECHO_TEST(slabs_halve_down_to_the_floor) {
  SlabShape shape{8, 4, 64 << 10};
  CHECK(slab_bytes(shape) > 8 << 20);
  const int64_t before = slab_bytes(shape);
  shape.slot_bytes = smaller_slot_bytes(shape);
  CHECK(slab_bytes(shape) <= before / 2);
  CHECK(slab_bytes(shape) >= kPeerMinWorkspaceBytes);
  CHECK_EQ(smaller_slot_bytes(shape), int64_t{0});
}

// Calls of many tiles, across the sequence number at which tickets wrap.
ECHO_TEST(lanes_count_past_the_end_of_a_ticket) {
  const SlabShape shape{2, 1, 512};
  Slabs slabs(shape);
  const uint64_t start = (uint64_t{1} << 32) - 25;  // the end falls into the third call
  for (std::byte* slab : slabs.bases) {
    for (const Stage stage : {Stage::kPush, Stage::kGather}) {
      for (int source = 0; source < 2; ++source) {
        for (int slot = 0; slot < kRingSlots; ++slot) {
          cpu::word_at(slab, flag_offset(shape, 0, stage, source, slot)) = start & 0xffffffffu;
        }
      }
    }
  }
  Plan plan = plan_of(Case{2, 1, 1}, 1);
  plan.numel = 16384;
  CHECK(ceil_div(segment_groups(plan), peer_tile_groups(plan, shape)) > 6);
  std::vector<World> worlds;
  std::vector<World> expected;
  for (int number = 0; number < 6; ++number) {
    worlds.push_back(make_world(plan, number));
    expected.push_back(make_world(plan, number));
    one_site(cpu::active_stages(), plan, segment_groups(plan), expected.back());
  }
  on_threads(2, [&](int32_t rank) {
    PeerGroup group(shape, rank, slabs.bases);
    group.count_from(start);
    for (int number = 0; number < 6; ++number) {
      if (rank == number % 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const PeerCall call = call_of(plan, rank, number, worlds[number]);
      CHECK(group.all_reduce(call, [](const auto& body) { body(0); }));
    }
  });
  for (int number = 0; number < 6; ++number) CHECK(worlds[number].tensors == expected[number].tensors);
}

// Calls whose numbers cross the end of what a record's ticket can hold, with the exchange of max|x| that waits for it.
ECHO_TEST(calls_count_past_the_end_of_a_ticket) {
  const SlabShape shape{2, 1, 512};
  Slabs slabs(shape);
  const uint64_t start = (uint64_t{1} << 32) - 3;
  for (std::byte* slab : slabs.bases) {
    for (int source = 0; source < 2; ++source) {
      for (uint64_t before = start - 2; before < start; ++before) {
        const auto parity = static_cast<int32_t>(before % kCallParities);
        cpu::word_at(slab, record_ticket_offset(source, parity)) = ticket_of(static_cast<uint32_t>(before), 0);
      }
    }
  }
  const Plan plan = plan_of(Case{2, 1, 1}, 1);
  std::vector<World> worlds;
  for (int number = 0; number < 6; ++number) worlds.push_back(make_world(plan, number));
  on_threads(2, [&](int32_t rank) {
    PeerGroup group(shape, rank, slabs.bases);
    for (int number = 0; number < 6; ++number) {
      if (rank == number % 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      PeerCall call = call_of(plan, rank, start + static_cast<uint64_t>(number), worlds[number]);
      call.rescale = true;
      CHECK(group.all_reduce(call, [](const auto& body) { body(0); }));
    }
  });
  for (World& world : worlds) {
    CHECK(std::memcmp(tensor_at(world.tensors[0]), tensor_at(world.tensors[1]), plan.numel * dtype_bytes(plan.dtype)) ==
          0);
    CHECK(!is_nan(plan, world.tensors[0]));
  }
}

ECHO_TEST(tickets_are_wrap_safe) {
  const uint64_t last = ticket_of(0xffffffffu, 7);
  CHECK_EQ(static_cast<uint32_t>(last), 0u);
  CHECK(compare_ticket(ticket_of(0xfffffffdu, 7), last) == TicketState::kNotYet);
  CHECK(compare_ticket(ticket_of(2, 7), last) == TicketState::kForeign);
  CHECK(compare_ticket(ticket_of(0xffffffffu, 8), last) == TicketState::kForeign);
  CHECK(compare_ticket(last, last) == TicketState::kHere);
}

}  // namespace
