// Bodies of peer_launch.cuh, for the sources that instantiate them.
#pragma once

#include "peer_launch.cuh"

namespace echo::cuda {

using PeerKernel = void (*)(PeerJob);

template <DType kDType, int kBits, bool kPair>
PeerKernel peer_kernel_for(StateKind state, Residual residual) {
  constexpr Updates kLocal = Updates::kLocal;
  constexpr Updates kGroup = Updates::kGroup;
  const bool local = residual == Residual::kLocal;
  switch (state) {
    case StateKind::kNone:
      return peer_kernel<kDType, kBits, StateKind::kNone, Updates::kEither, kPair>;
    case StateKind::kInt8:
      return local ? peer_kernel<kDType, kBits, StateKind::kInt8, kLocal, kPair>
                   : peer_kernel<kDType, kBits, StateKind::kInt8, kGroup, kPair>;
    case StateKind::kWide:
      break;
  }
  return local ? peer_kernel<kDType, kBits, StateKind::kWide, kLocal, kPair>
               : peer_kernel<kDType, kBits, StateKind::kWide, kGroup, kPair>;
}

template <DType kDType, int kBits>
PeerKernel peer_kernel_for(StateKind state, Residual residual, bool pair) {
  return pair ? peer_kernel_for<kDType, kBits, true>(state, residual)
              : peer_kernel_for<kDType, kBits, false>(state, residual);
}

template <DType kDType, int kBits>
void launch_peer_kernel(const PeerJob& job, unsigned blocks, cudaStream_t stream) {
  const Plan& plan = job.site.plan;
  const PeerKernel kernel =
      peer_kernel_for<kDType, kBits>(state_kind(plan), plan.feedback.residual, plan.world_size == 2);
  kernel<<<blocks, kPeerThreads, 0, stream>>>(job);
}

template <DType kDType, int kBits>
cudaError_t load_peer_kernels() {
  for (const StateKind state : {StateKind::kNone, StateKind::kInt8, StateKind::kWide}) {
    for (const Residual residual : {Residual::kLocal, Residual::kGroup}) {
      for (const bool pair : {false, true}) {
        cudaFuncAttributes attributes;
        const PeerKernel kernel = peer_kernel_for<kDType, kBits>(state, residual, pair);
        if (const cudaError_t result = cudaFuncGetAttributes(&attributes, kernel)) return result;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace echo::cuda
