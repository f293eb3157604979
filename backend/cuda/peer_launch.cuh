// Launches of the peer kernels of one element type; a source file per type instantiates them, so that compilers work
// side by side.
#pragma once

#include <cuda_runtime.h>

#include "peer_kernel.cuh"

namespace echo::cuda {

// Which kernel serves a plan on this rank, and how many of its blocks a multiprocessor holds.
struct KernelShape {
  int32_t bits = 4;
  StateKind state = StateKind::kNone;
  bool late = false;  // this rank is none of the first two
  int32_t groups_per_task = 1;
  int32_t blocks_per_multiprocessor = 1;
};

template <DType kDType>
void launch_peer_kernel(const PeerJob& job, const KernelShape& shape, unsigned blocks, cudaStream_t stream);

// Loads every kernel of the type on the current device.
template <DType kDType>
cudaError_t load_peer_kernels();

extern template void launch_peer_kernel<DType::kFloat32>(const PeerJob&, const KernelShape&, unsigned, cudaStream_t);
extern template void launch_peer_kernel<DType::kBFloat16>(const PeerJob&, const KernelShape&, unsigned, cudaStream_t);
extern template void launch_peer_kernel<DType::kFloat16>(const PeerJob&, const KernelShape&, unsigned, cudaStream_t);
extern template cudaError_t load_peer_kernels<DType::kFloat32>();
extern template cudaError_t load_peer_kernels<DType::kBFloat16>();
extern template cudaError_t load_peer_kernels<DType::kFloat16>();

}  // namespace echo::cuda
