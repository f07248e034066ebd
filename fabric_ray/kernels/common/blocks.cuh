// Blocks that share work, and wait for one another.
#pragma once

#include "common/flag.cuh"

namespace fr {

constexpr u64 NO_FAULT = ~0ull;

// This block's number among those that share a step, and how many they are.
struct Blocks {
  u32 index, n;
};

// All blocks of the launch wait for one another; they are on the device together. The word only grows, by one for each
// block and barrier: launches that use it have as many blocks, and come one after another.
FR_DEVICE void sync_blocks(u64* word) {
  sync_block();
  if (blocks() == 1) return;
  if (thread() == 0) {
    u64 all = blocks(), before = arrive(word), end = before - before % all + all;
    while (load_acquire(word) < end) nap(32);
  }
  sync_block();
}

}  // namespace fr
