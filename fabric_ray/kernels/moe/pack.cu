// Tokens to where they are sent from: the parts of a row behind one another, rows in the order of experts.
#include "common/rows.cuh"

using namespace fr;

constexpr u32 MAX_TOPK = 256;

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
};

// Each token is read once, and written for each of its experts.
FR_KERNEL(pack_rows, PackRows) {
  FR_SHARED u32 places[MAX_TOPK];
  u32 tokens = *p.tokens < p.max_tokens ? *p.tokens : p.max_tokens;
  for (u32 token = block(); token < tokens; token += blocks()) {
    sync_block();
    for (u32 k = thread(); k < p.topk; k += threads())
      places[k] = p.row_of[static_cast<u64>(token) * p.topk + k];
    sync_block();
    u8* to = p.out;
    for (u32 i = 0; i < p.parts; ++i) {
      const Part& part = p.part[i];
      spread_row(part.row(token), part.width, to, p.row_stride, places, p.topk);
      to += part.width;
    }
  }
}
