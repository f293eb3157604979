// Sets what the core's arithmetic assumes about the processor: round to nearest even, subnormals neither flushed nor
// read as zero.
//
// Frameworks turn flushing on per thread (torch.set_flush_denormal, the start-up code of other libraries), so a lane
// never trusts what it finds.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace echo::cpu {

class FloatEnvironment {
 public:
  FloatEnvironment() : saved_(read()) { write(kDefault); }
  ~FloatEnvironment() { write(saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kDefault = 0x1f80;  // all exceptions masked, no FTZ, no DAZ, nearest
  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t value) { _mm_setcsr(static_cast<unsigned>(value)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;
  static uint64_t read() {
    uint64_t value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(uint64_t value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#else
#error "float_environment.h knows x86-64 and AArch64 only"
#endif
  uint64_t saved_;
};

}  // namespace echo::cpu
