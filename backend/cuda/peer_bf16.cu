#include "peer_launch_impl.cuh"

namespace echo::cuda {
template void launch_peer_kernel<DType::kBFloat16>(const PeerJob&, const KernelShape&, unsigned, cudaStream_t);
template cudaError_t load_peer_kernels<DType::kBFloat16>();
}  // namespace echo::cuda
