#include "peer_fabric.hpp"

#include <pthread.h>

#include <algorithm>
#include <optional>
#include <system_error>

#include <c10/util/Exception.h>
#include "../core/tuning.h"
#include "store_rounds.hpp"

namespace echo::pg {
namespace {

// What rank `seal.rank`, whose process is `pid`, offers. Throws std::system_error for anything but its sealed memory.
cpu::SharedMemory open_offer(const std::string& offer, pid_t pid, const cpu::Seal& seal) {
  const std::optional<cpu::MemoryHandle> handle = cpu::read_handle(offer);
  if (!handle || handle->pid != pid) {
    throw std::system_error(EINVAL, std::generic_category(),
                            "what rank " + std::to_string(seal.rank) + " offers is no handle of its process");
  }
  return cpu::SharedMemory::open(*handle, seal);
}

constexpr char kNotForRoom = '!';  // in front of a failure that a smaller slab would meet too

std::string failure_text(const std::system_error& error) {
  const int code = error.code().value();
  return (code == ENOSPC || code == ENOMEM ? "" : std::string(1, kNotForRoom)) + error.what();
}

// Slabs with slots as large as tuned, or half of that and so on where the host has no room for all of them; empty on
// all ranks, with the reason, if not even the smallest fit or there is another obstacle. No rank tries a size while
// another still holds a larger slab.
std::optional<cpu::SharedMemory> create_slabs(SlabShape& shape, cpu::Seal& seal, int64_t workspace_bytes,
                                              StoreRounds& rounds, std::string& reason) {
  shape.slot_bytes = slot_bytes_for(workspace_bytes, shape, kPeerSlotBytes);
  for (; shape.slot_bytes > 0; shape.slot_bytes = smaller_slot_bytes(shape)) {
    std::optional<cpu::SharedMemory> slab;
    std::string failure;
    try {
      seal.bytes = echo::slab_bytes(shape);
      slab = cpu::SharedMemory::create(seal);
    } catch (const std::system_error& error) {
      failure = failure_text(error);
    }
    std::vector<std::string> failures = rounds.exchange(failure);
    if (StoreRounds::first_failure(failures).empty()) return slab;
    slab.reset();
    for (std::string& text : failures) text.erase(0, text.starts_with(kNotForRoom) ? 1 : std::string::npos);
    if (reason = StoreRounds::first_failure(failures); !reason.empty()) return std::nullopt;
    rounds.exchange("");
  }
  reason = "/dev/shm has too little room; containers get more with --ipc=host or --shm-size=1g";
  return std::nullopt;
}

}  // namespace

LaneThreads::LaneThreads(int32_t lanes) {
  try {
    for (int32_t lane = 1; lane < lanes; ++lane) {
      threads_.emplace_back([this, lane] { serve(lane); });
      pthread_setname_np(threads_.back().native_handle(), "echo-lane");
    }
  } catch (...) {  // no more threads are to be had
    stop();
    throw;
  }
}

LaneThreads::~LaneThreads() { stop(); }

void LaneThreads::stop() {
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
  std::exception_ptr failure;
  try {
    body(0);
  } catch (...) {
    failure = std::current_exception();
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return busy_ == 0; });
  if (!failure) failure = failure_;
  failure_ = nullptr;
  if (failure) std::rethrow_exception(failure);
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
    std::exception_ptr failure;
    try {
      (*body)(lane);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure && !failure_) failure_ = failure;
    --busy_;
    changed_.notify_all();
  }
}

PeerFabric::~PeerFabric() {
  if (observer_) observer_({.step = Step::kClosing});
}

PeerFabric::Vote PeerFabric::make(const Setup& setup) {
  const Processes& processes = *setup.reports->processes();
  if (std::string reason = processes.obstacle(); !reason.empty()) return {nullptr, reason};
  std::unique_ptr<PeerFabric> fabric(new PeerFabric());
  fabric->processes_ = setup.reports->processes();

  const auto observe = [&](Step step) {
    if (setup.observer) setup.observer({.step = step});
  };
  StoreRounds rounds(setup.store, "peer", setup.rank, setup.size, setup.timeout, *setup.reports);
  const int32_t cores = processes.cores_per_rank();
  fabric->spins_ = cores > 0 ? cpu::kSpins : 0;
  SlabShape shape{.world_size = setup.size, .lanes = std::clamp(cores, 1, kPeerMaxLanes), .slot_bytes = 0};
  cpu::Seal seal{
      .kind = cpu::MemoryKind::kSlab, .group = processes.number(), .rank = setup.rank, .world_size = setup.size};
  std::string obstacle;
  std::optional<cpu::SharedMemory> slab = create_slabs(shape, seal, setup.workspace_bytes, rounds, obstacle);
  if (!slab) return {nullptr, obstacle};
  observe(Step::kCreated);

  const std::vector<std::string> offers = rounds.exchange(cpu::write_handle(slab->handle()));
  std::vector<std::byte*> bases(setup.size);
  fabric->memory_.push_back(std::move(*slab));
  std::string failure;
  try {
    for (int32_t rank = 0; rank < setup.size; ++rank) {
      seal.rank = rank;
      if (rank != setup.rank) fabric->memory_.push_back(open_offer(offers[rank], processes.pid(rank), seal));
      bases[rank] = (rank == setup.rank ? fabric->memory_.front() : fabric->memory_.back()).data();
    }
    observe(Step::kMapped);
    fabric->group_ = std::make_unique<cpu::PeerGroup>(shape, setup.rank, std::move(bases));
    fabric->lanes_ = std::make_unique<LaneThreads>(shape.lanes);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  // Every rank has mapped what it could when this round ends: nobody needs the handles any more. It is the last thing
  // that may fail: from here on peers wait for this rank's tickets, where nobody hears of a failure.
  failure = rounds.exchange_failure(failure);
  for (cpu::SharedMemory& memory : fabric->memory_) memory.close_handle();
  if (!failure.empty()) return {nullptr, failure};
  fabric->observer_ = setup.observer;
  return {std::move(fabric), {}};
}

void PeerFabric::all_reduce(cpu::PeerCall call) {
  call.limits.spins = spins_;
  call.limits.has_exited = [this](int32_t peer) { return processes_->has_exited(peer); };
  const bool complete =
      group_->all_reduce(call, [this](const std::function<void(int32_t)>& body) { lanes_->run(body); }, observer_);
  TORCH_CHECK_WITH(DistBackendError, complete, group_->describe_fault(call));
}

}  // namespace echo::pg
