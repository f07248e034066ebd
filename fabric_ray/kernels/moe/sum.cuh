// The weighted sum of the answers to each token: in 32-bit floats, products and sums rounded one by one, in the order
// of a token's experts. The same bits as native/moe's, for any number of ranks.
#pragma once

#include "common/blocks.cuh"
#include "common/floats.cuh"
#include "common/rows.cuh"

namespace fr {

struct WeightedSum {
  const u8* answers;  // of each of this rank's rows
  u64 answers_stride;
  const u32* tokens;
  const u32* row_of;  // [tokens, topk]
  u32 max_tokens;
  u32 topk;
  u32 elements;
  u32 ranks;
  const u32* first;       // [ranks + 1]
  const u8* missing;      // of each rank; null if none is
  const float* weights;   // [tokens, topk]; null for one each
  u64 weights_stride;     // bytes
  u8* out;
  u64 out_stride;
  const u8* wanted;    // [tokens, topk]: zero for answers that aren't summed; may be null
  const i64* experts;  // [tokens, topk]: below zero for answers that aren't summed; may be null

  FR_DEVICE bool wants(u64 i) const {
    return !(wanted && wanted[i] == 0) && !(experts && experts[i] < 0);
  }
};

// An answer that counts.
struct Term {
  const u8* answer;
  float weight;
};

FR_DEVICE bool is_missing(const WeightedSum& p, u32 row) {
  return p.missing && p.missing[owner_of(p.first, p.ranks, row)] != 0;
}

// A token's terms in the order of its experts, and how many.
struct Terms {
  const Term* each;
  u32 n;
};

FR_DEVICE Terms gather(const WeightedSum& p, u32 token) {
  FR_SHARED u32 rows[MAX_TOPK];
  FR_SHARED Term terms[MAX_TOPK];
  sync_block();
  for (u32 k = thread(); k < p.topk; k += threads()) {
    u64 i = static_cast<u64>(token) * p.topk + k;
    u32 row = p.row_of[i];
    rows[k] = row != NONE && (is_missing(p, row) || !p.wants(i)) ? NONE : row;
  }
  sync_block();
  const u8* weights = reinterpret_cast<const u8*>(p.weights) + token * p.weights_stride;
  for (u32 k = thread(); k < p.topk; k += threads()) {
    if (rows[k] == NONE) continue;
    u32 place = 0;
    for (u32 before = 0; before < k; ++before) place += rows[before] != NONE;
    float weight = p.weights ? reinterpret_cast<const float*>(weights)[k] : 1.0f;
    terms[place] = Term{p.answers + rows[k] * p.answers_stride, weight};
  }
  u32 n = 0;
  for (u32 k = 0; k < p.topk; ++k) n += rows[k] != NONE;
  sync_block();
  return Terms{terms, n};
}

// Answers of a token that are on their way at a time.
constexpr u32 ANSWERS_AHEAD = 8;

// 16 bytes of answers at a time.
template <class In, class Out>
FR_DEVICE void sum_units(const Term* terms, u32 n, u8* out, u32 units) {
  constexpr u32 EACH = 16 / sizeof(typename In::Bits);
  union Unit {
    Vec16 whole;
    typename In::Bits each[EACH];
  };
  constexpr u32 WHOLE = EACH * sizeof(typename Out::Bits);
  union Sums {
    Vec8 half;
    Vec16 whole[WHOLE / 16 ? WHOLE / 16 : 1];
    typename Out::Bits each[EACH];
  };
  for (u32 i = thread(); i < units; i += threads()) {
    float sum[EACH] = {};
    for (u32 first = 0; first < n; first += ANSWERS_AHEAD) {
      Unit ahead[ANSWERS_AHEAD];
#pragma unroll
      for (u32 j = 0; j < ANSWERS_AHEAD; ++j)
        if (first + j < n)
          ahead[j].whole = load_stream(reinterpret_cast<const Vec16*>(terms[first + j].answer) + i);
#pragma unroll
      for (u32 j = 0; j < ANSWERS_AHEAD; ++j) {
        if (first + j >= n) break;
#pragma unroll
        for (u32 e = 0; e < EACH; ++e)
          sum[e] = add(sum[e], multiply(terms[first + j].weight, In::read(ahead[j].each[e])));
      }
    }
    Sums sums;
#pragma unroll
    for (u32 e = 0; e < EACH; ++e) sums.each[e] = Out::write(sum[e]);
    if constexpr (WHOLE == 8)
      reinterpret_cast<Vec8*>(out)[i] = sums.half;
    else
#pragma unroll
      for (u32 w = 0; w < WHOLE / 16; ++w)
        store_stream(reinterpret_cast<Vec16*>(out) + i * (WHOLE / 16) + w, sums.whole[w]);
  }
}

template <class In, class Out>
FR_DEVICE void sum_elements(const Term* terms, u32 n, u8* out, u32 begin, u32 end) {
  for (u32 i = begin + thread(); i < end; i += threads()) {
    float sum = 0.0f;
    for (u32 j = 0; j < n; ++j) {
      auto bits = reinterpret_cast<const typename In::Bits*>(terms[j].answer)[i];
      sum = add(sum, multiply(terms[j].weight, In::read(bits)));
    }
    reinterpret_cast<typename Out::Bits*>(out)[i] = Out::write(sum);
  }
}

template <class In, class Out>
FR_DEVICE void sum_answers(const WeightedSum& p, Blocks by) {
  constexpr u32 EACH = 16 / sizeof(typename In::Bits);
  u32 tokens = *p.tokens < p.max_tokens ? *p.tokens : p.max_tokens;
  u64 places = address(p.answers) | p.answers_stride | address(p.out) | p.out_stride;
  u32 units = unit_of(places) == 16 ? p.elements / EACH : 0;
  for (u32 token = by.index; token < tokens; token += by.n) {
    Terms of = gather(p, token);
    u8* out = p.out + token * p.out_stride;
    sum_units<In, Out>(of.each, of.n, out, units);
    sum_elements<In, Out>(of.each, of.n, out, units * EACH, p.elements);
  }
}

}  // namespace fr
