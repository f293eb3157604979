// Launches of the peer kernels of one element type and width of codes; a source file for each instantiates them, so
// that compilers work side by side.
#pragma once

#include <cuda_runtime.h>

#include "peer_kernel.cuh"

namespace echo::cuda {

template <DType kDType, int kBits>
void launch_peer_kernel(const PeerJob& job, Kind kind, unsigned blocks, cudaStream_t stream);

// Loads every kernel of the type and width on the current device.
template <DType kDType, int kBits>
cudaError_t load_peer_kernels();

#define ECHO_PEER_KERNELS(prefix, dtype, bits)                                                        \
  prefix template void launch_peer_kernel<dtype, bits>(const PeerJob&, Kind, unsigned, cudaStream_t); \
  prefix template cudaError_t load_peer_kernels<dtype, bits>();

ECHO_PEER_KERNELS(extern, DType::kFloat32, 4)
ECHO_PEER_KERNELS(extern, DType::kFloat32, 8)
ECHO_PEER_KERNELS(extern, DType::kBFloat16, 4)
ECHO_PEER_KERNELS(extern, DType::kBFloat16, 8)
ECHO_PEER_KERNELS(extern, DType::kFloat16, 4)
ECHO_PEER_KERNELS(extern, DType::kFloat16, 8)

}  // namespace echo::cuda
