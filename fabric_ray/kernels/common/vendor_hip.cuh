// AMD, CDNA. UNPROVEN: hipcc of ROCm 5.2 compiles it for gfx90a, a newer clang for gfx942 and gfx950; it
// has never run, and nothing launches it yet.
#pragma once

#if !defined(__HIPCC_RTC__)
#include <hip/hip_runtime.h>
#endif

#define FR_DEVICE __device__ __forceinline__
#define FR_SHARED __shared__
// Arguments are read where the dispatch puts them: a parameter that is indexed would be copied to
// memory of each thread.
#define FR_KERNEL_WITH(bounds, name, Params)                                          \
  FR_DEVICE void name##_body(const Params& p);                                        \
  extern "C" __global__ void bounds name(const Params) {                              \
    name##_body(*(const Params*)__builtin_amdgcn_kernarg_segment_ptr());              \
  }                                                                                   \
  FR_DEVICE void name##_body(const Params& p)
#define FR_KERNEL(name, Params) FR_KERNEL_WITH(__launch_bounds__(1024), name, Params)
// The second number is waves on a SIMD unit, of four: two blocks of four waves each.
#define FR_KERNEL_OF_TWO(name, Params) FR_KERNEL_WITH(__launch_bounds__(256, 2), name, Params)

namespace fr {

constexpr u32 WARP = 64;

FR_DEVICE u32 thread() { return threadIdx.x; }
FR_DEVICE u32 threads() { return blockDim.x; }
FR_DEVICE u32 block() { return blockIdx.x; }
FR_DEVICE u32 blocks() { return gridDim.x; }
FR_DEVICE void sync_block() { __syncthreads(); }

FR_DEVICE u32 lane() { return threadIdx.x % WARP; }
FR_DEVICE u64 ballot(bool what) { return __ballot(what); }
template <class T>
FR_DEVICE T shuffle(T value, u32 from) {
  return __shfl(value, static_cast<int>(from));
}

FR_DEVICE u32 atomic_add(u32* word, u32 value) { return atomicAdd(word, value); }
FR_DEVICE u64 atomic_add(u64* word, u64 value) { return atomicAdd(word, value); }
FR_DEVICE void atomic_min(u64* word, u64 value) { atomicMin(word, value); }
FR_DEVICE void atomic_max(u64* word, u64 value) { atomicMax(word, value); }
FR_DEVICE u64 atomic_swap_if(u64* word, u64 old, u64 value) { return atomicCAS(word, old, value); }

FR_DEVICE u64 arrive(u64* word) {
  return __hip_atomic_fetch_add(word, 1ull, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
FR_DEVICE u64 load_acquire(const u64* word) {
  return __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
FR_DEVICE void store_release(u64* word, u64 value) {
  __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
FR_DEVICE u64 load_device(const u64* word) {
  return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
FR_DEVICE u64 load_system(const u64* word) {
  return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

// No store of 16 bytes that is also one to the host: the FIFO takes two of 8 as well.
FR_DEVICE void store_pair_system(u64* words, u64 first, u64 second) {
  __hip_atomic_store(words, first, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  __hip_atomic_store(words + 1, second, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

FR_DEVICE void fence_system() { __threadfence_system(); }

FR_DEVICE Vec16 load_stream(const Vec16* from) { return *from; }
FR_DEVICE void store_stream(Vec16* to, Vec16 v) { *to = v; }

FR_DEVICE float add(float a, float b) {
#pragma clang fp contract(off)
  return a + b;
}
FR_DEVICE float multiply(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
FR_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }

FR_DEVICE float half_to_float(u16 bits) {
  return static_cast<float>(__builtin_bit_cast(_Float16, bits));
}
FR_DEVICE u16 float_to_half(float value) {
  return __builtin_bit_cast(u16, static_cast<_Float16>(value));
}

FR_DEVICE u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
FR_DEVICE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }

// 100 MHz on CDNA.
FR_DEVICE u64 now_ns() { return wall_clock64() * 10; }

FR_DEVICE void nap(u32 ns) {
  // 64 cycles each.
  for (u32 slept = 0; slept < ns; slept += 32) __builtin_amdgcn_s_sleep(1);
}

}  // namespace fr
