// The stages for tensors in CUDA memory, under the names that the composition calls. Nothing blocks: everything is
// enqueued on the stream that was current when the object was made, and whether the ranks agreed is known to the host
// only later (cuda::read_disagreement).
#pragma once

#if !defined(ECHO_WITH_CUDA)
#error "cuda_device.h belongs to builds with CUDA"
#endif

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../core/call_record.h"
#include "../core/tuning.h"
#include "../cuda/stages.h"

namespace echo::wire {

class CudaDevice {
 public:
  // `disagreement` is the group's (cuda::create_disagreement); once it is set, every later call of the group delivers
  // NaN.
  CudaDevice(const Site& site, const at::Tensor& tensor, cuda::Disagreement* disagreement)
      : device_(tensor.device()),
        disagreement_(disagreement),
        agreed_(at::empty({static_cast<int64_t>(sizeof(cuda::CallState))}, tensor.options().dtype(at::kByte))),
        call_{site, agreed(), c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream()} {}

  static constexpr int64_t kTileElems = kWireTileElemsCuda;

  // Completes this rank's record with max|x| if a rescale is asked for, and writes it to `out`, sizeof(CallRecord)
  // bytes.
  void write_record(const CallRecord& record, bool rescale, std::byte* out) {
    const c10::cuda::CUDAGuard guard(device_);
    cuda::write_record(call_, record, rescale, reinterpret_cast<CallRecord*>(out));
  }

  // Pre: all records have arrived. Post: the stages below know the rescale, or that the ranks disagree and the result
  // is NaN.
  void open_call(const std::byte* records) {
    const c10::cuda::CUDAGuard guard(device_);
    cuda::open_call(call_, reinterpret_cast<const CallRecord*>(records), agreed(), disagreement_);
  }

  void push(GroupRange groups, int64_t tile_groups, std::byte* tile) {
    const c10::cuda::CUDAGuard guard(device_);
    cuda::push(call_, groups, tile_groups, tile);
  }

  // Pre: the copies lie at equal distances, in rank order.
  void reduce(GroupRange groups, int64_t tile_groups, const std::byte* const* peer_tiles, std::byte* tile) {
    const int64_t stride_bytes = peer_tiles[1] - peer_tiles[0];
    for (int32_t rank = 2; rank < call_.site.plan.world_size; ++rank) {
      TORCH_INTERNAL_ASSERT(peer_tiles[rank] - peer_tiles[rank - 1] == stride_bytes);
    }
    const c10::cuda::CUDAGuard guard(device_);
    cuda::reduce(call_, groups, tile_groups, cuda::PeerTiles{peer_tiles[0], stride_bytes}, tile);
  }

  void tail(GroupRange groups, int64_t tile_groups, const std::byte* tile) {
    const c10::cuda::CUDAGuard guard(device_);
    cuda::tail(call_, groups, tile_groups, tile);
  }

 private:
  cuda::CallState* agreed() const { return reinterpret_cast<cuda::CallState*>(agreed_.data_ptr()); }

  c10::Device device_;
  cuda::Disagreement* disagreement_;
  at::Tensor agreed_;  // one CallState, on the device
  cuda::Call call_;
};

}  // namespace echo::wire
