// Bodies of peer_launch.cuh, for the sources that instantiate them.
#pragma once

#include "peer_launch.cuh"

namespace echo::cuda {

struct PeerKernel {
  void (*run)(PeerJob) = nullptr;
  int threads = 0;       // of a block
  int shared_bytes = 0;  // that a launch asks for
  int blocks = 0;        // of a multiprocessor, resident at once
};

template <DType kDType, int kBits, StateKind kState, Residual kResidual, int kAverages, bool kPair, Kind kKind>
PeerKernel make_peer_kernel() {
  using Rings = Ahead<kBits, kState, kResidual, kAverages, kKind>;
  return {peer_kernel<kDType, kBits, kState, kResidual, kAverages, kPair, kKind>, kWarpLanes * Rings::kWarps,
          Rings::kWarps * Rings::kRingBytes, peer_blocks(kState, kKind)};
}

// What tells the kernels of an element type and a width of codes apart.
struct KernelChoice {
  StateKind state;
  Residual residual;
  int averages;  // that the kernel updates; 0: see keeps_for_update
  bool pair;     // two ranks
  Kind kind;
};

// Calls body.template operator()<kState, kResidual, kAverages>() for a state that there is.
template <typename Body>
PeerKernel with_state(const KernelChoice& choice, Body body) {
  const auto with_averages = [&]<StateKind kState, Residual kResidual>() {
    if constexpr (kResidual == Residual::kGroup) {
      if (choice.averages == 0) return body.template operator()<kState, kResidual, 0>();
    }
    return choice.averages == 2 ? body.template operator()<kState, kResidual, 2>()
                                : body.template operator()<kState, kResidual, 1>();
  };
  const bool local = choice.residual == Residual::kLocal;
  if (choice.state == StateKind::kInt8) {
    return local ? with_averages.template operator()<StateKind::kInt8, Residual::kLocal>()
                 : with_averages.template operator()<StateKind::kInt8, Residual::kGroup>();
  }
  return local ? with_averages.template operator()<StateKind::kWide, Residual::kLocal>()
               : with_averages.template operator()<StateKind::kWide, Residual::kGroup>();
}

// Null where kind_of never says so.
template <DType kDType, int kBits, Kind kKind, bool kPair>
PeerKernel hot_kernel(const KernelChoice& choice) {
  if constexpr (kDType == DType::kFloat32) {
    return {};
  } else {
    if (choice.state == StateKind::kNone) {
      return make_peer_kernel<kDType, kBits, StateKind::kNone, Residual::kLocal, 1, kPair, kKind>();
    }
    if constexpr (kBits == 8) {
      return {};
    } else {
      return with_state(choice, []<StateKind kState, Residual kResidual, int kAverages>() -> PeerKernel {
        return make_peer_kernel<kDType, kBits, kState, kResidual, kAverages, kPair, kKind>();
      });
    }
  }
}

template <DType kDType, int kBits>
PeerKernel any_kernel(StateKind state) {
  switch (state) {
    case StateKind::kNone:
      return make_peer_kernel<kDType, kBits, StateKind::kNone, Residual::kLocal, 1, false, Kind::kAny>();
    case StateKind::kInt8:
      return make_peer_kernel<kDType, kBits, StateKind::kInt8, Residual::kLocal, 1, false, Kind::kAny>();
    case StateKind::kWide:
      break;
  }
  return make_peer_kernel<kDType, kBits, StateKind::kWide, Residual::kLocal, 1, false, Kind::kAny>();
}

template <DType kDType, int kBits>
PeerKernel kernel_for(const KernelChoice& choice) {
  if (choice.kind == Kind::kAny) return any_kernel<kDType, kBits>(choice.state);
  if (choice.kind == Kind::kHot) {
    return choice.pair ? hot_kernel<kDType, kBits, Kind::kHot, true>(choice)
                       : hot_kernel<kDType, kBits, Kind::kHot, false>(choice);
  }
  return choice.pair ? hot_kernel<kDType, kBits, Kind::kHotRotated, true>(choice)
                     : hot_kernel<kDType, kBits, Kind::kHotRotated, false>(choice);
}

template <DType kDType, int kBits>
void launch_peer_kernel(const PeerJob& job, Kind kind, unsigned blocks, cudaStream_t stream) {
  const Plan& plan = job.site.plan;
  const KernelChoice choice{.state = state_kind(plan),
                            .residual = plan.feedback.residual,
                            .averages = job.kept != nullptr        ? 0
                                        : plan.feedback.k2 != 0.0f ? 2
                                                                   : 1,
                            .pair = plan.world_size == 2,
                            .kind = kind};
  const PeerKernel kernel = kernel_for<kDType, kBits>(choice);
  kernel.run<<<blocks, kernel.threads, kernel.shared_bytes, stream>>>(job);
}

// Loads a kernel. Its blocks get the shared memory that they need to be resident at once, and the rest stays a cache.
inline cudaError_t prepare_peer_kernel(const PeerKernel& kernel) {
  cudaFuncAttributes attributes;
  if (const cudaError_t result = cudaFuncGetAttributes(&attributes, kernel.run)) return result;
  if (kernel.shared_bytes == 0) return cudaSuccess;
  int device = 0;
  int most = 0;
  if (const cudaError_t result = cudaGetDevice(&device)) return result;
  if (const cudaError_t result = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)) {
    return result;
  }
  constexpr int kReservedBytes = 1024;  // by the system, per block
  const int needed =
      kernel.blocks * (kernel.shared_bytes + static_cast<int>(attributes.sharedSizeBytes) + kReservedBytes);
  if (const cudaError_t result =
          cudaFuncSetAttribute(kernel.run, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes)) {
    return result;
  }
  return cudaFuncSetAttribute(kernel.run, cudaFuncAttributePreferredSharedMemoryCarveout,
                              needed < most ? (100 * needed + most - 1) / most : cudaSharedmemCarveoutMaxShared);
}

template <DType kDType, int kBits>
cudaError_t load_peer_kernels() {
  for (const StateKind state : {StateKind::kNone, StateKind::kInt8, StateKind::kWide}) {
    for (const Residual residual : {Residual::kLocal, Residual::kGroup}) {
      for (const Kind kind : {Kind::kAny, Kind::kHot, Kind::kHotRotated}) {
        for (const int averages : {residual == Residual::kGroup ? 0 : 1, 1, 2}) {
          for (const bool pair : {false, true}) {
            const PeerKernel kernel = kernel_for<kDType, kBits>(KernelChoice{state, residual, averages, pair, kind});
            if (kernel.run == nullptr) continue;
            if (const cudaError_t result = prepare_peer_kernel(kernel)) return result;
          }
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace echo::cuda
