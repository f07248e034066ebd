// The only interface to the compiler and the device. A new vendor needs one header with the definitions below.
//
// | name | what |
// |---|---|
// | FR_DEVICE, FR_SHARED | a device function; a variable that the threads of a block share |
// | FR_KERNEL(name, Params) { ... p ... } | a kernel; its one argument is a struct of plain values, `p` |
// | FR_KERNEL_OF_TWO | the same; two blocks of 256 threads fit beside one another |
// | thread(), threads(), block(), blocks(), sync_block() | where a thread is, and its block's barrier |
// | WARP, lane(), ballot(bool), shuffle(value, lane) | warps; all lanes take part |
// | atomic_add, atomic_min, atomic_max, atomic_swap_if | on words that one device's threads share |
// | arrive(word) | adds one, and returns what was there; orders what blocks of this device did before and do after it |
// | load_acquire, store_release, fence_system | order towards the host and other devices |
// | load_device, load_system, store_pair_system | a device's word, or the host's, as it is now; a command's two words in one store |
// | load_stream, store_stream | bytes that are touched once |
// | add, multiply, divide | rounded by themselves, never fused: sums have the same bits as the host's |
// | half_to_float, float_to_half | IEEE half precision, to nearest even |
// | now_ns(), nap(ns) | a clock that all blocks share; gives way for about so long |
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

namespace fr {

struct alignas(16) Vec16 {
  u32 x, y, z, w;
};
struct alignas(8) Vec8 {
  u32 x, y;
};

constexpr u32 NONE = 0xffffffffu;

}  // namespace fr

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "common/vendor_cuda.cuh"
#elif defined(__HIP__) || defined(__HIPCC_RTC__)
#include "common/vendor_hip.cuh"
#else
#include "common/vendor_host.cuh"
#endif
