// The update of the averages of residual "group" as a kernel of its own, after the call that kept what it needs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "../core/site.h"

namespace echo::cuda {

struct GroupState;

// True for calls that can keep what their update needs: their kernels have quick loops, and averages to update from the
// result. The same bytes either way.
bool can_keep(const Plan& plan, bool rescale);

// Enqueues the update of site.state from `kept`, kept_bytes(site.plan) bytes, which the call wrote; site.tensor is not
// looked at. Does nothing if the group has failed by then. Pre: can_keep. Throws std::runtime_error where CUDA refuses
// the launch.
void launch_update(const Site& site, std::byte* kept, const GroupState* group, cudaStream_t stream);

// Loads the kernels on the current device.
cudaError_t load_update_kernels();

}  // namespace echo::cuda
