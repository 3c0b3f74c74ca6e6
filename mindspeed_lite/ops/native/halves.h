// fp32 as bf16 rounded to nearest even, 16 low bits and one more (ops/adamw/halves.py).
#pragma once

#include "numbers.h"

struct Halves {
    uint32_t high, low, bit;
};

static inline Halves split(float value) {
    const uint32_t bits = as_bits(value), away = bits + 0x8000u, low = away & 0xffffu;
    // 0xffff for a zero low half: a tie.
    const uint32_t tie = (low - 1u) >> 16;
    const uint32_t bit = (tie & (away >> 16) & 1u) | (away ^ bits) >> 31;
    return {((away >> 16) - bit) & 0xffffu, low, bit};
}

static inline float join(const Halves halves) {
    return as_float(((halves.high + halves.bit) << 16 | halves.low) - 0x8000u);
}
