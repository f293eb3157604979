#include "device_fault.hpp"

#if defined(ECHO_WITH_CUDA)
#include "../cuda/stages.h"
#endif

namespace echo::pg {

cuda::Disagreement* DeviceFault::word() {
#if defined(ECHO_WITH_CUDA)
  if (word_ == nullptr) word_ = cuda::create_disagreement();
#endif
  return word_;
}

std::string DeviceFault::text() const {
#if defined(ECHO_WITH_CUDA)
  if (const cuda::Disagreement* word = word_) return cuda::describe_disagreement(word);
#endif
  return {};
}

}  // namespace echo::pg
