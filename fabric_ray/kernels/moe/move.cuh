// Rows out of the memory they came to, to their experts; and the experts' answers back to where they are sent from, or
// straight to where they go.
#pragma once

#include "common/blocks.cuh"
#include "common/rows.cuh"
#include "moe/placing.cuh"

namespace fr {

struct HandOut {
  Places places;
  Chunks chunks;
  const u8* region;
  u64 row_stride;
  u32 parts;
  u32 sources;
  Part part[MAX_PARTS];
  u64* layout;  // as `Incoming` has it; rows that don't come are taken off again; may be null
  u32 each;     // rows of each expert, for `layout`
  u32 unused;
};

// Calls `each(chunk, i)` for the rows of all chunks, by warps: many rows are on their way at a time. Chunks begin with
// the warp behind the last one of the chunk before.
template <class Each>
FR_DEVICE void each_row(const Chunks& chunks, Blocks by, Each each) {
  u32 n = *chunks.n, all = by.n * warps(), own = by.index * warps() + thread() / WARP;
  for (u32 c = 0; c < n; ++c) {
    const Chunk chunk = chunks.chunk[c];
    for (u32 i = own; i < chunk.rows; i += all) each(chunk, i);
    u32 used = chunk.rows % all;
    own = own >= used ? own - used : own + all - used;
  }
}

FR_DEVICE void hand_out(const HandOut& p, Blocks by) {
  if (*p.places.fault != ~0ull) return;
  each_row(p.chunks, by, [&](const Chunk& chunk, u32 i) {
    u32 to = p.places.of(chunk.source, chunk.first + i);
    if (to == NONE) return;
    bool comes = chunk.place != BLANK;
    if (!comes && p.layout && lane() == 0) {
      u64* rows = p.layout + static_cast<u64>(to / p.each) * p.sources + chunk.source;
      // Of the last one nothing stays.
      if (static_cast<u32>(atomic_add(rows, ~0ull)) == 1) *rows = 0;
    }
    const u8* from = p.region + chunk.place + i * p.row_stride;
    for (u32 j = 0; j < p.parts; ++j) {
      const Part& part = p.part[j];
      if (part.each != 0)
        columns_of(whole_warp(), part, to, comes ? from : nullptr);
      else if (comes)
        copy_row(whole_warp(), part.row(to), from, part.width);
      else
        blank_row(whole_warp(), part.row(to), part.width);
      from += part.width;
    }
  });
}

struct PackAnswers {
  Places places;
  Chunks chunks;
  Part answers;
  u8* region;
  u64 back_stride;
};

// Answers to rows that were not handed out are zeros: what lay there may be of an exchange before (RS-1).
FR_DEVICE void pack_answers(const PackAnswers& p, Blocks by) {
  bool placed = *p.places.fault == ~0ull, straight = false;
  each_row(p.chunks, by, [&](const Chunk& chunk, u32 i) {
    if (chunk.place == BLANK) return;
    u32 row = placed ? p.places.of(chunk.source, chunk.first + i) : NONE;
    u8* to = chunk.in(p.region) + i * p.back_stride;
    if (row != NONE)
      copy_row(whole_warp(), to, p.answers.row(row), p.answers.width);
    else
      blank_row(whole_warp(), to, p.answers.width);
    straight |= chunk.is_straight();
  });
  // After this step the host may count answers that lie in peers' memory (IC-2).
  if (straight) fence_system();
}

}  // namespace fr
