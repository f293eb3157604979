#include "peer_launch_impl.cuh"

namespace echo::cuda {
ECHO_PEER_KERNELS(, DType::kBFloat16, 4)
}
