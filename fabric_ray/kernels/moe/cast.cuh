// Tokens to e4m3 with a scale for each block of elements, bit by bit as fabric_ray/moe/cast.py does it.
#pragma once

#include "common/blocks.cuh"
#include "common/floats.cuh"
#include "common/rows.cuh"

namespace fr {

enum ScaleFormat : u32 {
  SCALE_F32 = 0,       // the largest magnitude by 448
  SCALE_F32_POW2 = 1,  // rounded up to a power of two
  SCALE_E8M0 = 2,      // its exponent alone; four of them are one packed word
};

struct CastRows {
  Part from;  // bfloat16
  Part to;
  Part scales;
  u32 tokens;
  u32 each;  // elements that share a scale: a warp's threads, or a multiple
  u32 format;
  u32 unused;
};

FR_DEVICE u32 largest_of_warp(u32 value) {
  for (u32 step = WARP / 2; step != 0; step /= 2) {
    u32 other = shuffle(value, lane() ^ step);
    if (other > value) value = other;
  }
  return value;
}

// The biased exponent of the least power of two that isn't below; 255 for what isn't finite.
FR_DEVICE u32 round_up(float scale) {
  u32 bits = bits_of(scale), exponent = (bits >> 23 & 0xffu) + ((bits & 0x7fffffu) != 0);
  return exponent < 255 ? exponent : 255;
}

// A warp has a block of elements. Beside an infinity or what isn't a number, no element is one.
FR_DEVICE void cast_rows(const CastRows& p, Blocks by) {
  constexpr u32 LEAST = 0x38d1b717u;  // 1e-4
  u32 width = p.from.width / sizeof(Bf16::Bits), of_token = width / p.each;
  u64 n = static_cast<u64>(p.tokens) * of_token, all = static_cast<u64>(by.n) * warps();
  for (u64 i = static_cast<u64>(by.index) * warps() + thread() / WARP; i < n; i += all) {
    u32 token = i / of_token, place = i % of_token;
    auto in = reinterpret_cast<const Bf16::Bits*>(p.from.row(token)) + place * p.each;
    u32 most = LEAST;
    for (u32 e = lane(); e < p.each; e += WARP) {
      u32 size = bits_of(Bf16::read(in[e])) & 0x7fffffffu;
      if (size > most) most = size;
    }
    float amax = float_of(largest_of_warp(most));
    float scale = multiply(amax, static_cast<float>(1.0 / 448)), factor = divide(448.0f, amax);
    u32 exponent = round_up(scale);
    bool whole = p.format != SCALE_F32;
    if (whole) scale = float_of(exponent << 23);
    u8* out = p.to.row(token) + place * p.each;
    for (u32 e = lane(); e < p.each; e += WARP) {
      float value = Bf16::read(in[e]);
      out[e] = float_to_e4m3(whole ? divide(value, scale) : multiply(value, factor));
    }
    if (lane() != 0) continue;
    if (p.format == SCALE_E8M0)
      p.scales.row(token)[place] = static_cast<u8>(exponent);
    else
      reinterpret_cast<float*>(p.scales.row(token))[place] = scale;
  }
}

}  // namespace fr
