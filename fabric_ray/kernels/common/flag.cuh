// Waits for a word that the host or a NIC writes. Every wait ends: the word, the abort word, or the deadline.
#pragma once

#include "common/vendor.cuh"

namespace fr {

enum Waited : u32 { READY = 0, TIMED_OUT = 1, ABORTED = 2 };

// When a wait ends.
struct Patience {
  const u64* abort;  // non-zero once a rank that the device waits for is lost; may be null
  u64 timeout_ns;
};

// Looks more seldom the longer it takes, up to a microsecond: polls cross the bus.
struct Backoff {
  u32 ns;
  FR_DEVICE void rest() {
    nap(ns);
    if (ns < 1024) ns *= 2;
  }
};

// Until `done()`, which is asked once more when time is up: what came at the last moment came.
template <class Done>
FR_DEVICE Waited wait_until(Done done, const Patience& patience) {
  if (done()) return READY;
  u64 begin = now_ns();
  Backoff backoff{32};
  for (;;) {
    bool aborted = patience.abort && load_acquire(patience.abort) != 0;
    bool late = now_ns() - begin >= patience.timeout_ns;
    if (done()) return READY;
    if (aborted) return ABORTED;
    if (late) return TIMED_OUT;
    backoff.rest();
  }
}

// Until a word that only grows has reached a value. What was written before it did may be read then.
FR_DEVICE Waited wait_at_least(const u64* word, u64 value, const Patience& patience) {
  return wait_until([=] { return load_acquire(word) >= value; }, patience);
}

}  // namespace fr
