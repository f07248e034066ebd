// Copies of rows by a block or a warp, in the widest units that addresses and lengths allow.
#pragma once

#include "common/vendor.cuh"

namespace fr {

constexpr u32 MAX_PARTS = 8;
constexpr u32 MAX_TOPK = 256;

// Rows in a tensor: `width` bytes each, `stride` bytes from one to the next. Or, with `each`, by columns: so many rows
// of an expert behind one another for each element of `stride` bytes, one or four.
struct Part {
  u8* base;
  u64 stride;
  u32 width;
  u32 each;

  FR_DEVICE u8* row(u64 i) const { return base + i * stride; }
};

// Of `n` owners, whose rows begin at `begins`, the last one that begins at or before a row.
FR_DEVICE u32 owner_of(const u32* begins, u32 n, u64 row) {
  u32 low = 0, high = n;
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    if (begins[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Threads that share a row.
struct Team {
  u32 index, size;
};

FR_DEVICE Team whole_block() { return Team{thread(), threads()}; }
FR_DEVICE Team whole_warp() { return Team{lane(), WARP}; }
// Warps of a block, and this one among those of all blocks.
FR_DEVICE u32 warps() { return threads() / WARP; }
FR_DEVICE u32 warp() { return block() * warps() + thread() / WARP; }

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

// Loads of 16 bytes that a thread has under way at a time. Fewer where each is stored to many places, and in kernels of
// which much else takes registers: blocks that don't fit beside one another load nothing.
constexpr u32 DEPTH = 8;
constexpr u32 LOW_DEPTH = 2;

// Calls `put(place, value)` for units from `i` on: so many at a time, then half as many for those that are left.
template <u32 AT_ONCE, class T, class Put>
FR_DEVICE void each_from(Team team, const T* units, u32 i, u32 n, Put put) {
#pragma unroll 1
  for (; i + (AT_ONCE - 1) * team.size < n; i += AT_ONCE * team.size) {
    T values[AT_ONCE];
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; ++j) values[j] = load_unit(units + i + j * team.size);
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; ++j) put(i + j * team.size, values[j]);
  }
  if constexpr (AT_ONCE > 1) each_from<AT_ONCE / 2>(team, units, i, n, put);
}

// The same for every unit; returns the bytes that were taken. Narrow units go one by one: they are seldom many.
template <u32 DEEP, class T, class Put>
FR_DEVICE u32 each_unit(Team team, const u8* from, u32 nbytes, Put put) {
  u32 n = nbytes / sizeof(T);
  each_from<sizeof(T) == 16 ? DEEP : 1>(team, reinterpret_cast<const T*>(from), team.index, n, put);
  return n * sizeof(T);
}

// A row to `n` places, `offset` bytes behind the address that `at` has for each; none where that is 0. It is read once.
template <class T, class At>
FR_DEVICE u32 spread(Team team, const u8* from, u32 nbytes, At at, u32 n, u64 offset) {
  return each_unit<LOW_DEPTH, T>(team, from, nbytes, [=](u32 i, T value) {
#pragma unroll 1
    for (u32 j = 0; j < n; ++j)
      if (u64 place = at(j)) store_unit(reinterpret_cast<T*>(place + offset) + i, value);
  });
}

// Every place is a multiple of `unit`, or of 16.
template <class At>
FR_DEVICE void spread_row(Team team, const u8* from, u32 nbytes, At at, u32 n, u64 offset, u32 unit) {
  u32 done = 0;
  unit = unit_of(address(from) | offset | unit);
  if (unit == 16)
    done = spread<Vec16>(team, from, nbytes, at, n, offset);
  else if (unit == 8)
    done = spread<Vec8>(team, from, nbytes, at, n, offset);
  else if (unit == 4)
    done = spread<u32>(team, from, nbytes, at, n, offset);
  else if (unit == 2)
    done = spread<u16>(team, from, nbytes, at, n, offset);
  spread<u8>(team, from + done, nbytes - done, at, n, offset + done);
}

template <u32 DEEP, class T>
FR_DEVICE u32 copy_units(Team team, u8* to, const u8* from, u32 nbytes) {
  return each_unit<DEEP, T>(team, from, nbytes,
                     [=](u32 i, T value) { store_unit(reinterpret_cast<T*>(to) + i, value); });
}

template <u32 DEEP = DEPTH>
FR_DEVICE void copy_row(Team team, u8* to, const u8* from, u32 nbytes) {
  u32 unit = unit_of(address(to) | address(from)), done;
  if (unit == 16)
    done = copy_units<DEEP, Vec16>(team, to, from, nbytes);
  else if (unit == 8)
    done = copy_units<DEEP, Vec8>(team, to, from, nbytes);
  else if (unit == 4)
    done = copy_units<DEEP, u32>(team, to, from, nbytes);
  else if (unit == 2)
    done = copy_units<DEEP, u16>(team, to, from, nbytes);
  else
    done = 0;
  copy_units<DEEP, u8>(team, to + done, from + done, nbytes - done);
}

template <class T>
FR_DEVICE void column_units(Team team, const Part& part, u32 row, const u8* from) {
  u32 n = part.width / sizeof(T), expert = row / part.each, place = row % part.each;
  T* to = reinterpret_cast<T*>(part.base) + static_cast<u64>(expert) * n * part.each + place;
  for (u32 i = team.index; i < n; i += team.size) {
    T value{};
    // A row's parts lie at any address.
    u8* bytes = reinterpret_cast<u8*>(&value);
#pragma unroll
    for (u32 b = 0; b < sizeof(T); ++b) bytes[b] = from ? from[i * sizeof(T) + b] : 0;
    to[static_cast<u64>(i) * part.each] = value;
  }
}

// A row to its place by columns; zeros if `from` is null.
FR_DEVICE void columns_of(Team team, const Part& part, u32 row, const u8* from) {
  if (part.stride == 1)
    column_units<u8>(team, part, row, from);
  else
    column_units<u32>(team, part, row, from);
}

FR_DEVICE void blank_row(Team team, u8* to, u32 nbytes) {
  u32 whole = unit_of(address(to)) == 16 ? nbytes / 16 : 0;
  for (u32 i = team.index; i < whole; i += team.size)
    store_stream(reinterpret_cast<Vec16*>(to) + i, Vec16{0, 0, 0, 0});
  for (u32 i = whole * 16 + team.index; i < nbytes; i += team.size) to[i] = 0;
}

}  // namespace fr
