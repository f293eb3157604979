// The one place that says how a function of the core is compiled.
//
// Every core function has internal linkage: the CPU stages are compiled once per instruction set, and a linker that
// merged the copies of an ordinary inline function could hand AVX-512 code to a machine without it.
#pragma once

#if defined(__CUDACC__)
#define ECHO_HD static __host__ __device__ __forceinline__
#else
#define ECHO_HD static inline __attribute__((always_inline))
#endif
