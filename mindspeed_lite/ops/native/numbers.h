// bf16 and vectorisable elementary functions for the CPU kernels.
//
// Branch-free and inline, so that `#pragma omp simd` vectorises for any target. The only intrinsics are AVX-512 BF16
// conversions, which compilers do not generate; kernels are compiled for the processor they run on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

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

// Nearest bf16 bits, ties to even as in PyTorch; NaN stays NaN (rounding could overflow it to infinity).
static inline uint32_t rounded(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    return (bits & 0x7fffffffu) > 0x7f800000u ? quiet : nearest;
}

static inline void store(bf16* p, float value) { p->bits = static_cast<uint16_t>(rounded(value)); }

// A row as bf16, 16 values per instruction with AVX-512 BF16 (which flushes subnormals to zero).
static inline void round_row(const float* from, int64_t count, bf16* to) {
    int64_t done = 0;
#ifdef __AVX512BF16__
    for (; done + 16 <= count; done += 16) {
        const __m256i low = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + done));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + done), low);
    }
#endif
#pragma omp simd
    for (int64_t i = done; i < count; ++i) store(to + i, from[i]);
}

static inline void round_row(const float* from, int64_t count, float* to) { std::copy(from, from + count, to); }

// Two rows as bf16, interleaved: first[0], second[0], first[1], ...
static inline void round_pairs(const float* first, const float* second, int64_t count, bf16* to) {
    int64_t done = 0;
#ifdef __AVX512BF16__
    for (; done + 16 <= count; done += 16) {
        const __m256i low = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(first + done));
        const __m256i high = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(second + done));
        const __m512i shifted = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
        _mm512_storeu_si512(to + 2 * done, _mm512_or_si512(_mm512_cvtepu16_epi32(low), shifted));
    }
#endif
#pragma omp simd
    for (int64_t i = done; i < count; ++i) {
        const uint32_t both = rounded(first[i]) | rounded(second[i]) << 16;
        to[2 * i].bits = static_cast<uint16_t>(both);
        to[2 * i + 1].bits = static_cast<uint16_t>(both >> 16);
    }
}

// e^x within 2 ulp; 0 below -87.34, infinity above 88.72, NaN stays NaN.
//
// x = n ln 2 + r, |r| <= ln 2 / 2 (ln 2 in two parts keeps r exact); Taylor polynomial of degree 7 for e^r, remainder
// below 2^-27; n is added to the exponent.
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

// Argument bounds of `exp2_`, made once before a loop and read from memory: constants would let the compiler branch, a
// third slower.
struct PowerBounds {
    float least, most;
    PowerBounds() {
        const volatile float known[] = {-127.0f, 128.0f};
        least = known[0], most = known[1];
    }
};

// 2^x within 2 ulp; 0 from -127 down, infinity above 127.5, NaN stays NaN.
//
// Adding 1.5 * 2^23 + 127 rounds x to n and leaves 2^n's exponent n + 127 in the low bits. Minimax polynomial of degree
// 6 over [-1/2, 1/2], relative error 2^-28.
static inline float exp2_(float x, const PowerBounds bounds) {
    const float magic = 12583039.0f;
    const float above = x < bounds.least ? bounds.least : x, y = above > bounds.most ? bounds.most : above;
    const float shifted = y + magic, r = y - (shifted - magic), square = r * r;
    const float low = 6.93147203e-1f * r + 1.0f, middle = 5.55033247e-2f * r + 2.40226479e-1f;
    const float high = 1.53533619e-4f * square + (1.33988744e-3f * r + 9.61843736e-3f);
    return ((high * square + middle) * square + low) * as_float(as_bits(shifted) << 23);
}
