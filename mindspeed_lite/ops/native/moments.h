// bf16 and fp8 storage of Adam's moments, stochastically rounded (ops/adamw/moments.py).
#pragma once

#include "numbers.h"

constexpr int64_t BLOCK = 128;

struct Noise {
    uint32_t first, second;
};

// 16 random bits per moment, from a hash of both.
static inline Noise noise(uint32_t first, uint32_t second, uint32_t seed) {
    uint32_t x = (second * 0x9e3779b1u + first) ^ seed;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    x = x ^ x >> 16;
    return {x & 0xffffu, x >> 16};
}

static inline uint32_t size_of(float value) { return as_bits(value) & 0x7fffffffu; }

// NaN stays NaN.
static inline uint32_t bounded(uint32_t size) { return std::min(size, 0x7fc00000u); }

static inline void unpack(const uint16_t* first, const uint16_t* second, int64_t n, float* exp_avg, float* exp_avg_sq) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        exp_avg[i] = as_float(static_cast<uint32_t>(first[i]) << 16);
        exp_avg_sq[i] = as_float(static_cast<uint32_t>(second[i]) << 16);
    }
}

static inline void pack(const float* exp_avg, const float* exp_avg_sq, int64_t n, uint32_t seed, uint16_t* first,
                        uint16_t* second) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t m = size_of(exp_avg[i]), v = size_of(exp_avg_sq[i]);
        const Noise chance = noise(m, v, seed);
        first[i] = static_cast<uint16_t>((bounded(m) + chance.first) >> 16 | (as_bits(exp_avg[i]) >> 16 & 0x8000u));
        second[i] = static_cast<uint16_t>((bounded(v) + chance.second) >> 16 | (as_bits(exp_avg_sq[i]) >> 16 & 0x8000u));
    }
}

// cut: fp32 bits without codes; span: exponents below the largest with codes.
template <int cut, int span>
static inline float decoded(uint8_t code, uint8_t exponent) {
    const int32_t kept = code & 0x7f;
    const int32_t size = (kept << cut) + (exponent - span) * (1 << 23);
    const uint32_t bits = kept > 0 && size >= 1 << 23 ? static_cast<uint32_t>(size) : 0u;
    return as_float(bits | (code & 0x80u) << 24);
}

template <int cut, int span>
static inline uint8_t encoded(float value, uint32_t chance, uint8_t exponent, int32_t lowest) {
    const uint32_t size = size_of(value), drawn = bounded(size) + (chance << (cut - 16));
    const int32_t code = size >> 23 ? static_cast<int32_t>(drawn >> cut) - (exponent - span) * (1 << (23 - cut)) : 0;
    return static_cast<uint8_t>(std::min(std::max(code, lowest), 0x7f) | (as_bits(value) >> 24 & 0x80u));
}

// Block exponent: the power of two below its largest, unless rounding could reach the next.
template <int cut>
static inline uint8_t top_of(uint32_t largest) {
    return static_cast<uint8_t>((bounded(largest) + ((1u << cut) - 1u)) >> 23);
}

static inline void unpack(const uint8_t* first, const uint8_t* second, uint8_t exponent, uint8_t exponent_sq, int64_t n,
                          float* exp_avg, float* exp_avg_sq) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        exp_avg[i] = decoded<20, 15>(first[i], exponent);
        exp_avg_sq[i] = decoded<21, 31>(second[i], exponent_sq);
    }
}

static inline void pack(const float* exp_avg, const float* exp_avg_sq, int64_t n, uint32_t seed, uint8_t* first,
                        uint8_t* second, uint8_t* exponent, uint8_t* exponent_sq) {
    uint32_t largest = 0, largest_sq = 0;
#pragma omp simd reduction(max : largest, largest_sq)
    for (int64_t i = 0; i < n; ++i) {
        largest = std::max(largest, size_of(exp_avg[i]));
        largest_sq = std::max(largest_sq, size_of(exp_avg_sq[i]));
    }
    const uint8_t top = top_of<20>(largest), top_sq = top_of<21>(largest_sq);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t m = size_of(exp_avg[i]), v = size_of(exp_avg_sq[i]);
        const Noise chance = noise(m, v, seed);
        first[i] = encoded<20, 15>(exp_avg[i], chance.first, top, 0);
        second[i] = encoded<21, 31>(exp_avg_sq[i], chance.second, top_sq, v > 0 ? 1 : 0);
    }
    *exponent = top;
    *exponent_sq = top_sq;
}
