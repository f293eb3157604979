// Bodies of peer_launch.cuh, for the sources that instantiate them.
#pragma once

#include "peer_launch.cuh"

namespace echo::cuda {

using PeerKernel = void (*)(PeerJob);

template <DType kDType, int kBits, StateKind kState>
PeerKernel peer_kernel_of(bool late) {
  return late ? peer_kernel<kDType, kBits, kState, true> : peer_kernel<kDType, kBits, kState, false>;
}

template <DType kDType, int kBits>
PeerKernel peer_kernel_of(StateKind state, bool late) {
  switch (state) {
    case StateKind::kInt8:
      return peer_kernel_of<kDType, kBits, StateKind::kInt8>(late);
    case StateKind::kWide:
      return peer_kernel_of<kDType, kBits, StateKind::kWide>(late);
    default:
      return peer_kernel_of<kDType, kBits, StateKind::kNone>(late);
  }
}

template <DType kDType>
PeerKernel peer_kernel_of(const KernelShape& shape) {
  return shape.bits == 8 ? peer_kernel_of<kDType, 8>(shape.state, shape.late)
                         : peer_kernel_of<kDType, 4>(shape.state, shape.late);
}

template <DType kDType>
void launch_peer_kernel(const PeerJob& job, const KernelShape& shape, unsigned blocks, cudaStream_t stream) {
  peer_kernel_of<kDType>(shape)<<<blocks, kPeerThreads, 0, stream>>>(job);
}

template <DType kDType>
cudaError_t load_peer_kernels() {
  cudaFuncAttributes attributes;
  for (const int bits : {4, 8}) {
    for (const StateKind state : {StateKind::kNone, StateKind::kInt8, StateKind::kWide}) {
      for (const bool late : {false, true}) {
        const KernelShape shape{.bits = bits, .state = state, .late = late};
        const cudaError_t result = cudaFuncGetAttributes(&attributes, peer_kernel_of<kDType>(shape));
        if (result != cudaSuccess) return result;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace echo::cuda
