// Processors: the threads of a block are threads. For checking what kernels do where there is no GPU; nothing here is
// meant to be fast. `name_on_host` runs some blocks of a kernel, one after another. Blocks that wait for one another run
// in libraries of their own: what the threads of a block share is static.
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#define FR_DEVICE inline
#define FR_SHARED static
#define FR_KERNEL(name, Params)                                                              \
  static void name##_body(const Params& p);                                                  \
  extern "C" void name##_on_host(u32 first, u32 end, u32 blocks, u32 threads, const void* p) { \
    fr::host::run(first, end, blocks, threads,                                               \
                  [p] { name##_body(*static_cast<const Params*>(p)); });                     \
  }                                                                                          \
  extern "C" u64 name##_nbytes() { return sizeof(Params); }                                  \
  static void name##_body(const Params& p)
#define FR_KERNEL_OF_TWO(name, Params) FR_KERNEL(name, Params)

namespace fr {

// Few: each lane is a thread, and no kernel counts on a number.
#ifndef FR_HOST_WARP
#define FR_HOST_WARP 4
#endif
constexpr u32 WARP = FR_HOST_WARP;

namespace host {

constexpr u32 MAX_WARPS = 64;

struct Place {
  u32 thread, threads, block, blocks;
  std::barrier<>* barrier;
  std::barrier<>* warp;
  bool met_block, met_warp;  // it has met the other threads of its block, or of its warp
};

inline thread_local Place here;

template <class Body>
void run(u32 first, u32 end, u32 blocks, u32 threads, Body body) {
  std::barrier<> barrier(threads);
  std::deque<std::barrier<>> warps;
  for (u32 left = threads; left != 0; left -= left < WARP ? left : WARP)
    warps.emplace_back(left < WARP ? left : WARP);
  std::vector<std::thread> all;
  for (u32 t = 0; t < threads; ++t)
    all.emplace_back([&, t] {
      for (u32 block = first; block < end; ++block) {
        here = {t, threads, block, blocks, &barrier, &warps[t / WARP], false, false};
        body();
        // What a block or a warp shares is the next one's, too. Another warp may have met no other thread.
        if (here.met_block)
          barrier.arrive_and_wait();
        else if (here.met_warp)
          here.warp->arrive_and_wait();
      }
    });
  for (auto& one : all) one.join();
}

}  // namespace host

inline u32 thread() { return host::here.thread; }
inline u32 threads() { return host::here.threads; }
inline u32 block() { return host::here.block; }
inline u32 blocks() { return host::here.blocks; }
inline void sync_block() {
  host::here.met_block = true;
  host::here.barrier->arrive_and_wait();
}

inline u32 lane() { return thread() % WARP; }
inline void sync_warp() {
  host::here.met_warp = true;
  host::here.warp->arrive_and_wait();
}
inline u64 ballot(bool what) {
  static u64 votes[host::MAX_WARPS];
  std::atomic_ref<u64> own(votes[thread() / WARP]);
  sync_warp();
  own.store(0);
  sync_warp();
  own.fetch_or(u64(what) << lane());
  sync_warp();
  return own.load();
}
template <class T>
T shuffle(T value, u32 from) {
  static T values[host::MAX_WARPS][WARP];
  T* own = values[thread() / WARP];
  sync_warp();
  own[lane()] = value;
  sync_warp();
  return own[from];
}

inline u32 atomic_add(u32* word, u32 value) {
  return std::atomic_ref<u32>(*word).fetch_add(value);
}
inline u64 atomic_add(u64* word, u64 value) {
  return std::atomic_ref<u64>(*word).fetch_add(value);
}
inline u64 arrive(u64* word) { return __atomic_fetch_add(word, 1, __ATOMIC_ACQ_REL); }
inline u64 atomic_swap_if(u64* word, u64 old, u64 value) {
  std::atomic_ref<u64>(*word).compare_exchange_strong(old, value);
  return old;
}
inline void atomic_min(u64* word, u64 value) {
  std::atomic_ref<u64> shared(*word);
  for (u64 now = shared; value < now && !shared.compare_exchange_weak(now, value);) continue;
}
inline void atomic_max(u64* word, u64 value) {
  std::atomic_ref<u64> shared(*word);
  for (u64 now = shared; value > now && !shared.compare_exchange_weak(now, value);) continue;
}

inline u64 load_acquire(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void store_release(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline u64 load_device(const u64* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline u64 load_system(const u64* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void store_pair_system(u64* words, u64 first, u64 second) {
  __atomic_store_n(words, first, __ATOMIC_RELAXED);
  __atomic_store_n(words + 1, second, __ATOMIC_RELAXED);
}

inline Vec16 load_stream(const Vec16* from) { return *from; }
inline void store_stream(Vec16* to, Vec16 v) { *to = v; }

// Built with -ffp-contract=off.
inline float add(float a, float b) { return a + b; }
inline float multiply(float a, float b) { return a * b; }
inline float divide(float a, float b) { return a / b; }

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float half_to_float(u16 bits) { return static_cast<float>(bits_as<_Float16>(bits)); }
inline u16 float_to_half(float value) { return bits_as<u16>(static_cast<_Float16>(value)); }
inline u32 bits_of(float value) { return bits_as<u32>(value); }
inline float float_of(u32 bits) { return bits_as<float>(bits); }

inline u64 now_ns() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}
inline void nap(u32 ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }

}  // namespace fr
