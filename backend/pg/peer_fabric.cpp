#include "peer_fabric.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <system_error>

#include <c10/util/Exception.h>
#include "../core/tuning.h"
#include "store_rounds.hpp"

namespace echo::pg {
namespace {

using std::chrono::milliseconds;

// What a rank says of itself in the first round.
struct Introduction {
  std::string identity;
  pid_t pid = 0;
  int32_t cores = 1;
};

int32_t usable_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));  // more cores than the set holds
}

std::string write_introduction() {
  std::ostringstream out;
  out << getpid() << " " << usable_cores() << " " << cpu::host_identity();
  return out.str();
}

Introduction read_introduction(const std::string& text) {
  Introduction introduction;
  std::istringstream in(text);
  in >> introduction.pid >> introduction.cores;
  std::getline(in >> std::ws, introduction.identity);
  return introduction;
}

StoreRounds hello(const PeerFabric::Setup& setup) {
  return {setup.store, "peer/hello", setup.rank, setup.size, setup.timeout};
}

// Cores per rank if those of the host are shared out evenly; 0 if there are fewer than ranks. The smallest count that
// any rank may use decides.
int32_t cores_per_rank(const std::vector<Introduction>& ranks) {
  int32_t cores = ranks.front().cores;
  for (const Introduction& rank : ranks) cores = std::min(cores, rank.cores);
  return cores / static_cast<int32_t>(ranks.size());
}

// Slabs with slots as large as tuned, or half of that and so on where the host has no room for all of them; empty on
// all ranks if not even the smallest fit. No rank tries a size while another still holds a larger slab.
std::optional<cpu::SharedMemory> create_slabs(SlabShape& shape, int64_t workspace_bytes, StoreRounds& rounds,
                                              const StoreRounds::HasExited& has_exited) {
  shape.slot_bytes = slot_bytes_for(workspace_bytes, shape.world_size, shape.lanes, kPeerSlotBytes);
  for (; shape.slot_bytes > 0; shape.slot_bytes = smaller_slot_bytes(shape)) {
    std::optional<cpu::SharedMemory> slab;
    std::string failure;
    try {
      slab = cpu::SharedMemory::create(echo::slab_bytes(shape));
    } catch (const std::system_error& error) {
      failure = error.what();
    }
    if (rounds.exchange_failure(failure, has_exited).empty()) return slab;
    slab.reset();
    rounds.exchange("", has_exited);
  }
  return std::nullopt;
}

}  // namespace

LaneThreads::LaneThreads(int32_t lanes) {
  for (int32_t lane = 1; lane < lanes; ++lane) {
    threads_.emplace_back([this, lane] { serve(lane); });
    pthread_setname_np(threads_.back().native_handle(), "echo-lane");
  }
}

LaneThreads::~LaneThreads() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void LaneThreads::run(const std::function<void(int32_t)>& body) {
  {
    const std::lock_guard lock(mutex_);
    body_ = &body;
    busy_ = static_cast<int32_t>(threads_.size());
    ++round_;
    changed_.notify_all();
  }
  body(0);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return busy_ == 0; });
}

void LaneThreads::serve(int32_t lane) {
  uint64_t done = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || round_ != done; });
    if (stopping_) return;
    done = round_;
    const auto* body = body_;
    lock.unlock();
    (*body)(lane);
    lock.lock();
    --busy_;
    changed_.notify_all();
  }
}

PeerFabric::~PeerFabric() {
  if (observer_) observer_({.step = cpu::PeerStep::kClosing});
}

void PeerFabric::introduce(const Setup& setup) { hello(setup).say(write_introduction()); }

PeerFabric::Vote PeerFabric::make(const Setup& setup) {
  std::vector<Introduction> ranks;
  for (const std::string& text : hello(setup).hear()) ranks.push_back(read_introduction(text));
  for (int32_t rank = 1; rank < setup.size; ++rank) {
    if (ranks[rank].identity == ranks[0].identity) continue;
    return {nullptr,
            "ranks 0 and " + std::to_string(rank) + " share no memory (other host, user, or IPC or PID namespace)"};
  }
  std::unique_ptr<PeerFabric> fabric(new PeerFabric());
  for (const Introduction& rank : ranks) fabric->processes_.emplace_back(rank.pid);

  const auto has_exited = [&](int32_t rank) { return fabric->processes_[rank].has_exited(); };
  const auto observe = [&](cpu::PeerStep step) {
    if (setup.observer) setup.observer({.step = step});
  };
  StoreRounds rounds(setup.store, "peer", setup.rank, setup.size, setup.timeout);
  const int32_t cores = cores_per_rank(ranks);
  fabric->spins_ = cores > 0 ? cpu::kSpins : 0;
  SlabShape shape{.world_size = setup.size, .lanes = std::clamp(cores, 1, kPeerMaxLanes), .slot_bytes = 0};
  std::optional<cpu::SharedMemory> slab = create_slabs(shape, setup.workspace_bytes, rounds, has_exited);
  if (!slab) return {nullptr, "/dev/shm has too little room; containers get more with --ipc=host or --shm-size=1g"};
  observe(cpu::PeerStep::kCreated);

  const std::vector<std::string> paths = rounds.exchange(slab->path(), has_exited);
  std::vector<std::byte*> bases(setup.size);
  fabric->memory_.push_back(std::move(*slab));
  std::string failure;
  try {
    for (int32_t rank = 0; rank < setup.size; ++rank) {
      if (rank != setup.rank) fabric->memory_.push_back(cpu::SharedMemory::open(paths[rank], echo::slab_bytes(shape)));
      bases[rank] = (rank == setup.rank ? fabric->memory_.front() : fabric->memory_.back()).data();
    }
  } catch (const std::system_error& error) {
    failure = error.what();
  }
  // Every rank has mapped what it could when this round ends: nobody needs the handles any more.
  failure = rounds.exchange_failure(failure, has_exited);
  for (cpu::SharedMemory& memory : fabric->memory_) memory.close_handle();
  if (!failure.empty()) return {nullptr, failure};
  observe(cpu::PeerStep::kMapped);

  fabric->group_ = std::make_unique<cpu::PeerGroup>(shape, setup.rank, std::move(bases));
  fabric->lanes_ = std::make_unique<LaneThreads>(shape.lanes);
  fabric->observer_ = setup.observer;
  return {std::move(fabric), {}};
}

void PeerFabric::all_reduce(cpu::PeerCall call) {
  call.limits.spins = spins_;
  call.limits.has_exited = [this](int32_t peer) { return processes_[peer].has_exited(); };
  const bool complete =
      group_->all_reduce(call, [this](const std::function<void(int32_t)>& body) { lanes_->run(body); }, observer_);
  TORCH_CHECK_WITH(DistBackendError, complete, group_->describe_fault(call));
}

}  // namespace echo::pg
