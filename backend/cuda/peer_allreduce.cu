#include "peer_allreduce.h"

#include <cuda_runtime.h>

#include "../core/fault_text.h"
#include "../core/walk.h"
#include "host.h"
#include "peer_launch.cuh"
#include "stages.h"
#include "update.h"

namespace echo::cuda {
namespace {

// Calls body<kDType, kBits>().
template <typename Body>
void with_kernels(DType dtype, int32_t bits, Body body) {
  with_dtype(dtype, [&]<DType kDType>() {
    if (bits == 4) return body.template operator()<kDType, 4>();
    body.template operator()<kDType, 8>();
  });
}

// Warps: those of most kernels. One that keeps for its update may have more, but ranks agree on the cut by the plan
// alone.
Walk walk_of(const Plan& plan, const SlabShape& slab, Kind kind) {
  return plan_walk(plan, {.multiprocessors = slab.lanes / kMostPeerBlocks,
                          .lanes = peer_blocks(state_kind(plan), kind),
                          .warps = kPeerWarps,
                          .task = groups_per_task(plan.codec),
                          .fit = groups_that_fit_slot(plan.codec, slab)});
}

}  // namespace

SlabShape peer_shape(int32_t world_size, int32_t multiprocessors, int64_t workspace_bytes) {
  SlabShape shape{.world_size = world_size, .lanes = 0, .push_slots = kDevicePushSlots};
  if (world_size > kMaxPeerDevices) return shape;
  // Where the workspace is too small for so many rings, some multiprocessors go without a lane.
  for (int32_t used = multiprocessors; used > 0 && shape.slot_bytes < kPeerDeviceSmallSlotBytes; --used) {
    shape.lanes = used * kMostPeerBlocks;
    shape.slot_bytes = slot_bytes_for(workspace_bytes, shape, kPeerDeviceSlotBytes);
  }
  return shape;
}

PeerGroup::PeerGroup(SlabShape shape, int32_t rank, std::vector<std::byte*> slabs)
    : shape_(shape), rank_(rank), slabs_(std::move(slabs)), words_(new_pinned<PeerHostWords>()) {
  load_opening_kernels();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int32_t bits : {4, 8}) {
      with_kernels(dtype, bits, []<DType kDType, int kBits>() {
        check(load_peer_kernels<kDType, kBits>(), "loading the kernels of echo");
      });
    }
  }
  check(load_update_kernels(), "loading the kernels of echo");
  const size_t bytes = sizeof(GroupState) + shape.lanes * sizeof(uint64_t);
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  state_ = static_cast<std::byte*>(memory);
  check(clear_memory(state_, bytes), "clearing the counters of a group");
}

PeerGroup::~PeerGroup() {
  // A kernel that a lost peer holds up may still use it; the process keeps it then.
  if (fault().kind == FaultKind::kNone) cudaFree(state_);
}

void PeerGroup::count_from(Counters counters) {
  std::byte* const slab = slabs_[rank_];
  const auto copy = [](void* to, const void* from, size_t bytes) {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "counters of a group");
  };
  // Those of the last tile before: each slot waits for a later one.
  const int64_t flags = flag_offset(shape_, 0, Stage::kPush, 0, 0);
  const auto words = static_cast<size_t>((slots_offset(shape_, 0, 0) - flags) / sizeof(uint64_t));
  const std::vector<uint64_t> tickets(words, ticket_of(static_cast<uint32_t>(counters.tiles - 1), 0));
  copy(slab + flags, tickets.data(), words * sizeof(uint64_t));
  for (int32_t source = 0; source < shape_.world_size; ++source) {
    for (uint64_t before = counters.calls - kCallParities; before != counters.calls; ++before) {
      const uint64_t ticket = ticket_of(static_cast<uint32_t>(before), 0);
      const auto parity = static_cast<int32_t>(before % kCallParities);
      copy(slab + record_ticket_offset(source, parity), &ticket, sizeof(ticket));
    }
  }
  auto* const group = reinterpret_cast<GroupState*>(state_);
  const std::vector<uint64_t> sequences(static_cast<size_t>(shape_.lanes), counters.tiles);
  copy(group + 1, sequences.data(), sequences.size() * sizeof(uint64_t));
  copy(&group->call_number, &counters.calls, sizeof(counters.calls));
}

Counters PeerGroup::counters() const {
  const auto* const group = reinterpret_cast<const GroupState*>(state_);
  Counters counters;
  check(cudaMemcpy(&counters.tiles, group + 1, sizeof(uint64_t), cudaMemcpyDeviceToHost), "counters of a group");
  check(cudaMemcpy(&counters.calls, &group->call_number, sizeof(uint64_t), cudaMemcpyDeviceToHost),
        "counters of a group");
  return counters;
}

void PeerGroup::all_reduce(const PeerCall& call) {
  const Plan& plan = call.site.plan;
  const Kind kind = kind_of(plan, call.rescale);
  const Walk walk = walk_of(plan, shape_, kind);
  auto* group = reinterpret_cast<GroupState*>(state_);
  PeerJob job{.site = call.site,
              .state_layout = make_state_layout(plan),
              .shape = shape_,
              .record = make_call_record(plan, call.direction, 0, call.exact_calls, call.shape),
              .rescale = call.rescale,
              .partial = plan.numel % plan.codec.group_elems != 0,
              .groups = group_count(plan),
              .segment = segment_groups(plan),
              .cut = walk.cut,
              .sure_steps = sure_steps_inside(plan.codec),
              .timeout_ns = static_cast<uint64_t>(call.timeout.count()),
              .group = group,
              .sequences = reinterpret_cast<uint64_t*>(group + 1),
              .words = words_,
              .kept = call.kept,
              .kept_codes = nullptr,
              .kept_params = nullptr,
              .slabs = {}};
  if (call.kept != nullptr) {
    job.kept_codes = call.kept + kept_codes_offset(plan);
    job.kept_params = call.kept + kept_params_offset(plan);
  }
  for (int32_t peer = 0; peer < shape_.world_size; ++peer) job.slabs[peer] = slabs_[peer];
  const auto stream = static_cast<cudaStream_t>(call.stream);
  if (call.rescale) write_record(Call{call.site, nullptr, stream}, job.record, true, &group->record);
  with_kernels(plan.dtype, plan.codec.bits, [&]<DType kDType, int kBits>() {
    launch_peer_kernel<kDType, kBits>(job, kind, static_cast<unsigned>(walk.lanes), stream);
  });
  check(cudaGetLastError(), "echo all_reduce over peer memory");
}

bool PeerGroup::can_keep(const PeerCall& call) { return cuda::can_keep(call.site.plan, call.rescale); }

void PeerGroup::update(const PeerCall& call, void* stream) {
  launch_update(call.site, call.kept, reinterpret_cast<const GroupState*>(state_), static_cast<cudaStream_t>(stream));
}

FaultRecord PeerGroup::fault() const {
  if (__atomic_load_n(&words_->is_set, __ATOMIC_ACQUIRE) == 0) return {};
  return words_->fault;
}

std::string PeerGroup::describe_fault() const {
  return echo::describe_fault(fault(), FaultWitness{.rank = rank_, .mine = words_->mine, .theirs = words_->theirs});
}

void PeerGroup::abort() { __atomic_store_n(&words_->abort, 1u, __ATOMIC_RELEASE); }

void PeerGroup::report_exit(int32_t peer) { __atomic_fetch_or(&words_->exited, uint64_t{1} << peer, __ATOMIC_RELEASE); }

int64_t PeerGroup::wire_bytes(const PeerCall& call) const {
  const Plan& plan = call.site.plan;
  return sent_call_bytes(plan, walk_of(plan, shape_, kind_of(plan, call.rescale)).cut);
}

}  // namespace echo::cuda
