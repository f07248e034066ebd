// Which row goes where: rows in the order of experts, and among those of one expert in the order of tokens, as
// native/moe's `Routes` has them (fabric-lib §6.2).
//
// A stable counting sort over tiles of (token, k): the count of each tile, the sums over tiles and over experts, and
// each row's place. No sum depends on which thread came first.
#pragma once

#include "common/blocks.cuh"
#include "common/scan.cuh"

namespace fr {

constexpr u32 TILE = 256;

// A fault is four times its position among (token, k), and one of these; the lowest is told.
enum RouteFault : u64 { TOO_MANY_TOKENS = 0, NO_SUCH_EXPERT = 1, TWICE = 2 };

struct Routing {
  const i64* indices;  // [tokens, topk]; -1 for none
  const u32* tokens;
  u32 topk;
  u32 experts;
  u32 ranks;
  u32 max_tokens;
  u32* tile_counts;  // [tiles, experts]
  u64* tile_faults;  // [tiles]
  u32* counts;       // [experts]
  u32* starts;       // [experts + 1]
  u32* first;        // [ranks + 1]
  u32* token_of;     // of each row
  u32* row_of;       // [tokens, topk]
  u64* fault;
  i64* kept;  // takes the indices; may be null

  FR_DEVICE u32 present() const { return *tokens < max_tokens ? *tokens : max_tokens; }
  FR_DEVICE u64 elements() const { return static_cast<u64>(present()) * topk; }
  FR_DEVICE u64 tiles() const { return (elements() + TILE - 1) / TILE; }
};

// The expert at a position, or NONE: there is none, or it can't be, and then `fault` says so.
FR_DEVICE u32 expert_at(const Routing& p, u64 i, u64* fault) {
  i64 expert = p.indices[i];
  if (expert == -1) return NONE;
  if (expert < 0 || expert >= p.experts) {
    *fault = i * 4 + NO_SUCH_EXPERT;
    return NONE;
  }
  for (u64 before = i - i % p.topk; before < i; ++before)
    if (p.indices[before] == expert) {
      *fault = i * 4 + TWICE;
      return NONE;
    }
  return static_cast<u32>(expert);
}

// How many rows of a tile go to each expert, and each one's place among them.
FR_DEVICE void count_tile(const Routing& p, u64 tile) {
  FR_SHARED u32 experts[TILE];
  FR_SHARED u64 lowest;
  u64 begin = tile * TILE, n = p.elements();
  u32* counts = p.tile_counts + tile * p.experts;
  sync_block();
  for (u32 expert = thread(); expert < p.experts; expert += threads()) counts[expert] = 0;
  if (thread() == 0) lowest = NO_FAULT;
  sync_block();
  for (u32 j = thread(); j < TILE; j += threads()) {
    u64 fault = NO_FAULT;
    experts[j] = begin + j < n ? expert_at(p, begin + j, &fault) : NONE;
    if (fault != NO_FAULT) atomic_min(&lowest, fault);
  }
  sync_block();
  for (u32 j = thread(); j < TILE && begin + j < n; j += threads()) {
    u32 expert = experts[j], before = 0;
    if (expert != NONE) {
      for (u32 m = 0; m < j; ++m) before += experts[m] == expert;
      atomic_add(counts + expert, 1u);
    }
    p.row_of[begin + j] = expert == NONE ? NONE : before;
  }
  if (thread() == 0) p.tile_faults[tile] = lowest;
}

FR_DEVICE void count_routes(const Routing& p, Blocks by) {
  for (u64 tile = by.index; tile < p.tiles(); tile += by.n) count_tile(p, tile);
}

// Tiles whose counts a thread has on their way at a time.
constexpr u32 TILES_AHEAD = 8;

// Calls `each(place, n)` for the counts of one expert in some tiles, in their order.
template <class Each>
FR_DEVICE void each_tile(const Routing& p, u32 expert, u64 begin, u64 end, Each each) {
  u32* counts = p.tile_counts + expert;
  for (u64 tile = begin; tile < end; tile += TILES_AHEAD) {
    u32 n[TILES_AHEAD];
#pragma unroll
    for (u32 j = 0; j < TILES_AHEAD; ++j) n[j] = tile + j < end ? counts[(tile + j) * p.experts] : 0;
#pragma unroll
    for (u32 j = 0; j < TILES_AHEAD; ++j)
      if (tile + j < end) each(counts + (tile + j) * p.experts, n[j]);
  }
}

// For each tile and expert the rows of that expert in tiles before, and all rows of each. A thread has one expert and a
// part of the tiles.
FR_DEVICE void sum_tiles(const Routing& p) {
  FR_SHARED u32 sums[MAX_THREADS];
  u64 tiles = p.tiles();
  u32 wide = p.experts < threads() ? p.experts : threads(), parts = threads() / wide;
  u32 part = thread() / wide, column = thread() % wide;
  u64 each = (tiles + parts - 1) / parts;
  u64 begin = part * each < tiles ? part * each : tiles;
  u64 end = begin + each < tiles ? begin + each : tiles;
  for (u32 first = 0; first < p.experts; first += wide) {
    u32 expert = first + column, sum = 0, before = 0, all = 0;
    bool there = part < parts && expert < p.experts;
    if (there) each_tile(p, expert, begin, end, [&](u32*, u32 n) { sum += n; });
    sync_block();
    sums[thread()] = sum;
    sync_block();
    if (!there) continue;
    for (u32 i = 0; i < parts; ++i) {
      u32 n = sums[i * wide + column];
      if (i < part) before += n;
      all += n;
    }
    each_tile(p, expert, begin, end, [&](u32* place, u32 n) {
      *place = before;
      before += n;
    });
    if (part == 0) p.counts[expert] = all;
  }
}

// One block.
FR_DEVICE void sum_routes(const Routing& p) {
  FR_SHARED u64 lowest;
  sync_block();
  if (thread() == 0) lowest = *p.tokens > p.max_tokens ? u64(TOO_MANY_TOKENS) : NO_FAULT;
  sum_tiles(p);
  sync_block();
  for (u64 tile = thread(); tile < p.tiles(); tile += threads())
    if (p.tile_faults[tile] != NO_FAULT) atomic_min(&lowest, p.tile_faults[tile]);
  const u32* counts = p.counts;
  running_sums(p.experts, [=](u32 i) { return counts[i]; }, p.starts);
  u32 local = p.experts / p.ranks;
  for (u32 rank = thread(); rank <= p.ranks; rank += threads()) p.first[rank] = p.starts[rank * local];
  if (thread() == 0) *p.fault = lowest;
}

FR_DEVICE void place_routes(const Routing& p, Blocks by) {
  u64 n = p.elements(), all = static_cast<u64>(by.n) * threads();
  for (u64 i = static_cast<u64>(by.index) * threads() + thread(); i < n; i += all) {
    if (p.kept) p.kept[i] = p.indices[i];
    if (p.row_of[i] == NONE) continue;
    u64 expert = p.indices[i];
    u32 row = p.starts[expert] + p.tile_counts[i / TILE * p.experts + expert] + p.row_of[i];
    p.row_of[i] = row;
    p.token_of[row] = static_cast<u32>(i / p.topk);
  }
}

}  // namespace fr
