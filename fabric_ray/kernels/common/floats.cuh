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

}  // namespace fr
