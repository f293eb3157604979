// Bodies of peer_launch.cuh, for the sources that instantiate them.
#pragma once

#include "peer_launch.cuh"

namespace echo::cuda {

using PeerKernel = void (*)(PeerJob);

// Null where kind_of never says so.
template <DType kDType, int kBits, Kind kKind, bool kPair>
PeerKernel hot_kernel(StateKind state, Residual residual) {
  if constexpr (kDType == DType::kFloat32) {
    return nullptr;
  } else {
    if (state == StateKind::kNone) {
      return peer_kernel<kDType, kBits, StateKind::kNone, Updates::kEither, kPair, kKind>;
    }
    if constexpr (kBits == 8) {
      return nullptr;
    } else {
      const bool local = residual == Residual::kLocal;
      if (state == StateKind::kInt8) {
        return local ? peer_kernel<kDType, kBits, StateKind::kInt8, Updates::kLocal, kPair, kKind>
                     : peer_kernel<kDType, kBits, StateKind::kInt8, Updates::kGroup, kPair, kKind>;
      }
      return local ? peer_kernel<kDType, kBits, StateKind::kWide, Updates::kLocal, kPair, kKind>
                   : peer_kernel<kDType, kBits, StateKind::kWide, Updates::kGroup, kPair, kKind>;
    }
  }
}

template <DType kDType, int kBits>
PeerKernel any_kernel(StateKind state) {
  switch (state) {
    case StateKind::kNone:
      return peer_kernel<kDType, kBits, StateKind::kNone, Updates::kEither, false, Kind::kAny>;
    case StateKind::kInt8:
      return peer_kernel<kDType, kBits, StateKind::kInt8, Updates::kEither, false, Kind::kAny>;
    case StateKind::kWide:
      break;
  }
  return peer_kernel<kDType, kBits, StateKind::kWide, Updates::kEither, false, Kind::kAny>;
}

template <DType kDType, int kBits>
PeerKernel kernel_for(StateKind state, Residual residual, Kind kind, bool pair) {
  if (kind == Kind::kAny) return any_kernel<kDType, kBits>(state);
  if (kind == Kind::kHot) {
    return pair ? hot_kernel<kDType, kBits, Kind::kHot, true>(state, residual)
                : hot_kernel<kDType, kBits, Kind::kHot, false>(state, residual);
  }
  return pair ? hot_kernel<kDType, kBits, Kind::kHotRotated, true>(state, residual)
              : hot_kernel<kDType, kBits, Kind::kHotRotated, false>(state, residual);
}

template <DType kDType, int kBits>
void launch_peer_kernel(const PeerJob& job, Kind kind, unsigned blocks, cudaStream_t stream) {
  const Plan& plan = job.site.plan;
  kernel_for<kDType, kBits>(state_kind(plan), plan.feedback.residual, kind,
                            plan.world_size == 2)<<<blocks, kPeerThreads, 0, stream>>>(job);
}

template <DType kDType, int kBits>
cudaError_t load_peer_kernels() {
  for (const StateKind state : {StateKind::kNone, StateKind::kInt8, StateKind::kWide}) {
    for (const Residual residual : {Residual::kLocal, Residual::kGroup}) {
      for (const Kind kind : {Kind::kAny, Kind::kHot, Kind::kHotRotated}) {
        for (const bool pair : {false, true}) {
          const PeerKernel kernel = kernel_for<kDType, kBits>(state, residual, kind, pair);
          if (kernel == nullptr) continue;
          cudaFuncAttributes attributes;
          if (const cudaError_t result = cudaFuncGetAttributes(&attributes, kernel)) return result;
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace echo::cuda
