#include "peer_fabric.hpp"

#include <pthread.h>
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

std::string write_introduction() {
  std::ostringstream out;
  out << getpid() << " " << std::max(1u, std::thread::hardware_concurrency()) << " " << cpu::host_identity();
  return out.str();
}

Introduction read_introduction(const std::string& text) {
  Introduction introduction;
  std::istringstream in(text);
  in >> introduction.pid >> introduction.cores;
  std::getline(in >> std::ws, introduction.identity);
  return introduction;
}

// The cores of the host are shared out among the ranks; the smallest count that any rank sees decides.
int32_t lanes_for(const std::vector<Introduction>& ranks) {
  int32_t cores = ranks.front().cores;
  for (const Introduction& rank : ranks) cores = std::min(cores, rank.cores);
  return std::clamp(cores / static_cast<int32_t>(ranks.size()), 1, kPeerMaxLanes);
}

// Memory for a slab of slots as large as tuned, or half of that and so on where the host has no room; nothing below the
// floor.
std::optional<cpu::SharedMemory> create_slab(SlabShape& shape, const PeerFabric::Setup& setup) {
  int64_t workspace = setup.workspace_bytes;
  shape.slot_bytes = slot_bytes_for(workspace, shape.world_size, shape.lanes, kPeerSlotBytes);
  while (shape.slot_bytes > 0) {
    try {
      return cpu::SharedMemory::create(echo::slab_bytes(shape));
    } catch (const std::system_error&) {
      workspace = std::min(workspace, echo::slab_bytes(shape)) / 2;
      if (workspace < kPeerMinWorkspaceBytes) break;
      shape.slot_bytes = slot_bytes_for(workspace, shape.world_size, shape.lanes, kPeerSlotBytes);
    }
  }
  shape.slot_bytes = 0;
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

PeerFabric::Vote PeerFabric::make(const Setup& setup) {
  StoreRounds rounds(setup.store, "peer", setup.rank, setup.size, setup.timeout);
  std::vector<Introduction> ranks;
  for (const std::string& text : rounds.exchange(write_introduction())) ranks.push_back(read_introduction(text));
  for (int32_t rank = 1; rank < setup.size; ++rank) {
    if (ranks[rank].identity == ranks[0].identity) continue;
    return {nullptr,
            "ranks 0 and " + std::to_string(rank) + " share no memory (other host, user, or IPC or PID namespace)"};
  }

  SlabShape shape{.world_size = setup.size, .lanes = lanes_for(ranks), .slot_bytes = 0};
  std::optional<cpu::SharedMemory> slab = create_slab(shape, setup);
  int64_t agreed = shape.slot_bytes;
  for (const std::string& text : rounds.exchange(std::to_string(shape.slot_bytes))) {
    agreed = std::min<int64_t>(agreed, std::stoll(text));
  }
  if (agreed == 0) {
    return {nullptr, "/dev/shm has too little room; containers get more with --ipc=host or --shm-size=1g"};
  }

  std::string failure;
  if (agreed != shape.slot_bytes) {
    shape.slot_bytes = agreed;
    slab.reset();
    try {
      slab = cpu::SharedMemory::create(echo::slab_bytes(shape));
    } catch (const std::system_error& error) {
      failure = error.what();
    }
  }
  const std::vector<std::string> paths = rounds.exchange(slab ? slab->path() : std::string());
  std::unique_ptr<PeerFabric> fabric(new PeerFabric());
  std::vector<std::byte*> bases(setup.size);
  fabric->processes_.resize(setup.size);
  if (slab) fabric->memory_.push_back(std::move(*slab));
  try {
    for (int32_t rank = 0; rank < setup.size && failure.empty(); ++rank) {
      if (rank == setup.rank) {
        bases[rank] = fabric->memory_.front().data();
        continue;
      }
      fabric->memory_.push_back(cpu::SharedMemory::open(paths[rank], echo::slab_bytes(shape)));
      bases[rank] = fabric->memory_.back().data();
      fabric->processes_[rank] = cpu::PeerProcess(ranks[rank].pid);
    }
  } catch (const std::system_error& error) {
    failure = error.what();
  }
  // Every rank has mapped what it could when this round ends: nobody needs the handles any more.
  failure = rounds.exchange_failure(failure);
  for (cpu::SharedMemory& memory : fabric->memory_) memory.close_handle();
  if (!failure.empty()) return {nullptr, failure};

  fabric->group_ = std::make_unique<cpu::PeerGroup>(shape, setup.rank, std::move(bases));
  fabric->lanes_ = std::make_unique<LaneThreads>(shape.lanes);
  return {std::move(fabric), {}};
}

void PeerFabric::all_reduce(cpu::PeerCall call) {
  call.limits.has_exited = [this](int32_t peer) { return processes_[peer].has_exited(); };
  const bool complete =
      group_->all_reduce(call, [this](const std::function<void(int32_t)>& body) { lanes_->run(body); });
  TORCH_CHECK_WITH(DistBackendError, complete, group_->describe_fault(call));
}

}  // namespace echo::pg
