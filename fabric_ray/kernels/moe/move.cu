// Rows out of the memory they came to, to their experts; and the experts' answers back to where they are sent from, or
// straight to where they go.
#include "common/rows.cuh"
#include "moe/placing.cuh"

using namespace fr;

struct HandOut {
  Places places;
  Chunks chunks;
  const u8* region;
  u64 row_stride;
  u32 parts;
  u32 unused;
  Part part[MAX_PARTS];
};

// The grid's second dimension is for chunks, the first for the rows of each: a warp has a row, so that many rows are on
// their way at a time.
FR_KERNEL(hand_out, HandOut) {
  if (block_y() >= *p.chunks.n || *p.places.fault != ~0ull) return;
  const Chunk chunk = p.chunks.chunk[block_y()];
  Team team = whole_warp();
  for (u32 i = warp(); i < chunk.rows; i += blocks() * warps()) {
    u32 to = p.places.of(chunk.source, chunk.first + i);
    if (to == NONE) continue;
    const u8* from = p.region + chunk.place + i * p.row_stride;
    for (u32 j = 0; j < p.parts; ++j) {
      const Part& part = p.part[j];
      if (chunk.place == BLANK)
        blank_row(team, part.row(to), part.width);
      else
        copy_row(team, part.row(to), from, part.width);
      from += part.width;
    }
  }
}

struct PackAnswers {
  Places places;
  Chunks chunks;
  Part answers;
  u8* region;
  u64 back_stride;
};

FR_KERNEL(pack_answers, PackAnswers) {
  if (block_y() >= *p.chunks.n || *p.places.fault != ~0ull) return;
  const Chunk chunk = p.chunks.chunk[block_y()];
  if (chunk.place == BLANK) return;
  u8* to = chunk.in(p.region);
  for (u32 i = warp(); i < chunk.rows; i += blocks() * warps()) {
    u32 row = p.places.of(chunk.source, chunk.first + i);
    if (row != NONE) copy_row(whole_warp(), to + i * p.back_stride, p.answers.row(row), p.answers.width);
  }
  // After this step the host may count answers that lie in peers' memory (IC-2).
  if (chunk.is_straight()) fence_system();
}
