// The device's end of the command FIFO; native/proxy's `fifo` has the protocol, and the host's end.
//
// Slots are in host memory, the pushers' words in this device's memory, and `completed` where the host writes it.
// `completed_seen` is a copy in device memory: the bus is crossed only when that says that the FIFO is full.
#pragma once

#include "common/command.cuh"
#include "common/flag.cuh"

namespace fr {

struct Pushers {
  u64 claimed;
  u64 completed_seen;
};

struct Fifo {
  u64* slots;  // two words each
  Pushers* pushers;
  const u64* completed;
  u64 capacity;  // a power of two

  // The word's highest bit in this lap around the FIFO.
  FR_DEVICE u64 lap(u64 index) const { return index & capacity ? 0 : 1ull << FR_CMD_LAP_BIT; }

  // A command that was pushed is completed: a write or an atomic posted, a drain or a barrier over.
  FR_DEVICE bool is_complete(u64 index) const { return load_acquire(completed) > index; }

  FR_DEVICE bool has_room(u64 claimed, u32 n) {
    if (claimed + n - load_device(&pushers->completed_seen) <= capacity) return true;
    u64 now = load_acquire(completed);
    // A thread that reads the copy and then writes a slot comes after the host's reading of it, too.
    fence_system();
    atomic_max(&pushers->completed_seen, now);
    return claimed + n - now <= capacity;
  }

  // Takes `n` indices in a row if there is room for so many. What is taken must be published: the host waits for it.
  FR_DEVICE bool claim(u32 n, u64* index) {
    u64 claimed = load_device(&pushers->claimed);
    for (;;) {
      if (!has_room(claimed, n)) return false;
      u64 now = atomic_swap_if(&pushers->claimed, claimed, claimed + n);
      if (now == claimed) break;
      claimed = now;
    }
    *index = claimed;
    return true;
  }

  // The fence comes first: whatever this thread wrote before, or has seen written, the host reads afterwards.
  FR_DEVICE void publish(u64 index, Command command) {
    u64 bit = 1ull << FR_CMD_LAP_BIT, mark = lap(index);
    fence_system();
    store_pair_system(slots + 2 * (index & (capacity - 1)), (command.words[0] & ~bit) | mark,
                      (command.words[1] & ~bit) | mark);
  }

  // Pushes one command of this thread, waiting for room. It is published before the wait is left: other threads of the
  // warp may be in it still, and wait for this very command to be completed.
  FR_DEVICE Waited push(Command command, const Patience& patience, u64* index) {
    auto pushed = [&] {
      if (!claim(1, index)) return false;
      publish(*index, command);
      return true;
    };
    return wait_until(pushed, patience);
  }

  // Pushes the commands of those lanes that have one, in the order of lanes, with one claim. All lanes call it. The
  // capacity is at least a warp's threads.
  FR_DEVICE Waited push_warp(bool has, Command command, const Patience& patience, u64* index) {
    u64 lanes = ballot(has);
    u32 n = 0, below = 0;
    for (u32 i = 0; i < WARP; ++i) {
      u32 one = lanes >> i & 1;
      if (i < lane()) below += one;
      n += one;
    }
    u64 first = 0;
    u32 waited = READY;
    if (n != 0 && lane() == 0) waited = wait_until([&] { return claim(n, &first); }, patience);
    first = shuffle(first, 0);
    waited = shuffle(waited, 0);
    if (has && waited == READY) {
      *index = first + below;
      publish(*index, command);
    }
    return static_cast<Waited>(waited);
  }

  FR_DEVICE Waited wait(u64 index, const Patience& patience) const {
    return wait_until([&] { return is_complete(index); }, patience);
  }
};

}  // namespace fr
