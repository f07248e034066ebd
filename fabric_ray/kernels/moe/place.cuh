// From the rows that each source has for each local expert to where every row goes.
#pragma once

#include "common/scan.cuh"
#include "moe/placing.cuh"

namespace fr {

// A fault has its kind in the upper half and the rank or expert in the lower; the lowest is reported.
enum PlaceFault : u64 { SOURCE_HAS_TOO_MANY = 1, EXPERT_GETS_TOO_MANY = 2, NO_ROOM = 3 };

struct Incoming {
  const u32* counts;  // of each source, its rows for each local expert
  u64 stride;         // words from one source's to the next
  u32 sources;
  u32 experts;
  u32 multiple;  // rows of each expert are filled up to a multiple of it,
  u32 each;      // or each begins at a multiple of this many, if it isn't 0
  u32 most;      // rows that a source can have
  u32 room;      // rows that there is room for
  u32* from;     // [sources, experts + 1]
  u32* to;       // [sources, experts]
  u32* totals;   // [experts]
  u32* starts;   // [experts + 1]: the first row of each expert, and all
  u64* fault;
  i64* wide_totals;  // [experts], [experts]: totals and the first row of each once more; may be null
  i64* wide_starts;
  u32* given;   // [experts]: totals once more; may be null
  u64* layout;  // [experts, sources]: a source's rows of an expert and, in the upper half, the first of
                // them among the expert's, or zero; with `each` alone; may be null
};

// Counts that a thread has on their way at a time.
constexpr u32 COUNTS_AHEAD = 16;

// Calls `each(i, n)` for `n` words, `stride` words apart.
template <class Each>
FR_DEVICE void each_word(const u32* words, u64 stride, u32 n, Each each) {
  for (u32 i = 0; i < n; i += COUNTS_AHEAD) {
    u32 ahead[COUNTS_AHEAD];
#pragma unroll
    for (u32 j = 0; j < COUNTS_AHEAD; ++j) ahead[j] = i + j < n ? words[(i + j) * stride] : 0;
#pragma unroll
    for (u32 j = 0; j < COUNTS_AHEAD; ++j)
      if (i + j < n) each(i + j, ahead[j]);
  }
}

FR_DEVICE u64 fault_of(PlaceFault kind, u32 value) { return u64(kind) << 32 | value; }

// What a peer says it sends is checked before anything is moved by it. One block.
FR_DEVICE void place_rows(const Incoming& p) {
  FR_SHARED u64 lowest;
  sync_block();
  if (thread() == 0) lowest = NO_FAULT;
  sync_block();
  for (u32 source = thread(); source < p.sources; source += threads()) {
    const u32* counts = p.counts + source * p.stride;
    u32* from = p.from + static_cast<u64>(source) * (p.experts + 1);
    u64 sum = 0;
    each_word(counts, 1, p.experts, [&](u32 expert, u32 n) {
      from[expert] = static_cast<u32>(sum);
      sum += n;
    });
    from[p.experts] = static_cast<u32>(sum);
    if (sum > p.most) atomic_min(&lowest, fault_of(SOURCE_HAS_TOO_MANY, source));
  }
  for (u32 expert = thread(); expert < p.experts; expert += threads()) {
    u64 sum = 0;
    each_word(p.counts + expert, p.stride, p.sources, [&](u32 source, u32 n) {
      p.to[static_cast<u64>(source) * p.experts + expert] = static_cast<u32>(sum);
      sum += n;
    });
    p.totals[expert] = static_cast<u32>(sum);
    if (p.each != 0 && sum > p.each) atomic_min(&lowest, fault_of(EXPERT_GETS_TOO_MANY, expert));
  }
  sync_block();
  const u32* totals = p.totals;
  u32 multiple = p.multiple > 1 ? p.multiple : 1, each = p.each;
  auto size = [=](u32 i) {
    return each != 0 ? each : (totals[i] + multiple - 1) / multiple * multiple;
  };
  running_sums(p.experts, size, p.starts);
  for (u64 i = thread(); i < static_cast<u64>(p.sources) * p.experts; i += threads()) {
    u32 expert = i % p.experts, source = i / p.experts;
    if (p.layout) {
      u64 rows = p.counts[source * p.stride + expert];
      p.layout[static_cast<u64>(expert) * p.sources + source] = rows ? static_cast<u64>(p.to[i]) << 32 | rows : 0;
    }
    p.to[i] += p.starts[expert];
  }
  for (u32 expert = thread(); expert < p.experts; expert += threads()) {
    if (p.wide_totals) p.wide_totals[expert] = totals[expert];
    if (p.wide_starts) p.wide_starts[expert] = p.starts[expert];
    if (p.given) p.given[expert] = totals[expert];
  }
  if (thread() != 0) return;
  u64 fault = lowest, rows = static_cast<u64>(each) * p.experts;
  if (each == 0)
    each_word(totals, 1, p.experts, [&](u32, u32 n) { rows += (n + multiple - 1) / multiple * multiple; });
  if (fault == NO_FAULT && rows > p.room) fault = fault_of(NO_ROOM, static_cast<u32>(rows));
  *p.fault = fault;
}

}  // namespace fr
