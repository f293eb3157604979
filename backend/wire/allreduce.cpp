// Phases, as in every composition: agree, then per tile push, reduce, gather, tail, with tiles in different phases at a
// time.
//
//   step t:   push(t)      encode, start the all-to-all of tile t
//             reduce(t-d)  its copies have arrived: sum, encode, start the all-gather
//             tail(t-2d)   its codes have arrived: decode
//
// Slot t % (2d+1) of the ring is reused by tile t+2d+1, whose push comes after tail(t). All ranks start the same
// exchanges in the same order, which is all that an inner backend which matches by call order needs.
#include "allreduce.h"

#include <array>
#include <limits>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "../core/tuning.h"
#include "cpu_device.h"
#if defined(ECHO_WITH_CUDA)
#include "cuda_device.h"
#endif

namespace echo::wire {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Slot {
  at::Tensor sent;      // P tiles: what this rank pushes to each owner; its own place is never read by anybody
  at::Tensor received;  // P tiles: what each rank pushed to this owner
  at::Tensor reduced;   // 1 tile: the code of this owner's sum
  at::Tensor gathered;  // P tiles: the code of every owner's sum
  WorkPtr exchange;
  WorkPtr gather;
};

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

// The inner exchanges of one call, with its time limit.
class Exchanges {
 public:
  Exchanges(c10d::Backend& inner, std::chrono::milliseconds timeout) : inner_(inner), timeout_(timeout) {}

  WorkPtr all_to_all(at::Tensor& output, at::Tensor& input) {
    c10d::AllToAllOptions options;
    if (timeout_.count() > 0) options.timeout = timeout_;
    std::vector<int64_t> even;
    return inner_.alltoall_base(output, input, even, even, options);
  }

  WorkPtr all_gather(at::Tensor& output, at::Tensor& input) {
    c10d::AllgatherOptions options;
    if (timeout_.count() > 0) options.timeout = timeout_;
    return inner_._allgather_base(output, input, options);
  }

 private:
  c10d::Backend& inner_;
  std::chrono::milliseconds timeout_;
};

// Cuts the ring out of one buffer, which the workspace keeps if it is large enough.
std::array<Slot, kRingSlots> make_ring(const Plan& plan, int64_t tile_groups, const at::TensorOptions& options,
                                       Workspace& workspace) {
  const int64_t bytes = tile_bytes(plan.codec, tile_groups);
  const int64_t needed = kRingSlots * wire_slot_bytes(plan, tile_groups);
  const bool keep = options.device().is_cpu();
  at::Tensor buffer = workspace.bytes;
  if (!keep || !buffer.defined() || buffer.numel() < needed) buffer = at::empty({needed}, options);
  if (keep) workspace.bytes = buffer;

  int64_t offset = 0;
  const auto cut = [&](int64_t tiles) {
    offset += tiles * bytes;
    return buffer.narrow(0, offset - tiles * bytes, tiles * bytes);
  };
  std::array<Slot, kRingSlots> ring;
  for (Slot& slot : ring) {
    slot.sent = cut(plan.world_size);
    slot.received = cut(plan.world_size);
    slot.gathered = cut(plan.world_size);
    slot.reduced = cut(1);
  }
  return ring;
}

// Buffers of a last, shorter tile are the front of the slot's.
at::Tensor front(const at::Tensor& buffer, int64_t bytes) { return buffer.narrow(0, 0, bytes); }

template <typename Device>
class Composition {
 public:
  Composition(const Call& call, c10d::Backend& inner, Device& device)
      : call_(call),
        plan_(call.plan),
        device_(device),
        exchanges_(inner, call.timeout),
        bytes_options_(call.tensor.options().dtype(at::kByte)),
        tile_groups_(wire_tile_groups(call.plan, Device::kTileElems, call.workspace_bytes)),
        tiles_(ceil_div(segment_groups(call.plan), tile_groups_)) {}

  void agree() {
    observe(Step::kBegun, 0);
    const auto record_bytes = static_cast<int64_t>(sizeof(CallRecord));
    record_ = at::empty({record_bytes}, bytes_options_);
    records_ = at::empty({plan_.world_size * record_bytes}, bytes_options_);
    const CallRecord record =
        make_call_record(plan_, call_.direction, call_.call_number, call_.exact_calls, shape_of(call_));
    device_.write_record(record, call_.rescale, bytes_of(record_));
    wait(*exchanges_.all_gather(records_, record_));
    awaited_ = Awaited::kNothing;
    device_.open_call(bytes_of(records_));
  }

  void run(Workspace& workspace) {
    ring_ = make_ring(plan_, tile_groups_, bytes_options_, workspace);
    for (int64_t step = 0; step < tiles_ + 2 * kLookAhead; ++step) {
      if (step < tiles_) push(step);
      if (step >= kLookAhead && step - kLookAhead < tiles_) reduce(step - kLookAhead);
      if (step >= 2 * kLookAhead) tail(step - 2 * kLookAhead);
    }
    observe(Step::kEnded, 0);
  }

  int64_t tile_groups() const { return tile_groups_; }

  // What the call is waiting for, for the error that ends it; empty while it works by itself.
  std::string awaited() const {
    const std::string tile = "tile " + std::to_string(tile_) + " of " + std::to_string(tiles_);
    switch (awaited_) {
      case Awaited::kNothing:
        return {};
      case Awaited::kRecords:
        return "the ranks' descriptions of this call";
      case Awaited::kPushed:
        return "the codes of all ranks for " + tile;
      case Awaited::kGathered:
        return "the sums of all ranks for " + tile;
    }
    return {};
  }

 private:
  enum class Awaited : uint8_t { kNothing, kRecords, kPushed, kGathered };

  void observe(Step step, int64_t tile) const {
    if (call_.observer) call_.observer({.step = step, .call_number = call_.call_number, .lane = 0, .tile = tile});
  }

  bool wait(c10d::Work& work) const {
    if (!call_.wait) return work.wait();
    call_.wait(work);
    return true;
  }

  // Calls body(), which is for `what` of a tile; if it throws, awaited() says so.
  template <typename Body>
  auto waiting_for(Awaited what, int64_t tile, Body body) {
    awaited_ = what;
    tile_ = tile;
    auto result = body();
    awaited_ = Awaited::kNothing;
    return result;
  }

  // Groups that tile `tile` has room for; fewer in the last one.
  int64_t room(int64_t tile) const { return min_i64(tile_groups_, segment_groups(plan_) - tile * tile_groups_); }
  GroupRange range(int32_t owner, int64_t tile) const { return tile_range(plan_, owner, tile, tile_groups_); }
  Slot& slot(int64_t tile) { return ring_[tile % kRingSlots]; }

  void push(int64_t tile) {
    Slot& at = slot(tile);
    const int64_t bytes = tile_bytes(plan_.codec, room(tile));
    for (int32_t step = 1; step < plan_.world_size; ++step) {
      const int32_t owner = (plan_.rank + step) % plan_.world_size;
      device_.push(range(owner, tile), room(tile), bytes_of(at.sent) + owner * bytes);
    }
    at::Tensor input = front(at.sent, plan_.world_size * bytes);
    at::Tensor output = front(at.received, plan_.world_size * bytes);
    at.exchange = waiting_for(Awaited::kPushed, tile, [&] { return exchanges_.all_to_all(output, input); });
    observe(Step::kPushed, tile);
  }

  void reduce(int64_t tile) {
    Slot& at = slot(tile);
    const int64_t bytes = tile_bytes(plan_.codec, room(tile));
    waiting_for(Awaited::kPushed, tile, [&] { return wait(*at.exchange); });
    std::vector<const std::byte*> peer_tiles(plan_.world_size);
    for (int32_t rank = 0; rank < plan_.world_size; ++rank) peer_tiles[rank] = bytes_of(at.received) + rank * bytes;
    device_.reduce(range(plan_.rank, tile), room(tile), peer_tiles.data(), bytes_of(at.reduced));
    observe(Step::kReduced, tile);
    gather(tile, bytes);
  }

  void gather(int64_t tile, int64_t bytes) {
    Slot& at = slot(tile);
    at::Tensor input = front(at.reduced, bytes);
    at::Tensor output = front(at.gathered, plan_.world_size * bytes);
    at.gather = waiting_for(Awaited::kGathered, tile, [&] { return exchanges_.all_gather(output, input); });
  }

  void tail(int64_t tile) {
    Slot& at = slot(tile);
    const int64_t bytes = tile_bytes(plan_.codec, room(tile));
    waiting_for(Awaited::kGathered, tile, [&] { return wait(*at.gather); });
    observe(Step::kGatherSeen, tile);
    for (int32_t owner = 0; owner < plan_.world_size; ++owner) {
      device_.tail(range(owner, tile), room(tile), bytes_of(at.gathered) + owner * bytes);
    }
    observe(Step::kUpdated, tile);
  }

  const Call& call_;
  const Plan& plan_;
  Device& device_;
  Exchanges exchanges_;
  at::TensorOptions bytes_options_;
  int64_t tile_groups_;
  int64_t tiles_;
  at::Tensor record_;
  at::Tensor records_;
  std::array<Slot, kRingSlots> ring_;
  Awaited awaited_ = Awaited::kRecords;
  int64_t tile_ = 0;
};

// The inner backend says what failed, but not what it was for.
[[noreturn]] void fail_waiting(const std::string& awaited, const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const char* const cause = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  TORCH_CHECK_WITH(DistBackendError, false, "waiting for ", awaited, ": ", cause);
}

template <typename Device>
Receipt compose(const Call& call, c10d::Backend& inner, Workspace& workspace, Device device) {
  Composition<Device> composition(call, inner, device);
  try {
    composition.agree();
  } catch (const std::exception& error) {
    if (composition.awaited().empty()) throw;  // says what the ranks disagree on
    fail_waiting(composition.awaited(), error);
  }
  try {
    composition.run(workspace);
  } catch (const std::exception& error) {
    call.tensor.fill_(std::numeric_limits<double>::quiet_NaN());
    if (composition.awaited().empty()) throw;  // its own: no memory, for one
    fail_waiting(composition.awaited(), error);
  }
  return expected_bytes(call.plan, composition.tile_groups());
}

}  // namespace

Receipt receipt_for(const Plan& plan, int64_t sent) {
  return Receipt{.wire_bytes = sent, .padding_bytes = sent - ideal_wire_bytes(plan)};
}

CallShape shape_of(const Call& call) { return echo::shape_of(call.tensor.sizes().data(), call.tensor.sizes().size()); }

Site site_of(const Call& call) {
  Site site;
  site.plan = call.plan;
  site.tensor = call.tensor.data_ptr();
  site.state = call.state.defined() ? call.state.data_ptr() : nullptr;
  return site;
}

Receipt expected_bytes(const Plan& plan, int64_t tile_groups) {
  return receipt_for(plan, sent_call_bytes(plan, equal_tiles(plan, tile_groups)));
}

Receipt all_reduce(const Call& call, c10d::Backend& inner, Workspace& workspace) {
  const Site site = site_of(call);
#if defined(ECHO_WITH_CUDA)
  if (call.tensor.is_cuda()) return compose(call, inner, workspace, CudaDevice(site, call.tensor, call.disagreement));
#endif
  TORCH_INTERNAL_ASSERT(call.tensor.is_cpu(), "echo was built without stages for ", call.tensor.device());
  return compose(call, inner, workspace, CpuDevice(site));
}

}  // namespace echo::wire
