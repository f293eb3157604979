#if defined(ECHO_WITH_CUDA)

#include "cuda_fabric.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include "../core/tuning.h"
#include "cuda_vote.hpp"
#include "store_rounds.hpp"

namespace echo::pg {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTrialLimit{10'000};
constexpr milliseconds kWatchPeriod{250};
constexpr milliseconds kLeavePatience{5'000};
constexpr milliseconds kUpdatePatience{1'000};
constexpr milliseconds kLeavePoll{1};

// What `step` returns, or else the text of what it throws.
template <typename Step>
std::string text_of(Step step) {
  try {
    return step();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

CudaFabric::CudaFabric(const Setup& setup)
    : device_(setup.device),
      rank_(setup.rank),
      slabs_(setup.size),
      processes_(setup.reports->processes()),
      observer_(setup.observer),
      update_(setup.device) {}

CudaFabric::~CudaFabric() {
  stop_watch();
  // Only close() knows that no kernel runs: what it has not taken stays, and a graph replayed later finds its words.
  group_.release();
}

CudaFabric::Vote CudaFabric::make(const Setup& setup) {
  const c10::cuda::CUDAGuard guard(setup.device);
  const cuda::CaptureTolerance tolerance;
  StoreRounds rounds(setup.store, setup.name, setup.rank, setup.size, setup.timeout, *setup.reports);
  std::vector<cuda_vote::Introduction> ranks;
  for (const std::string& text :
       rounds.exchange(text_of([&] { return cuda_vote::write_introduction(setup.device); }))) {
    ranks.push_back(cuda_vote::read_introduction(text));
  }
  if (std::string reason = cuda_vote::objection(*setup.reports->processes(), ranks, setup.allow_shared_gpu);
      !reason.empty())
    return {nullptr, reason};

  int32_t multiprocessors = ranks[0].device.multiprocessors;
  for (const cuda_vote::Introduction& it : ranks)
    multiprocessors = std::min(multiprocessors, it.device.multiprocessors);
  std::shared_ptr<CudaFabric> fabric(new CudaFabric(setup));
  fabric->shape_ = cuda::peer_shape(setup.size, multiprocessors, setup.workspace_bytes);
  if (fabric->shape_.slot_bytes == 0) {
    return {nullptr, "kernels over peer memory serve no group of " + std::to_string(setup.size) +
                         " ranks within workspace_bytes=" + std::to_string(setup.workspace_bytes)};
  }
  std::string unreachable = text_of([&]() -> std::string {
    for (int32_t peer = 0; peer < setup.size; ++peer) {
      if (cuda::may_access(setup.device.index(), ranks[peer].device.uuid)) continue;
      return "its GPU cannot access the memory of that of rank " + std::to_string(peer);
    }
    return {};
  });
  if (std::string reason = rounds.exchange_failure(unreachable); !reason.empty()) return {nullptr, reason};

  if (std::string reason = fabric->open_together(rounds); !reason.empty()) return {nullptr, reason};
  fabric->watcher_ = std::thread([fabric = fabric.get()] { fabric->watch(); });
  pthread_setname_np(fabric->watcher_.native_handle(), "echo-watch");
  return {std::move(fabric), {}};
}

// From here on ranks hold memory of each other, and a failure of one is one of all: whatever was made is given back.
std::string CudaFabric::open_together(StoreRounds& rounds) {
  const std::vector<std::string> offers = rounds.exchange(text_of([&] { return offer(); }));
  std::vector<std::string> failures = offers;
  for (std::string& text : failures) {
    if (text.starts_with(cuda_vote::kGoodMark)) text.clear();
  }
  if (std::string reason = StoreRounds::first_failure(failures); !reason.empty()) {
    slabs_[rank_].release();  // no peer has opened it
    return reason;
  }

  std::string reason = rounds.exchange_failure(text_of([&] { return map_peers(offers); }));
  board_.close_handle();
  bool slabs_in_use = false;
  if (reason.empty()) {
    std::unique_ptr<cuda::PeerTrial> trial;
    const auto attempt = [&](auto step) {
      return rounds.exchange_failure(text_of([&]() -> std::string {
        if (!trial) trial = std::make_unique<cuda::PeerTrial>();
        slabs_in_use = true;
        std::string failure = step(*trial);
        slabs_in_use = !trial->finish(milliseconds(0));
        return failure;
      }));
    };
    reason = attempt([&](cuda::PeerTrial& it) { return try_writes(it); });
    if (reason.empty()) reason = attempt([&](cuda::PeerTrial& it) { return try_reads(it); });
  }
  if (reason.empty()) reason = rounds.exchange_failure(text_of([&] { return make_group(); }));
  if (!reason.empty()) close_together(rounds, slabs_in_use);
  return reason;
}

std::string CudaFabric::offer() {
  slabs_[rank_] = cuda::PeerSlab::create(slab_bytes());
  if (observer_) observer_({.step = Step::kCreated});
  board_ = NoticeBoard(rank_, shape_.world_size, processes_->number());
  return cuda_vote::write_offer(slabs_[rank_].handle(), board_.handle());
}

std::string CudaFabric::map_peers(const std::vector<std::string>& offers) {
  std::vector<cuda::MemoryHandle> slabs;
  std::vector<cpu::MemoryHandle> boards;
  for (int32_t peer = 0; peer < static_cast<int32_t>(offers.size()); ++peer) {
    const cuda_vote::Offer offer = cuda_vote::read_offer(offers[peer], processes_->pid(peer));
    slabs.push_back(offer.slab);
    boards.push_back(offer.board);
  }
  board_.open(boards);
  for (int32_t peer = 0; peer < static_cast<int32_t>(offers.size()); ++peer) {
    if (peer == rank_) continue;
    slabs_[peer] = cuda::PeerSlab::open(slabs[peer]);
  }
  if (observer_) observer_({.step = Step::kMapped});
  return {};
}

std::string CudaFabric::try_writes(cuda::PeerTrial& trial) {
  for (int32_t peer = 0; peer < shape_.world_size; ++peer) trial.write(slabs_[peer].data(), rank_, peer);
  return trial.finish(kTrialLimit) ? "" : "a trial write to the memory of peers did not end";
}

std::string CudaFabric::try_reads(cuda::PeerTrial& trial) {
  for (int32_t source = 0; source < shape_.world_size; ++source) trial.verify(slabs_[rank_].data(), source, rank_);
  trial.clear(slabs_[rank_].data(), shape_.world_size);
  if (!trial.finish(kTrialLimit)) return "a trial read of its own peer memory did not end";
  const int64_t wrong = trial.wrong_words();
  return wrong == 0 ? "" : std::to_string(wrong) + " words that peers wrote to its memory did not arrive";
}

std::string CudaFabric::make_group() {
  std::vector<std::byte*> bases;
  for (const cuda::PeerSlab& slab : slabs_) bases.push_back(slab.data());
  group_ = std::make_unique<cuda::PeerGroup>(shape_, rank_, std::move(bases));
  return {};
}

void CudaFabric::unmap_peers() {
  for (int32_t peer = 0; peer < shape_.world_size; ++peer) {
    if (peer != rank_) slabs_[peer].release();
  }
}

// Memory that a rank still writes to stays on all ranks.
void CudaFabric::close_together(StoreRounds& rounds, bool slabs_in_use) {
  if (!slabs_in_use) {
    group_.reset();
    unmap_peers();
  }
  const std::string in_use = rounds.exchange_failure(slabs_in_use ? "in use" : "");
  if (in_use.empty()) slabs_[rank_].release();
}

int64_t CudaFabric::all_reduce(cuda::PeerCall call, const at::Tensor& state, const c10::Stream& stream, bool captured,
                               const std::function<void(Step)>& observe) {
  const c10::cuda::CUDAGuard guard(device_);
  const std::shared_lock lock(group_mutex_);
  TORCH_CHECK_WITH(DistBackendError, group_, "the group has been destroyed");
  const uint64_t exact_calls = call.exact_calls;
  call.exact_calls -= exact_calls_;
  captured_ = captured_ || captured;
  // A recording must end with all streams joined again, and a call does not know whether it is the last: there the
  // update is the call's own. So it is from then on, since a replay does not wait for an update on another stream.
  const Plan& plan = call.site.plan;
  const bool large = plan.numel * dtype_bytes(plan.dtype) >= kDeferredUpdateBytes;
  if (large && !captured_ && cuda::PeerGroup::can_keep(call)) {
    call.kept = update_.keep(echo::kept_bytes(plan), stream);
    kept_bytes_ = update_.bytes();
  }
  if (observe) observe(Step::kBegun);
  group_->all_reduce(call);
  if (observe) observe(Step::kLaunched);
  exact_calls_ = exact_calls;
  if (call.kept != nullptr) {
    update_.run(stream, state,
                [&](const c10::Stream& own) { group_->update(call, c10::cuda::CUDAStream(own).stream()); });
    if (observe) observe(Step::kUpdated);
  }
  if (observe) observe(Step::kEnded);
  return group_->wire_bytes(call);
}

void CudaFabric::join_update(const c10::Stream& stream, bool captured) {
  if (!captured) return update_.join(stream, false);
  const cuda::CaptureTolerance tolerance;
  update_.join(stream, true);
}

void CudaFabric::count_from(cuda::Counters counters) {
  const c10::cuda::CUDAGuard guard(device_);
  const std::shared_lock lock(group_mutex_);
  TORCH_CHECK_WITH(DistBackendError, group_, "the group has been destroyed");
  group_->count_from(counters);
}

cuda::Counters CudaFabric::counters() const {
  const c10::cuda::CUDAGuard guard(device_);
  const std::shared_lock lock(group_mutex_);
  TORCH_CHECK_WITH(DistBackendError, group_, "the group has been destroyed");
  return group_->counters();
}

std::string CudaFabric::fault_text() const {
  const std::shared_lock lock(group_mutex_);
  const FaultKind kind = group_ ? group_->fault().kind : FaultKind::kNone;
  // Where a peer has given up, kernels here only know that they were told to stop.
  if (kind == FaultKind::kNone || kind == FaultKind::kAborted) {
    const std::string reason = board_.peers_reason();
    if (!reason.empty())
      return (kind == FaultKind::kNone ? "a peer reports, " : "waiting for the others, told to stop by ") + reason;
  }
  return kind == FaultKind::kNone ? std::string() : group_->describe_fault();
}

void CudaFabric::abort(const std::string& reason) {
  board_.give_up(reason);
  const std::shared_lock lock(group_mutex_);
  if (group_) group_->abort();
}

void CudaFabric::watch() {
  std::vector<bool> reported(slabs_.size());
  std::unique_lock lock(watch_mutex_);
  while (!watch_ends_.wait_for(lock, kWatchPeriod, [&] { return stopping_; })) {
    for (int32_t peer = 0; peer < shape_.world_size; ++peer) {
      if (peer == rank_ || reported[peer] || !processes_->has_exited(peer)) continue;
      reported[peer] = true;
      group_->report_exit(peer);
    }
    if (!board_.peers_reason().empty()) {
      group_->abort();
      return;
    }
  }
}

void CudaFabric::stop_watch() {
  {
    const std::lock_guard lock(watch_mutex_);
    stopping_ = true;
    watch_ends_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
}

void CudaFabric::close(bool calls_done) {
  stop_watch();
  const c10::cuda::CUDAGuard guard(device_);
  const cuda::CaptureTolerance tolerance;
  {
    const std::unique_lock lock(group_mutex_);
    // A graph may be replayed after the group has gone: it must find the memory, and the word that sends it away.
    if (captured_) group_->abort();
    if (captured_ || !calls_done || !update_.ends_within(kUpdatePatience)) {
      board_.leave(NoticeBoard::Leaving::kKept);
      return;
    }
    group_.reset();
  }
  unmap_peers();
  board_.leave(NoticeBoard::Leaving::kUnmapped);
  const auto deadline = std::chrono::steady_clock::now() + kLeavePatience;
  for (int32_t peer = 0; peer < shape_.world_size; ++peer) {
    while (peer != rank_ && board_.leaving(peer) != NoticeBoard::Leaving::kUnmapped && !processes_->has_exited(peer)) {
      const bool kept = board_.leaving(peer) == NoticeBoard::Leaving::kKept;
      if (kept || std::chrono::steady_clock::now() >= deadline) return;
      std::this_thread::sleep_for(kLeavePoll);
    }
  }
  slabs_[rank_].release();
}

}  // namespace echo::pg

#endif  // defined(ECHO_WITH_CUDA)
