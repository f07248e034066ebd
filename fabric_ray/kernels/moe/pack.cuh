// Tokens to where they are sent from, or straight to where they go: the parts of a row behind one another, rows in the
// order of experts.
#pragma once

#include "common/blocks.cuh"
#include "common/rows.cuh"

namespace fr {

// Where a rank's rows go: so many first ones to an address at that rank, all others to this rank's own memory.
struct Way {
  u64 to;
  u64 rows;
};

struct PackRows {
  const u32* tokens;
  const u32* row_of;  // [tokens, topk]
  u32 max_tokens;
  u32 topk;
  u8* out;
  u64 row_stride;
  u32 parts;
  u32 unused;
  Part part[MAX_PARTS];
  const u32* first;  // [ranks + 1]: the first row for each
  const u64* ways;   // to how many ranks rows go straight, and the way to each; may be null: to none
  u32 ranks;
};

// The address that a row goes to; 0 if it goes nowhere.
FR_DEVICE u64 place_of(const PackRows& p, u32 row) {
  if (row == NONE) return 0;
  u64 home = address(p.out) + row * p.row_stride;
  if (p.ways == nullptr) return home;
  u32 rank = owner_of(p.first, p.ranks, row), i = row - p.first[rank];
  const Way way = reinterpret_cast<const Way*>(p.ways + 1)[rank];
  return i < way.rows ? way.to + i * p.row_stride : home;
}

// Each token is read once, and written for each of its experts.
FR_DEVICE void pack_rows(const PackRows& p, Blocks by) {
  FR_SHARED u64 places[MAX_TOPK];
  bool straight = p.ways != nullptr && p.ways[0] != 0;
  u32 tokens = *p.tokens < p.max_tokens ? *p.tokens : p.max_tokens;
  u32 unit = unit_of(address(p.out));
  for (u32 token = by.index; token < tokens; token += by.n) {
    sync_block();
    for (u32 k = thread(); k < p.topk; k += threads())
      places[k] = place_of(p, p.row_of[static_cast<u64>(token) * p.topk + k]);
    sync_block();
    u64 some = 0;
    for (u32 k = 0; k < p.topk; ++k) some |= places[k];
    if (some == 0) continue;
    const u64* of = places;
    auto at = [=](u32 k) { return of[k]; };
    u64 offset = 0;
    for (u32 i = 0; i < p.parts; ++i) {
      const Part& part = p.part[i];
      spread_row(whole_block(), part.row(token), part.width, at, p.topk, offset, unit);
      offset += part.width;
    }
  }
  // After this step the host may count rows that lie in peers' memory (IC-2).
  if (straight) fence_system();
}

}  // namespace fr
