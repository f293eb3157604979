// CUDA's device functions, those that the kernels use.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <type_traits>

#include "engine.h"

#define threadIdx (::emulation::g_here->thread)
#define blockIdx (::emulation::g_here->block)
#define blockDim (::emulation::g_here->block_dim)
#define gridDim (::emulation::g_here->grid_dim)

// ---- warps and blocks ---------------------------------------------------------------------------------------------

namespace emulation {

template <typename T>
T shuffle(uint32_t mask, T value, int source, Location at) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  word = collect(Collective::kShuffle, mask, word, source, at);
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

}  // namespace emulation

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = emulation::kWarpLanes,
              emulation::Location at = emulation::Location::current()) {
  const int first = emulation::lane() & ~(width - 1);
  return emulation::shuffle(mask, value, first | (source & (width - 1)), at);
}

// Beyond the own segment a lane gets its own value.
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int stride, int width = emulation::kWarpLanes,
                  emulation::Location at = emulation::Location::current()) {
  const int lane = emulation::lane();
  const int source = lane ^ stride;
  return emulation::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, at);
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value,
                                  emulation::Location at = emulation::Location::current()) {
  return static_cast<unsigned>(emulation::collect(emulation::Collective::kMax, mask, value, 0, at));
}

inline unsigned __reduce_min_sync(unsigned mask, unsigned value,
                                  emulation::Location at = emulation::Location::current()) {
  return static_cast<unsigned>(emulation::collect(emulation::Collective::kMin, mask, value, 0, at));
}

inline unsigned __ballot_sync(unsigned mask, bool predicate, emulation::Location at = emulation::Location::current()) {
  return static_cast<unsigned>(emulation::collect(emulation::Collective::kBallot, mask, predicate, 0, at));
}

inline int __all_sync(unsigned mask, bool predicate, emulation::Location at = emulation::Location::current()) {
  return __ballot_sync(mask, predicate, at) == mask;
}

inline int __any_sync(unsigned mask, bool predicate, emulation::Location at = emulation::Location::current()) {
  return __ballot_sync(mask, predicate, at) != 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, emulation::Location at = emulation::Location::current()) {
  emulation::collect(emulation::Collective::kOrder, mask, 0, 0, at);
}

inline void __syncthreads(emulation::Location at = emulation::Location::current()) {
  emulation::wait_at_barrier(emulation::Barrier::kPlain, false, at);
}

inline int __syncthreads_or(int predicate, emulation::Location at = emulation::Location::current()) {
  return emulation::wait_at_barrier(emulation::Barrier::kOr, predicate != 0, at);
}

inline int __syncthreads_and(int predicate, emulation::Location at = emulation::Location::current()) {
  return emulation::wait_at_barrier(emulation::Barrier::kAnd, predicate != 0, at);
}

inline int __syncthreads_count(int predicate, emulation::Location at = emulation::Location::current()) {
  return emulation::wait_at_barrier(emulation::Barrier::kCount, predicate != 0, at);
}

inline void __nanosleep(unsigned) { emulation::give_way(); }

// ---- memory -------------------------------------------------------------------------------------------------------

// A fence takes part in the order of all fences, and atomic operations acquire and release: more than CUDA promises, so
// that ThreadSanitizer, which knows no fences, reports nothing that is right.
inline constexpr char kEveryFence = 0;

inline void __threadfence() {
  emulation::acquire(&kEveryFence);
  emulation::release(&kEveryFence);
}
inline void __threadfence_system() { __threadfence(); }
inline void __threadfence_block() { __threadfence(); }

template <typename T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
  emulation::give_way();
  return std::atomic_ref<T>(*at).fetch_add(value, std::memory_order_acq_rel);
}
template <typename T>
T atomicAdd_system(T* at, std::type_identity_t<T> value) {
  return atomicAdd(at, value);
}

template <typename T>
T atomicExch(T* at, std::type_identity_t<T> value) {
  emulation::give_way();
  return std::atomic_ref<T>(*at).exchange(value, std::memory_order_acq_rel);
}

template <typename T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  emulation::give_way();
  std::atomic_ref<T>(*at).compare_exchange_strong(expected, value, std::memory_order_acq_rel);
  return expected;
}

template <typename T>
T atomicMax(T* at, std::type_identity_t<T> value) {
  emulation::give_way();
  const std::atomic_ref<T> word(*at);
  T seen = word.load(std::memory_order_relaxed);
  while (seen < value && !word.compare_exchange_weak(seen, value, std::memory_order_acq_rel)) {
  }
  return seen;
}

// ---- arithmetic ---------------------------------------------------------------------------------------------------

using std::max;
using std::min;

inline float __fmaf_rn(float x, float y, float z) { return std::fmaf(x, y, z); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }

// Byte i of the result is byte (selector >> 4i & 7) of the eight of y:x; with bit 3 set, 8 copies of its sign.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> (4 * i);
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7))) & 0xffu;
    if ((nibble & 8) != 0) byte = (byte & 0x80u) != 0 ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}

// On both signed halves: max(min(x, y), 0).
inline unsigned __vimin_s16x2_relu(unsigned x, unsigned y) {
  const auto half = [](unsigned a, unsigned b) -> unsigned {
    return static_cast<unsigned>(max(min(static_cast<int16_t>(a), static_cast<int16_t>(b)), int16_t{0}));
  };
  return half(x, y) | half(x >> 16, y >> 16) << 16;
}

// On both unsigned halves.
inline unsigned __vmaxu2(unsigned x, unsigned y) { return max(x & 0xffffu, y & 0xffffu) | max(x >> 16, y >> 16) << 16; }
