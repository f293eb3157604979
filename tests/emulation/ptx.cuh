// backend/cuda/ptx.cuh for the CPU: the same functions, by what PTX says of the instructions.
//
// Where PTX leaves something open (the last bit of a reciprocal, the bits of a NaN), this takes what a kernel that
// counts on one device's habits is likely to stumble over.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "intrinsics.h"

namespace echo::cuda {

inline constexpr uint32_t kSomeNanBits = 0x7fffffffu;  // what instructions give, for 16 bits: its lower half

static inline float min_or_nan(float x, float y) {
  if (std::isnan(x) || std::isnan(y)) return std::bit_cast<float>(kSomeNanBits);
  if (x == y) return std::signbit(x) ? x : y;  // -0 is less than 0
  return x < y ? x : y;
}

static inline float max_or_nan(float x, float y) {
  if (std::isnan(x) || std::isnan(y)) return std::bit_cast<float>(kSomeNanBits);
  if (x == y) return std::signbit(x) ? y : x;
  return x > y ? x : y;
}

static inline float widen_bfloat16(uint32_t half) { return std::bit_cast<float>(half << 16); }
static inline float widen_float16(uint32_t half) {
  return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(half)));
}

// Applies choose(float, float) to both halves of two words.
template <typename Widen, typename Choose>
static inline uint32_t choose_halves(uint32_t x, uint32_t y, Widen widen, Choose choose) {
  uint32_t result = 0;
  for (const int shift : {0, 16}) {
    const uint32_t a = x >> shift & 0xffffu;
    const uint32_t b = y >> shift & 0xffffu;
    const float chosen = choose(widen(a), widen(b));
    const uint32_t half = std::isnan(chosen)                                                     ? 0x7fffu
                          : std::bit_cast<uint32_t>(chosen) == std::bit_cast<uint32_t>(widen(a)) ? a
                                                                                                 : b;
    result |= half << shift;
  }
  return result;
}

static inline uint32_t max_pair_or_nan_bfloat16(uint32_t x, uint32_t y) {
  return choose_halves(x, y, widen_bfloat16, max_or_nan);
}
static inline uint32_t min_pair_or_nan_bfloat16(uint32_t x, uint32_t y) {
  return choose_halves(x, y, widen_bfloat16, min_or_nan);
}
static inline uint32_t max_pair_or_nan_float16(uint32_t x, uint32_t y) {
  return choose_halves(x, y, widen_float16, max_or_nan);
}
static inline uint32_t min_pair_or_nan_float16(uint32_t x, uint32_t y) {
  return choose_halves(x, y, widen_float16, min_or_nan);
}

// An ulp too small or too large for half of all x, as their bits have it.
static inline float rough_reciprocal(float x) {
  const float inverse = 1.0f / x;
  const uint32_t hash = std::bit_cast<uint32_t>(x) * 0x9e3779b9u >> 30;
  if (hash < 2 || !std::isnormal(inverse)) return inverse;
  return std::nextafterf(inverse, hash == 2 ? 0.0f : inverse * 2.0f);
}

static inline uint16_t ceil_float16(float x) {
  const auto nearest = static_cast<_Float16>(x);
  const auto bits = std::bit_cast<uint16_t>(nearest);
  if (!(static_cast<float>(nearest) < x)) return bits;
  return static_cast<uint16_t>((bits & 0x8000u) == 0 ? bits + 1 : bits - 1);
}

// Of the two neighbours the nearer, as doubles have it without rounding; of equally near ones the even.
static inline uint32_t round_bfloat16(float x) {
  if (std::isnan(x)) return 0x7fffu;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t inner = bits >> 16;
  if ((bits & 0xffffu) == 0) return inner;
  const double below = widen_bfloat16(inner);
  // Beyond the largest number lies 2^128 for this purpose.
  const double above = ((inner + 1) & 0x7fffu) == 0x7f80u ? std::copysign(0x1p128, x) : widen_bfloat16(inner + 1);
  const double to_inner = std::abs(x - below);
  const double to_outer = std::abs(above - x);
  if (to_inner == to_outer) return inner + (inner & 1);
  return to_inner < to_outer ? inner : inner + 1;
}

static inline uint32_t round_float16(float x) {
  return std::isnan(x) ? 0x7fffu : std::bit_cast<uint16_t>(static_cast<_Float16>(x));
}

static inline uint32_t round_pair_bfloat16(float low, float high) {
  return round_bfloat16(low) | round_bfloat16(high) << 16;
}
static inline uint32_t round_pair_float16(float low, float high) {
  return round_float16(low) | round_float16(high) << 16;
}

static inline float widen_low_float16(uint32_t pair) { return widen_float16(pair & 0xffffu); }
static inline float widen_high_float16(uint32_t pair) { return widen_float16(pair >> 16); }

// Applies op(double, double, double) to the halves of three words. Sums of two halves and products of two are exact in
// double; so is a product with a third half added, unless that is 2^31 times as large.
template <typename Op>
static inline uint32_t on_halves(uint32_t x, uint32_t y, uint32_t z, Op op) {
  uint32_t result = 0;
  for (const int shift : {0, 16}) {
    const auto half = [&](uint32_t pair) -> double { return widen_float16(pair >> shift & 0xffffu); };
    const auto rounded = static_cast<_Float16>(op(half(x), half(y), half(z)));
    const uint32_t bits = rounded != rounded ? 0x7fffu : std::bit_cast<uint16_t>(rounded);
    result |= bits << shift;
  }
  return result;
}

static inline uint32_t add_pair_float16(uint32_t x, uint32_t y) {
  return on_halves(x, y, 0, [](double a, double b, double) { return a + b; });
}
static inline uint32_t subtract_pair_float16(uint32_t x, uint32_t y) {
  return on_halves(x, y, 0, [](double a, double b, double) { return a - b; });
}
static inline uint32_t fma_pair_float16(uint32_t x, uint32_t y, uint32_t z) {
  return on_halves(x, y, z, [](double a, double b, double c) { return a * b + c; });
}

static inline uint32_t butterfly_float16(uint32_t pair) {
  return fma_pair_float16(pair >> 16 | (pair & 0xffff0000u), 0xbc003c00u, (pair & 0xffffu) | pair << 16);
}

static inline uint32_t recompute_here(uint32_t value) { return value; }

template <typename T>
static inline void store_release_sys(T* at, std::type_identity_t<T> value) {
  std::atomic_ref<T>(*at).store(value, std::memory_order_release);
}
template <typename T>
static inline T load_acquire_sys(const T* at) {
  emulation::give_way();
  return std::atomic_ref<T>(*const_cast<T*>(at)).load(std::memory_order_acquire);
}
template <typename T>
static inline T load_relaxed_sys(const T* at) {
  emulation::give_way();
  return std::atomic_ref<T>(*const_cast<T*>(at)).load(std::memory_order_relaxed);
}

static inline void store_global_quad(std::byte* to, const uint4& quad) { *reinterpret_cast<uint4*>(to) = quad; }
static inline void store_global_word(std::byte* to, uint32_t word) { *reinterpret_cast<uint32_t*>(to) = word; }

// Here: an offset in what the launch asked for.
using SharedAddress = uint32_t;

static inline SharedAddress dynamic_shared() { return 0; }

static inline uint4 load_shared_quad(SharedAddress at) {
  return *static_cast<const uint4*>(emulation::dynamic_shared(at, sizeof(uint4)));
}
static inline uint32_t load_shared_word(SharedAddress at) {
  return *static_cast<const uint32_t*>(emulation::dynamic_shared(at, sizeof(uint32_t)));
}
static inline void store_shared_quad(SharedAddress at, const uint4& quad) {
  *static_cast<uint4*>(emulation::dynamic_shared(at, sizeof(uint4))) = quad;
}

template <int kBytes>
static inline void start_copy(SharedAddress to, const std::byte* from) {
  emulation::start_copy(emulation::dynamic_shared(to, kBytes), from, kBytes);
}
static inline void close_copies() { emulation::close_copies(); }
template <int kOpen>
static inline void wait_for_copies() {
  emulation::wait_for_copies(kOpen);
}

static inline uint64_t global_nanoseconds() { return emulation::nanoseconds(); }

}  // namespace echo::cuda
