// Bodies of peer_launch.cuh, for the sources that instantiate them.
#pragma once

#include "peer_launch.cuh"

namespace echo::cuda {

template <DType kDType>
void launch_peer_kernel(const PeerJob& job, const KernelShape& shape, unsigned blocks, cudaStream_t stream) {
  if (shape.elems_per_lane == 32) {
    if (shape.feedback) {
      peer_kernel<kDType, 32, true><<<blocks, kPeerThreads, 0, stream>>>(job);
    } else {
      peer_kernel<kDType, 32, false><<<blocks, kPeerThreads, 0, stream>>>(job);
    }
  } else if (shape.feedback) {
    peer_kernel<kDType, 16, true><<<blocks, kPeerThreads, 0, stream>>>(job);
  } else {
    peer_kernel<kDType, 16, false><<<blocks, kPeerThreads, 0, stream>>>(job);
  }
}

template <DType kDType>
cudaError_t load_peer_kernels() {
  cudaFuncAttributes attributes;
  for (auto* kernel : {peer_kernel<kDType, 16, false>, peer_kernel<kDType, 16, true>, peer_kernel<kDType, 32, false>,
                       peer_kernel<kDType, 32, true>}) {
    const cudaError_t result = cudaFuncGetAttributes(&attributes, kernel);
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

}  // namespace echo::cuda
