// Numbers for the CPU kernels: bfloat16 beside float, and elementary functions that a compiler can vectorise.
//
// Everything here is branch-free and inline, so that `#pragma omp simd` over a loop of calls becomes vector code on
// whatever the compiler was told the machine has; there is no intrinsic and no assumption about the width.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

struct bf16 {
    uint16_t bits;
};

static inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float load(const float* p) { return *p; }
static inline float load(const bf16* p) { return as_float(static_cast<uint32_t>(p->bits) << 16); }

static inline void store(float* p, float value) { *p = value; }

// The bits of the nearest bf16, ties to even as in PyTorch; a NaN stays one (rounding could carry it over to infinity).
static inline uint32_t rounded(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    return (bits & 0x7fffffffu) > 0x7f800000u ? quiet : nearest;
}

static inline void store(bf16* p, float value) { p->bits = static_cast<uint16_t>(rounded(value)); }

// e^x within 2 units in the last place; 0 below -87.34, infinity above 88.72, NaN stays NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts, so that r is exact), e^r as its Taylor polynomial of degree
// 7, whose remainder is below 2^-27, and n added to its exponent.
static inline float exp_(float x) {
    const float bounded = x < -87.5f ? -87.5f : (x > 89.0f ? 89.0f : x);
    const float n = std::rint(bounded * 1.44269504088896341f);
    float r = bounded - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723e-6f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t exponent = static_cast<int32_t>(x == x ? n : 0.0f);
    const float value = as_float(as_bits(p) + (static_cast<uint32_t>(exponent) << 23));
    return x < -87.33654f ? 0.0f : (x > 88.72283f ? std::numeric_limits<float>::infinity() : (x == x ? value : x));
}

// 1 / (1 + e^-x).
static inline float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

// (e^2x - 1) / (e^2x + 1), and its odd Taylor polynomial near zero, where that difference would cancel.
static inline float tanh_(float x) {
    const float e = exp_(2.0f * std::fabs(x));
    const float far = 1.0f - 2.0f / (e + 1.0f);
    const float s = x * x;
    const float near =
        std::fabs(x) *
        (1.0f + s * (-1.0f / 3.0f + s * (2.0f / 15.0f + s * (-17.0f / 315.0f + s * (62.0f / 2835.0f)))));
    const float size = std::fabs(x) < 0.25f ? near : far;
    return x == x ? std::copysign(size, x) : x;
}
