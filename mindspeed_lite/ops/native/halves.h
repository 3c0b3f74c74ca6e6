// An fp32 number as a bf16 number, rounded to nearest even, 16 bits and one (ops/adamw/halves.py).
#pragma once

#include "numbers.h"

struct Halves {
    uint32_t high, low, bit;
};

static inline Halves split(float value) {
    const uint32_t bits = as_bits(value), away = bits + 0x8000u, low = away & 0xffffu;
    // 0xffff where the low half is zero: a tie.
    const uint32_t tie = (low - 1u) >> 16;
    const uint32_t bit = (tie & (away >> 16) & 1u) | (away ^ bits) >> 31;
    return {((away >> 16) - bit) & 0xffffu, low, bit};
}

static inline float join(const Halves halves) {
    return as_float(((halves.high + halves.bit) << 16 | halves.low) - 0x8000u);
}
