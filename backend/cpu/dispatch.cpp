// Chooses the compiled set of stages that this processor can run.
#include <cstring>

#include "stages.h"

namespace echo::cpu {

namespace baseline {
extern const Stages stages;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Stages stages;
}
namespace avx512 {
extern const Stages stages;
}
#endif

namespace {

const Stages* widest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return &avx512::stages;
  }
  if (__builtin_cpu_supports("avx2")) return &avx2::stages;
#endif
  return &baseline::stages;
}

}  // namespace

const Stages& active_stages() {
  static const Stages* const chosen = widest();
  return *chosen;
}

const Stages* stages_named(const char* isa) {
  if (std::strcmp(isa, "baseline") == 0) return &baseline::stages;
#if defined(__x86_64__)
  const Stages* const most = widest();
  if (std::strcmp(isa, "avx512") == 0 && most == &avx512::stages) return &avx512::stages;
  if (std::strcmp(isa, "avx2") == 0 && most != &baseline::stages) return &avx2::stages;
#endif
  return nullptr;
}

}  // namespace echo::cpu
