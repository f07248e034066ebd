// Where rows of all sources go: to experts, and among those of one expert by source, as native/moe's `Placing` has it.
#pragma once

#include "common/rows.cuh"

namespace fr {

// Where the rows of sources are, and where they go.
struct Places {
  const u32* from;   // [sources, experts + 1]: where each expert's begin among the source's, and how many in all
  const u32* to;     // [sources, experts]: where each expert's first one goes
  const u64* fault;  // all ones: rows can be moved
  u32 experts;
  u32 unused;

  // Where a row of a source goes; NONE if the source has no such row.
  FR_DEVICE u32 of(u32 source, u64 row) const {
    const u32* begins = from + static_cast<u64>(source) * (experts + 1);
    if (row >= begins[experts]) return NONE;
    u32 expert = owner_of(begins, experts, row);
    return to[static_cast<u64>(source) * experts + expert] + static_cast<u32>(row - begins[expert]);
  }
};

// Rows of one source that lie behind one another: in its private slot, in the shared buffer, or here.
struct Chunk {
  u32 source;
  u32 rows;
  u64 first;  // among the source's
  u64 place;  // bytes from the beginning of the region; BLANK: they don't come, and zeros stand for them (RS-1)

  FR_DEVICE bool is_straight() const;
  FR_DEVICE u8* in(u8* region) const;
};

constexpr u64 BLANK = ~0ull;
// In a place: it is an address at a peer.
constexpr u64 STORED = 1ull << 62;

FR_DEVICE bool Chunk::is_straight() const { return place != BLANK && (place & STORED) != 0; }

FR_DEVICE u8* Chunk::in(u8* region) const {
  return is_straight() ? reinterpret_cast<u8*>(place & ~STORED) : region + place;
}

// What there is to move, written by the host before the kernel begins.
struct Chunks {
  const Chunk* chunk;
  const u32* n;
};

}  // namespace fr
