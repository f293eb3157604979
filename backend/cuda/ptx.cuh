// All inline assembly of the project: instructions that CUDA C++ has no name for, each under the guarantee it gives.
//
// The conversions are exact replacements of functions of core/numeric.h, for the inputs named;
// tests/cpp/cuda_stages_test.cu compares them over every fp32 and every 16-bit pattern.
#pragma once

#include <cstddef>
#include <cstdint>

namespace echo::cuda {

// The smaller and the larger of two; NaN if either is NaN, unlike fminf and fmaxf.
static __device__ __forceinline__ float min_or_nan(float x, float y) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

static __device__ __forceinline__ float max_or_nan(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// The larger of both halves of two words, as bfloat16 and as float16; NaN if either is NaN.
static __device__ __forceinline__ uint32_t max_pair_or_nan_bfloat16(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

static __device__ __forceinline__ uint32_t min_pair_or_nan_bfloat16(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

static __device__ __forceinline__ uint32_t max_pair_or_nan_float16(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

static __device__ __forceinline__ uint32_t min_pair_or_nan_float16(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

// 1/x to within an ulp, for normal x whose inverse is normal.
static __device__ __forceinline__ float rough_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// ceil16 to fp16 of a value in fp16's range.
static __device__ __forceinline__ uint16_t ceil_float16(float x) {
  uint16_t result;
  asm("cvt.rp.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
}

// to_bfloat16 and to_float16 of two values that are not NaN, `low` in bits 0..15.
static __device__ __forceinline__ uint32_t round_pair_bfloat16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

static __device__ __forceinline__ uint32_t round_pair_float16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// from_float16 of the low and the high half of a word; of a NaN some NaN.
static __device__ __forceinline__ float widen_low_float16(uint32_t pair) {
  float result;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(result) : "r"(pair));
  return result;
}

static __device__ __forceinline__ float widen_high_float16(uint32_t pair) {
  float result;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }" : "=f"(result) : "r"(pair));
  return result;
}

// x + y, x - y and x * y + z of the halves of two words as float16, each rounded once; subnormals are kept.
static __device__ __forceinline__ uint32_t add_pair_float16(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

static __device__ __forceinline__ uint32_t subtract_pair_float16(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

static __device__ __forceinline__ uint32_t fma_pair_float16(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}

// The sum of a word's halves in the low half, low minus high in the high half: halves doubled by operands' selectors,
// where swapping them would be an instruction.
static __device__ __forceinline__ uint32_t butterfly_float16(uint32_t pair) {
  uint32_t result;
  asm("{ .reg .b16 low, high; .reg .b32 lows, highs, signs; mov.b32 {low, high}, %1; mov.b32 lows, {low, low};"
      " mov.b32 highs, {high, high}; mov.b32 signs, 0xbc003c00; fma.rn.f16x2 %0, highs, signs, lows; }"
      : "=r"(result)
      : "r"(pair));
  return result;
}

// The value itself, in a way that keeps the compiler from computing what depends on it ahead of a loop and holding that
// in registers.
static __device__ __forceinline__ uint32_t recompute_here(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Every earlier write of this thread is seen by whoever reads the new value with acquire at system scope, the host
// included.
static __device__ __forceinline__ void store_release_sys(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

static __device__ __forceinline__ uint32_t load_acquire_sys(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

static __device__ __forceinline__ void store_release_sys(uint64_t* at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}

static __device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// Without any order: for looking again and again.
static __device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// To device memory, of this device or a peer's, through a pointer that the compiler lost sight of.
static __device__ __forceinline__ void store_global_quad(std::byte* to, const uint4& quad) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(quad.x), "r"(quad.y), "r"(quad.z), "r"(quad.w)
               : "memory");
}

static __device__ __forceinline__ void store_global_word(std::byte* to, uint32_t word) {
  asm volatile("st.global.u32 [%0], %1;" : : "l"(to), "r"(word) : "memory");
}

// A place in shared memory as instructions name it: one register, and constants added to it are part of the
// instruction.
using SharedAddress = uint32_t;

// The shared memory that the launch asked for, aligned to 128 bytes.
static __device__ __forceinline__ SharedAddress dynamic_shared() {
  extern __shared__ __align__(128) uint4 dynamic_memory[];
  return static_cast<SharedAddress>(__cvta_generic_to_shared(dynamic_memory));
}

static __device__ __forceinline__ uint4 load_shared_quad(SharedAddress at) {
  uint4 quad;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(quad.x), "=r"(quad.y), "=r"(quad.z), "=r"(quad.w)
               : "r"(at)
               : "memory");
  return quad;
}

static __device__ __forceinline__ uint32_t load_shared_word(SharedAddress at) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}

static __device__ __forceinline__ void store_shared_quad(SharedAddress at, const uint4& quad) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(at), "r"(quad.x), "r"(quad.y), "r"(quad.z), "r"(quad.w)
               : "memory");
}

// Copies that go on by themselves, from device memory to shared memory, of kBytes = 4, 8 or 16, to which both ends are
// aligned; those of 16 go past the first-level cache. What was started since the last close_copies is one set. Who
// waited may read what it copied itself; the warp, after a __syncwarp, what all its lanes did.
template <int kBytes>
static __device__ __forceinline__ void start_copy(SharedAddress to, const std::byte* from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(to), "l"(from), "n"(kBytes) : "memory");
  }
}

static __device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Until all sets but the last `kOpen` are there.
template <int kOpen>
static __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kOpen) : "memory");
}

// Nanoseconds of a clock that all multiprocessors of a device share.
static __device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}  // namespace echo::cuda
