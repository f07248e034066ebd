// NVIDIA, sm_80 and later. Needs no header of the toolkit, so that NVRTC alone compiles it.
#pragma once

#define FR_DEVICE __device__ __forceinline__
#define FR_SHARED __shared__
// Arguments are read where the driver puts them: a copy for each thread would be kilobytes.
#define FR_KERNEL(name, Params) extern "C" __global__ void name(const __grid_constant__ Params p)
// Two blocks of 256 threads fit on a multiprocessor: the compiler needn't spill registers for more.
#define FR_KERNEL_OF_TWO(name, Params) \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const __grid_constant__ Params p)

namespace fr {

constexpr u32 WARP = 32;

FR_DEVICE u32 thread() { return threadIdx.x; }
FR_DEVICE u32 threads() { return blockDim.x; }
FR_DEVICE u32 block() { return blockIdx.x; }
FR_DEVICE u32 blocks() { return gridDim.x; }
FR_DEVICE void sync_block() { __syncthreads(); }

FR_DEVICE u32 lane() { return threadIdx.x % WARP; }
FR_DEVICE u64 ballot(bool what) { return __ballot_sync(0xffffffffu, what); }
template <class T>
FR_DEVICE T shuffle(T value, u32 from) {
  return __shfl_sync(0xffffffffu, value, from);
}

FR_DEVICE u32 atomic_add(u32* word, u32 value) { return atomicAdd(word, value); }
FR_DEVICE u64 atomic_add(u64* word, u64 value) { return atomicAdd(word, value); }
FR_DEVICE void atomic_min(u64* word, u64 value) { atomicMin(word, value); }
FR_DEVICE void atomic_max(u64* word, u64 value) { atomicMax(word, value); }
FR_DEVICE u64 atomic_swap_if(u64* word, u64 old, u64 value) { return atomicCAS(word, old, value); }

FR_DEVICE u64 arrive(u64* word) {
  u64 before;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(word) : "memory");
  return before;
}

FR_DEVICE u64 load_acquire(const u64* word) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

FR_DEVICE void store_release(u64* word, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

FR_DEVICE u64 load_device(const u64* word) {
  u64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

FR_DEVICE u64 load_system(const u64* word) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

FR_DEVICE void store_pair_system(u64* words, u64 first, u64 second) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(words), "l"(first), "l"(second)
               : "memory");
}

FR_DEVICE void fence_system() { __threadfence_system(); }

FR_DEVICE Vec16 load_stream(const Vec16* from) {
  Vec16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

FR_DEVICE void store_stream(Vec16* to, Vec16 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

FR_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
FR_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
FR_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }

FR_DEVICE float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

FR_DEVICE u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

FR_DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
FR_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

FR_DEVICE u64 now_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

FR_DEVICE void nap(u32 ns) { __nanosleep(ns); }

}  // namespace fr
