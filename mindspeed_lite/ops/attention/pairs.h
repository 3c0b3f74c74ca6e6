// Small products of bf16 in the processor's own instructions (AVX-512 BF16), and what comes between two of them.
//
// Such a product is C += A B in registers: 4 rows of C by a few vectors of 16 columns, and what is summed over in pairs
// of neighbours (`Pair`), of which an instruction takes 16. Elements of A are broadcast from wherever they lie; B has rows
// of 64 columns. One row of 64 is a panel's, so that a panel lies in the first-level cache as a whole.
//
// A processor with a matrix unit multiplies many times faster with that, and does without this file.
#pragma once

#include "pieces.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__) && !defined(PRODUCTS_OF_ONEDNN)
#define MULTIPLIES_PAIRS

namespace {

// Two neighbours, of the numbers that are summed over.
struct Pair {
    bf16 halves[2];
};

Pair* as_pairs(bf16* p) { return reinterpret_cast<Pair*>(p); }

constexpr int64_t LANES = 16, ROWS = 4, PANEL_LANES = 64;

#define INLINE [[gnu::always_inline]] inline

template <int C>
INLINE void clear(__m512 (&c)[ROWS][C]) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < C; ++i) c[r][i] = _mm512_setzero_ps();
}

// c[r][i] += the sum over `depth` pairs j of a[r * row + j * step] . b[j * ld + i].
template <int C>
INLINE void multiply_add(__m512 (&c)[ROWS][C], int64_t depth, const Pair* a, int64_t row, int64_t step, const Pair* b,
                         int64_t ld) {
    for (int64_t j = 0; j < depth; ++j, a += step, b += ld) {
        __m512i right[C];
#pragma GCC unroll 4
        for (int i = 0; i < C; ++i) right[i] = _mm512_load_si512(b + i * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            int32_t bits;
            std::memcpy(&bits, a + r * row, sizeof bits);
            const __m512i left = _mm512_set1_epi32(bits);
#pragma GCC unroll 4
            for (int i = 0; i < C; ++i) c[r][i] = _mm512_dpbf16_ps(c[r][i], (__m512bh)left, (__m512bh)right[i]);
        }
    }
}

// c [4][16 C] += A B in memory; see `multiply_add`. As a function of its own it has all registers.
template <int C>
[[gnu::noinline]] void add_product(float* c, int64_t ld_c, int64_t depth, const Pair* a, int64_t row, int64_t step,
                                   const Pair* b, int64_t ld) {
    __m512 sums[ROWS][C];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < C; ++i) sums[r][i] = _mm512_load_ps(c + r * ld_c + i * LANES);
    multiply_add(sums, depth, a, row, step, b, ld);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < C; ++i) _mm512_store_ps(c + r * ld_c + i * LANES, sums[r][i]);
}

// 2^x; 0 from -127 down, NaN stays NaN. Without a `bound` above, x is at most 127.
//
// Adding 1.5 * 2^23 rounds x to n and leaves n in the low bits, from where it is added to the exponent of the polynomial:
// that gives 0 for -127 since the polynomial is 1 at 0, and infinity for 128. Of those with that value it is the one of
// degree 5 whose largest relative error over [-1/2, 1/2] is least, 2^-23.
template <bool bound>
INLINE __m512 power(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.0f);
    // The second operand where one is NaN.
    x = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);
    if (bound) x = _mm512_min_ps(_mm512_set1_ps(128.0f), x);
    const __m512 shifted = _mm512_add_ps(x, magic), r = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
    __m512 p = _mm512_set1_ps(1.32647366e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.67151672e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.55073358e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40222424e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93147004e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return (__m512)_mm512_add_epi32((__m512i)p, _mm512_slli_epi32((__m512i)shifted, 23));
}

// first, first + 1, ... in the lower halves of words and second, second + 1, ... in the upper ones.
INLINE __m512i alternating(int32_t first, int32_t second) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
    return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(second)), 16));
}

// 32 neighbours, rounded.
INLINE __m512i rounded_row(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// Of two rows that are summed over, 16 columns, rounded: pairs.
INLINE __m512i rounded_pairs(__m512 first, __m512 second) {
    return _mm512_permutexvar_epi16(alternating(0, LANES), rounded_row(first, second));
}

// Of two rows that are summed over, rounded already: the pairs of columns 16 * half to 16 * half + 15.
template <int half>
INLINE __m512i pairs_of(__m512i first, __m512i second) {
    return _mm512_permutex2var_epi16(first, alternating(half * LANES, 32 + half * LANES), second);
}

// The rows [height][size] as A with `height` summed over: pairs of rows, four columns side by side,
// [size / 4][height / 2][4].
inline void pack_left(const bf16* from, int64_t height, int64_t size, Pair* to) {
    for (int64_t j = 0; j < size; j += ROWS, to += height / 2 * ROWS) {
        const int64_t width = std::min(size - j, ROWS);
        for (int64_t row = 0; row < height; row += 2) {
            const bf16* line = from + row * size + j;
            int64_t first = 0, second = 0;
            if (width == ROWS) {
                std::memcpy(&first, line, sizeof first), std::memcpy(&second, line + size, sizeof second);
            } else {
                std::memcpy(&first, line, width * sizeof *line), std::memcpy(&second, line + size, width * sizeof *line);
            }
            const __m128i both = _mm_unpacklo_epi16(_mm_cvtsi64_si128(first), _mm_cvtsi64_si128(second));
            _mm_store_si128(reinterpret_cast<__m128i*>(to + row / 2 * ROWS), both);
        }
    }
}

// The rows [height][size] as B with `height` summed over, panel by panel: [size / 64][height / 2][64].
inline void pack_right(const bf16* from, int64_t height, int64_t size, Pair* to) {
    for (int64_t j = 0; j < size; j += PANEL_LANES, to += height / 2 * PANEL_LANES) {
        const int64_t width = std::min(size - j, PANEL_LANES);
        for (int64_t row = 0; row < height; row += 2) {
            const bf16* line = from + row * size + j;
            pack_rows(line, line + size, width, reinterpret_cast<bf16*>(to + row / 2 * PANEL_LANES));
        }
    }
}

// The lowest `count` bits.
inline uint64_t ones(int64_t count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

// Bit q of 64: whether query q0 + q sees `key`, by position and by the mask of its head.
inline uint64_t seen(const Call<bf16>& call, const uint8_t* mask, int64_t key, int64_t q0) {
    if (key >= call.sk) return 0;
    const int64_t from = std::clamp<int64_t>(call.first_query(key) - q0, 0, 64);
    const int64_t to = std::clamp<int64_t>(std::min(call.end_query(key + 1), call.sq) - q0, from, 64);
    uint64_t bits = ones(to) & ~ones(from);
    for (int64_t q = from; mask && q < to; ++q) {
        const bool hidden = mask[(q0 + q) * call.mask_q + key * call.mask_k];
        bits &= ~(uint64_t{hidden} << q);
    }
    return bits;
}

// Bit q of `count`: whether dropout keeps the probability of `key` for the query `place` + q of all heads.
template <int count>
inline uint64_t kept(const Call<bf16>& call, int64_t place, int64_t key) {
    alignas(64) uint32_t drawn[count];
#pragma omp simd
    for (int64_t q = 0; q < count; ++q) {
        drawn[q] = draw(call.seed, static_cast<uint32_t>(place + q), static_cast<uint32_t>(key));
    }
    uint64_t bits = 0;
    for (int q = 0; q < count; q += LANES) {
        const __m512i lanes = _mm512_load_si512(drawn + q), limit = _mm512_set1_epi32(static_cast<int32_t>(call.dropped));
        bits |= uint64_t{_mm512_cmpge_epu32_mask(lanes, limit)} << q;
    }
    return bits;
}

// By what probabilities that are kept are multiplied.
inline float kept_factor(const Call<bf16>& call) {
    return static_cast<float>(0x1p32 / (0x1p32 - call.dropped));
}

}  // namespace
#endif
