// Running sums over all threads of a block.
#pragma once

#include "common/vendor.cuh"

namespace fr {

constexpr u32 MAX_THREADS = 1024;

// The sum of the values of threads below this one; `*total` is that of all. Every thread of the block calls it, and they
// are whole warps.
FR_DEVICE u32 sum_below(u32 value, u32* total) {
  FR_SHARED u32 sums[MAX_THREADS / WARP];
  u32 sum = value;
  for (u32 step = 1; step < WARP; step *= 2) {
    u32 left = shuffle(sum, lane() >= step ? lane() - step : lane());
    if (lane() >= step) sum += left;
  }
  sync_block();
  if (lane() == WARP - 1) sums[thread() / WARP] = sum;
  sync_block();
  u32 before = 0, all = 0;
  for (u32 warp = 0; warp < threads() / WARP; ++warp) {
    if (warp < thread() / WARP) before += sums[warp];
    all += sums[warp];
  }
  *total = all;
  return before + sum - value;
}

// starts[i] is the sum of size(0) to size(i - 1), for i up to n. Every thread of the block calls it.
template <class Size>
FR_DEVICE void running_sums(u32 n, Size size, u32* starts) {
  u32 each = (n + threads() - 1) / threads();
  u32 begin = thread() * each < n ? thread() * each : n;
  u32 end = begin + each < n ? begin + each : n;
  u32 own = 0, total;
  for (u32 i = begin; i < end; ++i) own += size(i);
  u32 sum = sum_below(own, &total);
  for (u32 i = begin; i < end; ++i) {
    starts[i] = sum;
    sum += size(i);
  }
  if (thread() == 0) starts[n] = total;
  sync_block();
}

}  // namespace fr
