#include "cuda_fabrics.hpp"

#include <c10/util/Exception.h>

#if defined(ECHO_WITH_CUDA)
#include <algorithm>
#include <array>
#include <thread>

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAMacros.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/stages.h"
#include "cuda_fabric.hpp"
#include "store_rounds.hpp"
#endif

namespace echo::pg {

const CudaFabrics::Outcome* CudaFabrics::outcome(c10::Device device) const {
  const std::lock_guard lock(mutex_);
  const auto found = outcomes_.find(device.index());
  return found == outcomes_.end() ? nullptr : &found->second;
}

const std::string* CudaFabrics::code_obstacle(c10::Device device) const {
  const std::lock_guard lock(mutex_);
  const auto found = code_obstacles_.find(device.index());
  return found == code_obstacles_.end() ? nullptr : &found->second;
}

bool CudaFabrics::has_fabric() const { return any_.load(std::memory_order_acquire); }

std::string CudaFabrics::refusal() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [index, outcome] : outcomes_) {
    if (!outcome.reason.empty()) return outcome.reason;
  }
  return {};
}

#if defined(ECHO_WITH_CUDA)

namespace {

// How long the end of a group waits for its calls under way.
constexpr std::chrono::seconds kPatience{5};
constexpr std::chrono::milliseconds kPoll{1};

bool becomes_idle(c10::Device device) {
  // Another thread may record a graph, which must not hear of this one's questions.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!CudaFabrics::order_of(device).is_idle()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

}  // namespace

// Never destroyed: events outlive the CUDA runtime at exit.
StreamOrder& CudaFabrics::order_of(c10::Device device) {
  static auto* const orders = new std::array<StreamOrder, C10_COMPILE_TIME_MAX_GPUS>();
  return orders->at(static_cast<size_t>(device.index()));
}

std::string CudaFabrics::missing_code(c10::Device device) {
  try {
    const c10::cuda::CUDAGuard guard(device);
    const cuda::CaptureTolerance tolerance;
    const std::string why = cuda::missing_code();
    if (why.empty()) return {};
    const int32_t capability = cuda::device_facts(device.index()).compute_capability;
    return c10::str("this build of echo has no kernels for its GPU (compute capability ", capability / 10, ".",
                    capability % 10, "): ", why);
  } catch (const std::exception& error) {  // the peers wait to hear of this rank, whatever it has to say
    return error.what();
  }
}

std::string_view CudaFabrics::vote_on_code(c10::Device device, const Member& member) {
  if (const std::string* known = code_obstacle(device)) return *known;
  StoreRounds rounds(member.store, "code/" + std::to_string(code_obstacles_.size()), member.rank, member.size,
                     member.timeout, *member.reports);
  std::string obstacle = rounds.exchange_failure(missing_code(device));
  const std::lock_guard lock(mutex_);
  return code_obstacles_.emplace(device.index(), std::move(obstacle)).first->second;
}

const CudaFabrics::Outcome& CudaFabrics::vote(c10::Device device, const Config& config, const Member& member) {
  CudaFabric::Setup setup{.store = member.store,
                          .name = "cuda/" + std::to_string(outcomes_.size()),
                          .device = device,
                          .rank = member.rank,
                          .size = member.size,
                          .workspace_bytes = config.workspace_bytes,
                          .allow_shared_gpu = config.allow_shared_gpu,
                          .timeout = member.timeout,
                          .reports = member.reports,
                          .observer = member.observer};
  CudaFabric::Vote vote = CudaFabric::make(setup);
  const std::lock_guard lock(mutex_);
  const Outcome& outcome =
      outcomes_.emplace(device.index(), Outcome{std::move(vote.fabric), std::move(vote.reason)}).first->second;
  if (outcome.fabric) any_.store(true, std::memory_order_release);
  return outcome;
}

wire::Receipt CudaFabrics::all_reduce(CudaFabric& fabric, const wire::Call& call, const c10::Stream& stream,
                                      bool captured) {
  cuda::PeerCall peer_call;
  peer_call.site = wire::site_of(call);
  peer_call.direction = call.direction;
  peer_call.rescale = call.rescale;
  peer_call.exact_calls = call.exact_calls;
  peer_call.shape = wire::shape_of(call);
  // As long as any option may ask for; a group without a limit has more than nanoseconds can count.
  constexpr std::chrono::milliseconds kLongest{100'000'000'000};
  peer_call.timeout = std::min(call.timeout, kLongest);
  peer_call.stream = c10::cuda::CUDAStream(stream).stream();
  std::function<void(Step)> observe;
  if (call.observer) {
    observe = [&](Step step) { call.observer({.step = step, .call_number = call.call_number}); };
  }
  return wire::receipt_for(call.plan, fabric.all_reduce(peer_call, call.state, stream, captured, observe));
}

std::pair<uint64_t, uint64_t> CudaFabrics::counters(const CudaFabric& fabric) {
  const cuda::Counters counters = fabric.counters();
  return {counters.tiles, counters.calls};
}

void CudaFabrics::count_from(CudaFabric& fabric, uint64_t tiles, uint64_t calls) {
  fabric.count_from({.tiles = tiles, .calls = calls});
}

void CudaFabrics::join_update(CudaFabric& fabric, const c10::Stream& stream, bool captured) {
  fabric.join_update(stream, captured);
}

std::string CudaFabrics::fault_text() const {
  if (!has_fabric()) return {};
  const std::lock_guard lock(mutex_);
  for (const auto& [index, outcome] : outcomes_) {
    if (!outcome.fabric) continue;
    if (std::string text = outcome.fabric->fault_text(); !text.empty()) return text;
  }
  return {};
}

void CudaFabrics::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  for (const auto& [index, outcome] : outcomes_) {
    if (outcome.fabric) outcome.fabric->abort(reason);
  }
}

void CudaFabrics::close(bool healthy) {
  std::map<c10::DeviceIndex, Outcome> outcomes;
  {
    const std::lock_guard lock(mutex_);
    outcomes = outcomes_;
  }
  for (const auto& [index, outcome] : outcomes) {
    if (!outcome.fabric) continue;
    outcome.fabric->close(healthy && becomes_idle(c10::Device(c10::kCUDA, index)));
  }
}

int64_t CudaFabrics::slab_bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [index, outcome] : outcomes_) bytes += outcome.fabric ? outcome.fabric->slab_bytes() : 0;
  return bytes;
}

int64_t CudaFabrics::kept_bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [index, outcome] : outcomes_) bytes += outcome.fabric ? outcome.fabric->kept_bytes() : 0;
  return bytes;
}

#else

namespace {

[[noreturn]] void no_cuda() { TORCH_INTERNAL_ASSERT(false, "peer memory of CUDA devices in a build without CUDA"); }

}  // namespace

StreamOrder& CudaFabrics::order_of(c10::Device) { no_cuda(); }
std::string CudaFabrics::missing_code(c10::Device) { no_cuda(); }
std::string_view CudaFabrics::vote_on_code(c10::Device, const Member&) { no_cuda(); }
const CudaFabrics::Outcome& CudaFabrics::vote(c10::Device, const Config&, const Member&) { no_cuda(); }
wire::Receipt CudaFabrics::all_reduce(CudaFabric&, const wire::Call&, const c10::Stream&, bool) { no_cuda(); }
std::pair<uint64_t, uint64_t> CudaFabrics::counters(const CudaFabric&) { no_cuda(); }
void CudaFabrics::count_from(CudaFabric&, uint64_t, uint64_t) { no_cuda(); }
std::string CudaFabrics::fault_text() const { return {}; }
void CudaFabrics::abort(const std::string&) {}
void CudaFabrics::close(bool) {}
void CudaFabrics::join_update(CudaFabric&, const c10::Stream&, bool) { no_cuda(); }
int64_t CudaFabrics::slab_bytes() const { return 0; }
int64_t CudaFabrics::kept_bytes() const { return 0; }

#endif

}  // namespace echo::pg
