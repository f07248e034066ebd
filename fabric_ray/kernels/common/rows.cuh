// Copies of rows by all threads of a block, in the widest units that addresses and lengths allow.
#pragma once

#include "common/vendor.cuh"

namespace fr {

constexpr u32 MAX_PARTS = 8;

// Rows in a tensor: `width` bytes each, `stride` bytes from one to the next.
struct Part {
  u8* base;
  u64 stride;
  u32 width;
  u32 unused;

  FR_DEVICE u8* row(u64 i) const { return base + i * stride; }
};

// What all of these are multiples of, up to 16 bytes.
FR_DEVICE u32 unit_of(u64 bits) {
  u64 low = bits | 16;
  return static_cast<u32>(low & (~low + 1));
}

FR_DEVICE u64 address(const void* p) { return reinterpret_cast<u64>(p); }

template <class T>
FR_DEVICE T load_unit(const T* from) {
  return *from;
}
FR_DEVICE Vec16 load_unit(const Vec16* from) { return load_stream(from); }
template <class T>
FR_DEVICE void store_unit(T* to, T value) {
  *to = value;
}
FR_DEVICE void store_unit(Vec16* to, Vec16 value) { store_stream(to, value); }

// Loads of a thread that are under way at a time.
constexpr u32 DEPTH = 4;

// Calls `put(place, value)` for every unit; returns the bytes that were taken.
template <class T, class Put>
FR_DEVICE u32 each_unit(const u8* from, u32 nbytes, Put put) {
  const T* units = reinterpret_cast<const T*>(from);
  u32 n = nbytes / sizeof(T), i = thread();
  for (; i + (DEPTH - 1) * threads() < n; i += DEPTH * threads()) {
    T values[DEPTH];
#pragma unroll
    for (u32 j = 0; j < DEPTH; ++j) values[j] = load_unit(units + i + j * threads());
#pragma unroll
    for (u32 j = 0; j < DEPTH; ++j) put(i + j * threads(), values[j]);
  }
  for (; i < n; i += threads()) put(i, load_unit(units + i));
  return n * sizeof(T);
}

// A row to `n` places, `offset` bytes behind the address that `at` has for each; none where that is 0. It is read once.
template <class T, class At>
FR_DEVICE u32 spread(const u8* from, u32 nbytes, At at, u32 n, u64 offset) {
  return each_unit<T>(from, nbytes, [=](u32 i, T value) {
    for (u32 j = 0; j < n; ++j)
      if (u64 place = at(j)) store_unit(reinterpret_cast<T*>(place + offset) + i, value);
  });
}

// Every place is a multiple of `unit`, or of 16.
template <class At>
FR_DEVICE void spread_row(const u8* from, u32 nbytes, At at, u32 n, u64 offset, u32 unit) {
  u32 done = 0;
  unit = unit_of(address(from) | offset | unit);
  if (unit == 16)
    done = spread<Vec16>(from, nbytes, at, n, offset);
  else if (unit == 8)
    done = spread<Vec8>(from, nbytes, at, n, offset);
  else if (unit == 4)
    done = spread<u32>(from, nbytes, at, n, offset);
  else if (unit == 2)
    done = spread<u16>(from, nbytes, at, n, offset);
  spread<u8>(from + done, nbytes - done, at, n, offset + done);
}

template <class T>
FR_DEVICE u32 copy_units(u8* to, const u8* from, u32 nbytes) {
  return each_unit<T>(from, nbytes,
                      [=](u32 i, T value) { store_unit(reinterpret_cast<T*>(to) + i, value); });
}

FR_DEVICE void copy_row(u8* to, const u8* from, u32 nbytes) {
  u32 unit = unit_of(address(to) | address(from)), done;
  if (unit == 16)
    done = copy_units<Vec16>(to, from, nbytes);
  else if (unit == 8)
    done = copy_units<Vec8>(to, from, nbytes);
  else if (unit == 4)
    done = copy_units<u32>(to, from, nbytes);
  else if (unit == 2)
    done = copy_units<u16>(to, from, nbytes);
  else
    done = 0;
  copy_units<u8>(to + done, from + done, nbytes - done);
}

FR_DEVICE void blank_row(u8* to, u32 nbytes) {
  u32 whole = unit_of(address(to)) == 16 ? nbytes / 16 : 0;
  for (u32 i = thread(); i < whole; i += threads())
    store_stream(reinterpret_cast<Vec16*>(to) + i, Vec16{0, 0, 0, 0});
  for (u32 i = whole * 16 + thread(); i < nbytes; i += threads()) to[i] = 0;
}

}  // namespace fr
