// The floating-point formats of answers, as the host's kernels have them.
#pragma once

#include "common/vendor.cuh"

namespace fr {

struct F32 {
  typedef u32 Bits;
  FR_DEVICE static float read(Bits bits) { return float_of(bits); }
  FR_DEVICE static Bits write(float value) { return bits_of(value); }
};

struct F16 {
  typedef u16 Bits;
  FR_DEVICE static float read(Bits bits) { return half_to_float(bits); }
  FR_DEVICE static Bits write(float value) { return float_to_half(value); }
};

struct Bf16 {
  typedef u16 Bits;
  FR_DEVICE static float read(Bits bits) { return float_of(static_cast<u32>(bits) << 16); }

  // To nearest, ties to even; what isn't a number stays none.
  FR_DEVICE static Bits write(float value) {
    u32 bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Bits>(bits >> 16 | 0x40u);
    return static_cast<Bits>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
};

// e4m3 with neither infinities nor a second zero: to nearest, ties to even; beyond 448, and of what isn't a number, none.
FR_DEVICE u8 float_to_e4m3(float value) {
  constexpr u32 NOT_A_NUMBER = 0x7f, BEYOND = 0x43f00000u;  // 480
  // The least one with a full mantissa, 2^-6; and what moves smaller ones to where a float counts in 2^-9.
  constexpr u32 LEAST = 121u << 23, MOVED = 141u << 23;
  u32 bits = bits_of(value), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
  if (size >= BEYOND) return static_cast<u8>(sign | NOT_A_NUMBER);
  if (size < LEAST)
    return static_cast<u8>(sign | (bits_of(add(float_of(size), float_of(MOVED))) - MOVED));
  size += 0x7ffffu + (size >> 20 & 1u);
  return static_cast<u8>(sign | ((size >> 20) - (120u << 3)));
}

}  // namespace fr
