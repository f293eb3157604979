// The one-kernel composition over peer memory, and the update that may come after it, against the CPU stages, byte for
// byte.
//
//   cuda_peer_test [plans = 300] [seed = 1] [share = 1] [part of a test's name]
//
// share: large tensors, and the lanes they go over, are smaller by as much. Needs no torch; built like
// cuda_stages_test.cu, with all of backend/cuda/*.cu and backend/core/fault_text.cpp.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "cuda_world.h"

namespace {

using namespace echo;
using namespace echo::testing;

int g_plans = 300;
unsigned g_seed = 1;
int g_share = 1;

// Tiles and calls are counted in 64 bits, of which tickets hold 32.
constexpr uint64_t kTicketEnd = uint64_t{1} << 32;

// The updates that calls have left, after the tensors got other contents.
void update_after(const StageCase& c, World& world, Memories& memories, const std::vector<cuda::PeerCall>& calls) {
  for (const auto& memory : memories) {
    const cuda::PeerCall& call = calls[memory->rank];
    if (call.kept == nullptr) continue;
    check_cuda(cudaSetDevice(memory->rank % device_count()));
    check_cuda(cudaMemset(memory->tensor_base, 0x7f, memory->tensor_bytes));
    check_cuda(cudaDeviceSynchronize());
    world.group(memory->rank).update(call, world.stream(memory->rank));
  }
  synchronize(world, c.plan.world_size);
}

// Who updates averages of residual "group": the call, or what comes after it, from what the call kept.
enum class Update { kInCall, kAfterCall };

// Runs the sites of a case on a world that other cases have used before; true if all agree.
bool check_case(const StageCase& whole, World& world, Random& random, Update update = Update::kInCall) {
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
    std::vector<cuda::PeerCall> calls;
    for (auto& memory : memories) {
      check_cuda(cudaSetDevice(memory->rank % device_count()));
      cuda::PeerCall call = call_of(c, world, *memory);
      if (update == Update::kAfterCall && cuda::PeerGroup::can_keep(call)) call.kept = memory->kept;
      world.group(memory->rank).all_reduce(call);
      calls.push_back(call);
    }
    synchronize(world, c.plan.world_size);
    run_on_cpu(c, layout, image.data());
    std::string difference = world.group(0).describe_fault();
    if (difference.empty()) difference = compare(c, layout, image, memories, Part::kTensor);
    if (update == Update::kAfterCall) update_after(c, world, memories, calls);
    if (difference.empty()) difference = compare(c, layout, image, memories, Part::kState);
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

ECHO_TEST(an_update_after_its_call_writes_the_same_bytes) {
  Random random(g_seed);
  bool same = true;
  for (const int ranks : {2, 3}) {
    World world(ranks, 2, 4352);
    for (int i = 0; i < g_plans / (ranks == 2 ? 2 : 8) && same; ++i) {
      StageCase c = quick_case(random, ranks);
      c.plan.codec.bits = 4;
      c.plan.feedback = make_feedback(Residual::kGroup, pick(random, {StateDType::kInt8, StateDType::kBFloat16}), 0.75,
                                      pick(random, {0.35, 0.0}), 0.7, 0.3);
      c.tile_groups = segment_groups(c.plan);
      c.offset_elems = i % 4 == 3 ? 1 + random() % 8 : 0;
      same = check_case(c, world, random, Update::kAfterCall);
    }
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
      if (residual == Residual::kGroup) CHECK(check_case(c, world, random, Update::kAfterCall));
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
  // What was recorded before counts on from here: both ends of a ticket come within the first replays.
  world.count_from({.tiles = kTicketEnd - 17, .calls = kTicketEnd - 7});
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
  CHECK(world.group(0).counters().tiles > kTicketEnd && world.group(1).counters().calls == kTicketEnd + 193);
  for (const cudaGraphExec_t graph : graphs) check_cuda(cudaGraphExecDestroy(graph));
}

// ---- counters that wrap -------------------------------------------------------------------------------------------

// Lanes of many tiles and calls with an exchange of max|x|, which waits for the calls' own tickets, across the end of
// what tickets can hold of both: at different calls, and at once.
ECHO_TEST(counters_may_wrap) {
  Random random(g_seed);
  for (const int64_t tiles_before : {25, 3, 1}) {
    for (const bool rescale : {false, true}) {
      StageCase c;
      c.plan.world_size = 2;
      c.plan.numel = 128 * 12 * 2 * 90 + 5;
      c.rescale = rescale;
      c.tile_groups = segment_groups(c.plan);
      c.first_site = {true, true, true, true, true, true};
      World world(2, 2, 1600);
      world.count_from({.tiles = kTicketEnd - static_cast<uint64_t>(tiles_before), .calls = kTicketEnd - 3});
      CHECK(check_case(c, world, random));
      for (int rank = 0; rank < 2; ++rank) {
        CHECK(world.group(rank).counters().tiles > kTicketEnd + 2 * kRingSlots);
        CHECK_EQ(world.group(rank).counters().calls, kTicketEnd + 3);
      }
    }
  }
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

// One lane of rank 0 meets a ticket of another call, if it looks before rank 1 writes the right one over it. Other
// lanes do not look for faults while they find what they wait for, and store what is right.
ECHO_TEST(a_fault_of_one_lane_leaves_no_number_of_the_others) {
  Random random(g_seed);
  int faults = 0;
  for (int round = 0; round < 10; ++round) {
    StageCase c;
    c.plan.world_size = 2;
    c.plan.numel = 128 * 32 * 2 * 40;
    c.tile_groups = segment_groups(c.plan);
    const Layout layout(c);
    std::vector<std::byte> image(layout.size, kPoison);
    for (int rank = 0; rank < 2; ++rank) fill_tensor(c.plan, random, image.data() + layout.tensor_of(rank));
    World world(2, 2, 32 * 68);
    Memories memories = allocate(c);
    send(c, layout, image, memories);
    const uint64_t foreign = ticket_of(kRingSlots - 1, 0x5eed);
    check_cuda(cudaSetDevice(0));
    for (int slot = 0; slot < kRingSlots; ++slot) {
      uint64_t* const flag = world.flag(0, 1, Stage::kGather, 1, slot);
      check_cuda(cudaMemcpy(flag, &foreign, sizeof foreign, cudaMemcpyHostToDevice));
    }
    for (int rank = 0; rank < 2; ++rank) {
      check_cuda(cudaSetDevice(rank % device_count()));
      world.group(rank).all_reduce(call_of(c, world, *memories[rank]));
    }
    synchronize(world, 2);
    if (world.group(0).fault().kind != FaultKind::kNone) ++faults;
    run_on_cpu(c, layout, image.data());
    for (const auto& memory : memories) {
      const std::string difference = compare(c, layout, image, *memory);
      if (!difference.empty() && !all_nan(c, *memory)) CHECK_EQ("neither right nor all NaN, " + difference, "");
    }
  }
  CHECK(faults > 0);
}

// What it kept may be anything.
ECHO_TEST(the_update_of_a_failed_call_writes_nothing) {
  StageCase c;
  c.plan.world_size = 2;
  c.plan.numel = 128 * 300;
  c.plan.first_site = false;
  c.plan.feedback = make_feedback(Residual::kGroup, StateDType::kInt8, 0.75, 0.35, 0.7, 0.3);
  c.tile_groups = segment_groups(c.plan);
  World world(2, 2, 1600);
  Memories memories = allocate(c);
  const RankMemory& memory = *memories[0];
  check_cuda(cudaSetDevice(0));
  check_cuda(cudaMemset(memory.state, 0, state_bytes(c.plan)));
  check_cuda(cudaDeviceSynchronize());
  cuda::PeerCall call = call_of(c, world, memory);
  call.timeout = std::chrono::milliseconds(300);
  call.kept = memory.kept;
  world.group(0).all_reduce(call);
  world.group(0).update(call, world.stream(0));
  synchronize(world, 1);
  CHECK(world.group(0).fault().kind == FaultKind::kTimeout);
  const std::vector<std::byte> zeros(state_bytes(c.plan));
  CHECK_EQ(difference(memory, memory.state, zeros.data(), state_bytes(c.plan), "state"), "");
}

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
